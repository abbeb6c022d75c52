"""The router as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.machine import free_port
from tests.probing import probe
from tests.scraping import families, values

WAIT_S = 60.0


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "router", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_and_can_be_watched_until_told_to_stop(number: signal.Signals) -> None:
    port, metrics = free_port(), free_port()
    process = start("--port", str(port), "--metrics-port", str(metrics))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            statuses = health_pb2.HealthCheckResponse
            for service, status in (("", statuses.SERVING), ("corun.v1.ClusterService", statuses.NOT_SERVING)):
                request = health_pb2.HealthCheckRequest(service=service)
                assert health.Check(request, timeout=WAIT_S, wait_for_ready=True).status == status
        deadline = time.monotonic() + WAIT_S
        while probe(metrics, "/startedz") != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        said = {path: probe(metrics, path) for path in ("/livez", "/startedz", "/readyz")}
        assert said == {"/livez": 200, "/startedz": 200, "/readyz": 503}, "without nodes it would be sent clients"
        found = values(families(metrics))
        assert (found["corun_router_certified_pair"], found["corun_router_queued_samples"]) == (0, 0)
        assert found["process_cpu_seconds_total"] > 0
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "says"),
    [
        (
            ["--port", "0"],
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            1,
            "OTEL_EXPORTER_OTLP_PROTOCOL = 'http/protobuf': must be grpc",
        ),
        (["--max-attempts", "0"], {}, 2, "max_attempts"),
        ([], {"CORUN_SEED_KEY": "never shown"}, 2, "CORUN_SEED_KEY: seed_key = 11 characters: must be up to 64 bytes"),
    ],
)
def test_what_cannot_be_used_ends_the_start(
    arguments: list[str], environment: dict[str, str], code: int, says: str
) -> None:
    process = start(*arguments, **environment)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert says in errors
    assert "Traceback" not in errors
    assert "never shown" not in errors
