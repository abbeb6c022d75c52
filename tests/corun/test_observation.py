"""The ports on which a process is watched: from its first moment to its last, also while its loop stands still."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.config.fields import MemberConfig
from corun.errors import UnavailableError
from corun.observe import probes
from corun.observe.endpoints import Observation, observed
from corun.observe.probes import HealthPort
from corun.rpc.health import LIVE, STARTED
from tests.probing import probe

WAIT_S = 60.0
WATCHED = MemberConfig(metrics_port=0, health_port=0)


def ask(observation: Observation, service: str) -> str:
    assert observation.port is not None
    return probe(observation.port.port, service, WAIT_S)


def while_the_loop_stands_still(call: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result(WAIT_S)


async def test_a_process_is_alive_while_it_loads() -> None:
    async with observed(WATCHED) as observation:
        said = {name: while_the_loop_stands_still(ask, observation, name) for name in (LIVE, STARTED, "", "none")}
        assert said == {LIVE: "SERVING", STARTED: "NOT_SERVING", "": "NOT_SERVING", "none": "NOT_FOUND"}


async def test_a_process_that_ends_needs_no_restart() -> None:
    async with observed(WATCHED) as observation:
        observation.note_started()
        observation.health.set("corun.v1.DecodeService", True)
        assert await asyncio.to_thread(ask, observation, "corun.v1.DecodeService") == "SERVING"
        observation.health.end()
        said = {name: await asyncio.to_thread(ask, observation, name) for name in observation.health._statuses}
        assert said == {LIVE: "SERVING", STARTED: "SERVING", "": "NOT_SERVING", "corun.v1.DecodeService": "NOT_SERVING"}


async def test_a_loop_that_stands_still_after_the_start_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOOP_TIMEOUT_S", 0.5)
    async with observed(WATCHED) as observation:
        observation.note_started()
        assert await asyncio.to_thread(ask, observation, LIVE) == "SERVING"
        assert while_the_loop_stands_still(ask, observation, LIVE) == "NOT_SERVING"
        assert await asyncio.to_thread(ask, observation, LIVE) == "SERVING"


async def test_only_checks_are_answered() -> None:
    """A watcher would hold a thread for as long as it likes."""

    def watch(port: int) -> grpc.StatusCode:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as link, pytest.raises(grpc.RpcError) as caught:
            next(health_pb2_grpc.HealthStub(link).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
        return caught.value.code()

    async with observed(WATCHED) as observation:
        assert observation.port is not None
        assert await asyncio.to_thread(watch, observation.port.port) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_that_is_taken_is_said_and_nothing_stays() -> None:
    async with observed(WATCHED) as observation:
        assert observation.port is not None
        taken = MemberConfig(metrics_port=0, health_port=observation.port.port)
        late = Observation(taken)
        with pytest.raises(UnavailableError, match=r"health checks cannot be answered on 127\.0\.0\.1"):
            await late.start()
        assert late.metrics.port == 0
        with pytest.raises(UnavailableError, match="metrics cannot listen"):
            await Observation(MemberConfig(metrics_port=observation.metrics.port)).start()


async def test_nothing_listens_unless_asked_for() -> None:
    async with observed(MemberConfig()) as observation:
        assert observation.port is None
        assert observation.metrics.port == 0


async def test_both_ports_are_closed_at_the_end() -> None:
    async with observed(WATCHED) as observation:
        assert observation.port is not None
        ports = observation.port.port, observation.metrics.port
    assert await asyncio.to_thread(_free, ports) == [True, True]


def _free(ports: tuple[int, ...]) -> list[bool]:
    import socket

    found = []
    for port in ports:
        with socket.socket() as probe:
            found.append(probe.connect_ex(("127.0.0.1", port)) != 0)
    return found


async def test_metrics_are_answered_while_the_loop_stands_still() -> None:
    def scrape(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    async with observed(WATCHED) as observation:
        text = while_the_loop_stands_still(scrape, observation.metrics.port)
        assert "process_cpu_seconds_total " in text


async def test_checks_end_when_the_loop_is_closed() -> None:
    observation = Observation(WATCHED)
    await observation.start()
    answering = HealthPort(observation.health, "127.0.0.1", 0)._probe
    answering.loop = asyncio.new_event_loop()
    answering.loop.close()
    began = time.monotonic()
    assert answering.Check(health_pb2.HealthCheckRequest(service=LIVE), None).status == 2
    assert time.monotonic() - began < probes.LOOP_TIMEOUT_S
    await observation.stop()
