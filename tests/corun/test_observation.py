"""The port on which a process is watched: from its first moment to its last, also while its loop stands still."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corun.config.fields import MemberConfig
from corun.errors import UnavailableError
from corun.observe import endpoints
from corun.observe.endpoints import LIVEZ, READYZ, STARTEDZ, Observation, observed
from corun.observe.stages import Reader
from tests.probing import probe

WAIT_S = 60.0
WATCHED = MemberConfig(metrics_port=0)
SERVICE = "corun.v1.DecodeService"


def ask(observation: Observation, path: str) -> int:
    return probe(observation.metrics.port, path, WAIT_S)


def while_the_loop_stands_still(call: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result(WAIT_S)


async def test_a_process_is_alive_while_it_loads_and_its_loop_stands_still() -> None:
    async with observed(WATCHED) as observation:
        said = {path: while_the_loop_stands_still(ask, observation, path) for path in (LIVEZ, STARTEDZ, READYZ)}
        assert said == {LIVEZ: 200, STARTEDZ: 503, READYZ: 503}
        url = f"http://127.0.0.1:{observation.metrics.port}/metrics"
        text = while_the_loop_stands_still(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read().decode())
        assert "process_cpu_seconds_total " in text


async def test_a_process_that_ends_needs_no_restart() -> None:
    observation = Observation(WATCHED, SERVICE)
    await observation.start()
    observation.note_started()
    observation.health.set("", True)
    assert await asyncio.to_thread(ask, observation, READYZ) == 503, "its own service is not there yet"
    observation.health.set(SERVICE, True)
    assert await asyncio.to_thread(ask, observation, READYZ) == 200
    observation.health.end()
    said = {path: await asyncio.to_thread(ask, observation, path) for path in (LIVEZ, STARTEDZ, READYZ)}
    assert said == {LIVEZ: 200, STARTEDZ: 200, READYZ: 503}
    port = observation.metrics.port
    await observation.stop()
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) != 0


async def test_a_stop_that_is_cancelled_closes_the_port_all_the_same() -> None:
    observation = Observation(WATCHED)
    await observation.start()
    running = observation.metrics._running
    assert running is not None
    stopping = asyncio.ensure_future(observation.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait((stopping,))
    deadline = time.monotonic() + WAIT_S
    while running[0].socket.fileno() != -1:
        assert time.monotonic() < deadline, "the port is still open"
        await asyncio.sleep(0.01)


async def test_a_client_that_sends_nothing_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("corun.observe.metrics._Handler.timeout", 0.1)
    async with observed(WATCHED) as observation:
        with socket.create_connection(("127.0.0.1", observation.metrics.port), timeout=WAIT_S) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b"", "the server closes the connection"
        assert await asyncio.to_thread(ask, observation, LIVEZ) == 200
    assert capfd.readouterr().err == ""


async def test_a_loop_that_stands_still_after_the_start_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with observed(WATCHED) as observation:
        observation.note_started()
        assert await asyncio.to_thread(ask, observation, LIVEZ) == 200
        with monkeypatch.context() as patch:
            patch.setattr(endpoints, "LOOP_TIMEOUT_S", 0.5)
            assert while_the_loop_stands_still(ask, observation, LIVEZ) == 503
        assert await asyncio.to_thread(ask, observation, LIVEZ) == 200


async def test_a_port_that_is_taken_is_said_and_without_one_nothing_listens() -> None:
    async with observed(WATCHED) as observation, observed(MemberConfig()) as silent:
        late = Observation(MemberConfig(metrics_port=observation.metrics.port))
        with pytest.raises(UnavailableError, match="metrics cannot listen"):
            await late.start()
        assert late.metrics.port == silent.metrics.port == 0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_the_address_may_be_one_of_ipv6() -> None:
    async with observed(MemberConfig(metrics_port=0, metrics_host="::1")) as observation:
        assert await asyncio.to_thread(probe, observation.metrics.port, LIVEZ, WAIT_S, "[::1]") == 200


async def test_probes_end_when_the_loop_is_closed() -> None:
    async with observed(WATCHED) as observation:
        observation._loop = asyncio.new_event_loop()
        observation._loop.close()
        began = time.monotonic()
        assert await asyncio.to_thread(ask, observation, LIVEZ) == 503
        assert time.monotonic() - began < endpoints.LOOP_TIMEOUT_S


def test_a_stage_is_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "from corun.observe import stages; print('noise', flush=True); stages.enter('one'); stages.enter('two')"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, stderr=file, check=True, timeout=60)
    assert Reader(log).stage(0) == "two"


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"stage: one\nnoise stage: not one\nstage: tw")
    reader = Reader(log)
    assert reader.stage(0) == "one"
    with log.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert (reader.stage(0), reader.stage(0)) == ("two", "two")
    # A process that is started again has no stage yet.
    end = log.stat().st_size
    assert reader.stage(end) == ""
    with log.open("ab") as file:
        file.write(b"stage: again\n")
    assert reader.stage(end) == "again"
    # The log may lie in a directory that something clears now and then; that must not end who asks, nor the cluster.
    log.unlink()
    assert reader.stage(end) == "again"


def test_a_line_longer_than_is_looked_at_hides_nothing_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 2**21 + b"\nstage: one\n")
    reader = Reader(log)
    assert [reader.stage(0) for _ in range(3)][-1] == "one"
