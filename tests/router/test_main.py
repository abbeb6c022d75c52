"""The router as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

WAIT_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "router", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_told_to_stop(number: signal.Signals) -> None:
    port = free_port()
    process = start("--port", str(port))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            statuses = health_pb2.HealthCheckResponse
            for service, status in (("", statuses.SERVING), ("corun.v1.ClusterService", statuses.NOT_SERVING)):
                request = health_pb2.HealthCheckRequest(service=service)
                assert health.Check(request, timeout=WAIT_S, wait_for_ready=True).status == status
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


def test_a_bad_setting_ends_with_2_and_names_the_limit() -> None:
    process = start("--max-attempts", "0")
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "max_attempts" in errors
    assert "Traceback" not in errors


def test_the_seed_key_may_come_from_the_environment_and_is_never_shown() -> None:
    process = start(CORUN_SEED_KEY="not hexadecimal")
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "CORUN_SEED_KEY: seed_key = 15 characters: must be up to 64 bytes" in errors
    assert "not hexadecimal" not in errors
