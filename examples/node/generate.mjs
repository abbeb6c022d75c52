// Stream one generation from a router.
//
//     cd examples/node && npm ci
//     node generate.mjs --seed 42 "Once upon a time"
//
// --json prints each message as a line of JSON. An error is one line of JSON, and the exit code is 1. Ctrl-C cancels the
// call, which gives its slot back.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { bearer, connect, problem } from "./corun.mjs";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    router: { type: "string", default: "127.0.0.1:50051" },
    seed: { type: "string" },
    "max-tokens": { type: "string", default: "64" },
    temperature: { type: "string", default: "1" },
    "timeout-s": { type: "string", default: "300" },
    "tls-ca": { type: "string" },
    "token-file": { type: "string" },
    json: { type: "boolean", default: false },
  },
});
const token = values["token-file"] ? readFileSync(values["token-file"], "utf-8").trim() : "";
const request = {
  text: positionals.join(" "),
  seed: values.seed,
  sampling_params: { max_tokens: Number(values["max-tokens"]), temperature: Number(values.temperature), logprobs: true },
};
const client = connect(values.router, { ca: values["tls-ca"] });
const call = client.Generate(request, bearer(token), { deadline: Date.now() + 1000 * Number(values["timeout-s"]) });
process.on("SIGINT", () => call.cancel());
call.on("data", (message) => {
  if (values.json) console.log(JSON.stringify(message));
  else process.stdout.write(message.text + (message.receipt ? `\nseed ${message.seed}, ${message.receipt.output_digest}\n` : ""));
});
call.on("error", (error) => {
  console.error(JSON.stringify(problem(error)));
  process.exitCode = 1;
});
call.on("close", () => client.close());
