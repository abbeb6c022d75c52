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


def test_can_be_watched_from_outside() -> None:
    metrics = free_port()
    process = start("--port", "0", "--metrics-port", str(metrics))
    try:
        deadline = time.monotonic() + WAIT_S
        while probe(metrics, "/startedz") != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        said = {path: probe(metrics, path) for path in ("/livez", "/startedz", "/readyz")}
        assert said == {"/livez": 200, "/startedz": 200, "/readyz": 503}, "without nodes it would be sent clients"
        found = values(families(metrics))
        assert (found["corun_router_certified_pair"], found["corun_router_queued_samples"]) == (0, 0)
        assert found["process_cpu_seconds_total"] > 0
    finally:
        process.kill()
        process.communicate()


def test_traces_that_cannot_be_exported_as_asked_end_the_start() -> None:
    process = start("--port", "0", OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "OTEL_EXPORTER_OTLP_PROTOCOL = 'http/protobuf': must be grpc" in errors
    assert "Traceback" not in errors


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
