"""Short runs of chaos over fake engines, and what chaos is made of: schedules, figures, and the proxy in between."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from corun.testing.model import write_tokenizer
from router.output import SampleOutput
from tests.chaos.fakes import Fakes, under_chaos
from tests.chaos.faults import CLIENTS, Target, draw, nodes
from tests.chaos.processes import Processes
from tests.chaos.report import Hit, Report, Usage, growth, quantiles
from tests.proxy import CuttingProxy

KINDS = Processes.kinds
MEMBERS = ("r0", "r1", *nodes(pairs=2, colocated=1))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_is_the_right_one(tmp_path: Path, seed: int) -> None:
    async with under_chaos(write_tokenizer(tmp_path), seed) as chaos:
        report = await chaos.run(chaos.plan(60), clients=8)
    assert (report.wrong, report.failed, report.leaked) == ([], [], [])
    assert report.completed > 20
    assert report.vanished > 0
    assert set(report.faults) == set(Fakes.kinds)
    assert {hit.target[0] for hit in report.hits} == set("pdc" + CLIENTS[0])
    assert report.as_dict()["fault_count"] == 60


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_colocated_nodes_alone_serve_through_faults(tmp_path: Path) -> None:
    async with under_chaos(write_tokenizer(tmp_path), 3, pairs=0, colocated=2) as chaos:
        report = await chaos.run(chaos.plan(30), clients=8)
    assert (report.wrong, report.failed, report.leaked) == ([], [], [])
    assert report.completed > 10


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_without_replay_it_would_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a router that goes on with a new run as if it were the old one."""
    monkeypatch.setattr(SampleOutput, "restart", lambda output: None)
    async with under_chaos(write_tokenizer(tmp_path), 1) as chaos:
        report = await chaos.run(chaos.plan(60), clients=8)
    assert report.wrong or report.failed


def test_a_schedule_is_drawn_by_its_seed_for_members_of_its_roles() -> None:
    plan = draw(KINDS, 1, 1000, MEMBERS)
    assert plan == draw(KINDS, 1, 1000, MEMBERS) != draw(KINDS, 2, 1000, MEMBERS)
    assert {planned.kind for planned in plan} == {name for name, kind in KINDS.items() if kind.weight}
    for planned in plan:
        assert planned.target == CLIENTS if not KINDS[planned.kind].roles else planned.target in MEMBERS
        assert planned.target == CLIENTS or planned.target[0] in KINDS[planned.kind].roles
    assert {planned.kind for planned in draw(KINDS, 1, 20, MEMBERS, ["stop engine"])} == {"stop engine"}


def test_a_member_may_be_lost_while_others_do_its_work() -> None:
    class Mixed(Target):
        def names(self, roles: str = "rpdc") -> list[str]:
            return [name for name in ("r0", "r1", "p0", "d0", "c0") if name[0] in roles]

    target = Mixed()
    assert all(target.may_lose([name]) for name in target.names())
    target.hit = {"p0"}
    assert [name for name in target.names() if not target.may_lose([name])] == ["c0"]
    target.hit = {"c0", "r1"}
    assert [name for name in target.names("rpd") if not target.may_lose([name])] == ["r0", "p0", "d0"]


def test_lasting_members_are_hit_but_never_replaced() -> None:
    plan = draw(KINDS, 1, 1000, MEMBERS, lasting=("r0", "p0", "d0"))
    assert {planned.target for planned in plan if KINDS[planned.kind].replaces} == {"r1", "p1", "d1", "c0"}
    assert {planned.target for planned in plan} == {*MEMBERS, CLIENTS}
    assert not any(KINDS[planned.kind].all_of_role for planned in plan)


def test_growth_is_named_and_a_new_life_is_compared_with_nothing() -> None:
    before = Usage(life=1, memory_mib=100.0, engine_mib=0.0, fds=30, threads=9, tasks=12, kv_blocks=0)
    leaked = replace(before, tasks=500, kv_blocks=1)
    assert growth({"d0": before}, {"d0": replace(before, fds=40, memory_mib=110.0)}) == []
    assert growth({"d0": before}, {"d0": leaked}) == ["d0 has tasks 500, and had 12", "d0 has kv_blocks 1, and had 0"]
    assert growth({"d0": before}, {"d0": replace(leaked, life=2)}) == []


def test_figures_and_exit_codes() -> None:
    assert quantiles([]) == {}
    assert quantiles([float(i) for i in range(100, 0, -1)]) == {"p50": 51.0, "p99": 100.0, "max": 100.0, "count": 100}
    hit = Hit(kind="kill", target="d0", at=1.0, pauses_s=[0.5, 2.0])
    assert Report(seed=1, hits=[hit], faults=Counter(kill=1)).exit_code == 0
    assert Report(seed=1, leaked=["p0 left 1 processes"]).exit_code == 1
    assert Report(seed=1, failed=["request 1"], wrong=["request 2"]).exit_code == 3
    assert hit.as_dict()["longest_pause_s"] == 2.0


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_proxy_cuts_what_is_open_and_silence_and_delay_lose_nothing(echo: str) -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"x")
        return await asyncio.wait_for(reader.read(1), 10)

    async with CuttingProxy(echo) as proxy:
        host, _, port = proxy.address.rpartition(":")
        stream = await asyncio.open_connection(host, int(port))
        assert await ask(*stream) == b"x"
        assert proxy.cut() == 1
        with suppress(ConnectionError):
            assert await asyncio.wait_for(stream[0].read(1), 10) == b""
        stream[1].close()
        stream = await asyncio.open_connection(host, int(port))
        assert await ask(*stream) == b"x"
        for hold in (lambda: proxy.silence(0.2), lambda: setattr(proxy, "delay_s", 0.1)):  # There and back.
            hold()
            began = time.monotonic()
            assert await ask(*stream) == b"x"
            assert time.monotonic() - began >= 0.19
        stream[1].close()
