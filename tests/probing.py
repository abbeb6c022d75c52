"""Asking a health port as a kubelet does."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def probe(port: int, service: str, timeout_s: float = 60.0) -> str:
    """What it says of a service: the name of a status, or of the error."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as link:
        check = health_pb2_grpc.HealthStub(link).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
