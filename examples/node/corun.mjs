// A client of a router in JavaScript, made of the proto files alone.

import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

export const PROTOS = process.env.CORUN_PROTOS ?? new URL("../../protos", import.meta.url).pathname;

// The parts of google/rpc/status.proto and error_details.proto that errors of a router have.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
  message FieldViolation { string field = 1; string description = 2; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message RetryInfo { Duration retry_delay = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
`, { keepCase: true }).root;

// Return a stub of ClusterService. 64-bit numbers, such as seeds, are texts: a JavaScript number has 53 bits.
// ca: the file of the authorities of the router's certificate; without it there is no TLS.
export function connect(address, { ca } = {}) {
  const options = { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true };
  const loaded = protoLoader.loadSync("corun/v1/cluster_service.proto", options);
  const { ClusterService } = grpc.loadPackageDefinition(loaded).corun.v1;
  return new ClusterService(address, ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure());
}

// Return the metadata that shows a client's token.
export function bearer(token) {
  const metadata = new grpc.Metadata();
  if (token) metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}

// Return what an error of a call says: its code and message, and where it has them the field, its value and its limit,
// or the seconds after which to come back.
export function problem(error) {
  const found = { code: grpc.status[error.code], message: error.details };
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed) return found;
  for (const { type_url, value } of details.lookupType("Status").decode(packed).details) {
    const kind = type_url.split(".").pop();
    if (!details.get(kind)) continue;
    const detail = details.lookupType(kind).decode(value);
    if (kind === "BadRequest") found.field = detail.field_violations[0].field;
    if (kind === "ErrorInfo") Object.assign(found, detail.metadata);
    if (kind === "RetryInfo") found.retry_after_s = Number(detail.retry_delay.seconds) + detail.retry_delay.nanos / 1e9;
  }
  return found;
}
