"""The life of a node process, around a role without an engine: serve, drain, stop, and what ends it early."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.config.fields import PrefillConfig
from corun.errors import DataLossError, UnavailableError
from corun.node import kept
from corun.node import life as life_module
from corun.node.certificate import Certificate
from corun.node.life import Role, live, live_and_leave, node_info, node_ref, start_tracing
from corun.observe.endpoints import observed
from corun.observe.metrics import Metrics
from corun.rpc.channel import channel
from corun.types import Freedom, FreedomStatus, NodeInfo, NodeLoad, NodeRef, NodeRole
from tests.answers import until
from tests.node.scripted_router import DEADLINE_S, INFO, Router, serving
from tests.probing import probe

SERVICE, OTHER_SERVICE = "corun.v1.PrefillService", "corun.v1.DecodeService"


class Side:
    """Engine and service of a role in one: busy while `busy` is set, and without an answer while it hangs. Its load
    cannot be read once `failure` is set."""

    steps = 0

    def __init__(self, finding: str = "", info: NodeInfo = INFO) -> None:
        self.facts = SimpleNamespace(finding=finding)
        self.info = info
        self.on_death: Callable[[], None] = lambda: None
        self.on_finding: Callable[[str], None] = lambda finding: None
        self.stopped = self.hanging = self.draining = self.busy = False
        self.closed = ""
        self.given_up: list[str] = []
        self.freedoms = (FreedomStatus(name="packed"), FreedomStatus(name="chunks"))
        self.failure: Exception | None = None

    def role(self, service_name: str) -> Role:
        return Role(
            engine=self,
            service=self,
            service_name=service_name,
            register=lambda *_: None,
            info=lambda address: replace(
                self.info, address=address, finding=self.facts.finding, freedoms=self.freedoms
            ),
            metrics=Metrics(f"corun_test_{self.info.role.value}_"),
        )

    async def answer(self) -> None:
        while self.hanging:  # noqa: ASYNC110  # It behaves as a stopped process, which does not know that it is stopped.
            await asyncio.sleep(0.002)

    def computed_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.stopped = True

    async def load(self) -> NodeLoad:
        if self.failure:
            raise self.failure
        return NodeLoad(queued_prompt_tokens=int(self.busy))

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.busy = False


class Life(Side):
    """A running node and the router it registered with. It is the node's only role, or its first one."""

    def __init__(self, router: Router, address: str, finding: str = "", *others: Side, **settings: Any) -> None:
        super().__init__(finding)
        self.router = router
        self.stop = asyncio.Event()
        settings = {"drain_grace_s": DEADLINE_S, **settings}
        config = PrefillConfig(model="/models/tiny", router=(address,), **settings)
        roles = [self.role(SERVICE), *(other.role(OTHER_SERVICE) for other in others)]
        self.task = asyncio.create_task(self._live(config, roles))

    async def _live(self, config: PrefillConfig, roles: list[Role]) -> None:
        async with observed(config) as self.observation:
            await live(config, roles, self.stop, self.observation)

    async def health(self, service: str = SERVICE) -> Any:
        async with channel(self.router.registered[0].address) as connection:
            stub = health_pb2_grpc.HealthStub(connection)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def probes(self) -> dict[str, int]:
        """Return the answers of the probes, by path."""
        port = self.observation.metrics.port
        return {path: await asyncio.to_thread(probe, port, path) for path in ("/livez", "/startedz", "/readyz")}

    async def end(self) -> None:
        """Return when the node has ended; raise what it raised."""
        await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)


@asynccontextmanager
async def living(
    monkeypatch: pytest.MonkeyPatch, finding: str = "", *others: Side, **settings: Any
) -> AsyncIterator[Life]:
    monkeypatch.setattr("corun.node.membership.RETRY_S", 0.01)
    router = Router()
    async with serving(router) as server:
        life = Life(router, server.address, finding, *others, **settings)
        names = {side.info.ref.node_id for side in (life, *others)}
        await until(lambda: life.task.done() or names <= {beat.ref.node_id for beat in router.beats})
        yield life
        life.busy = life.hanging = False
        life.stop.set()
        await asyncio.wait((life.task,), timeout=DEADLINE_S)


@pytest.fixture
async def life(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    async with living(monkeypatch) as life:
        yield life


PROBES = {"/livez": 200, "/startedz": 200, "/readyz": 503}
"""The probe answers of a node that takes no work, but has no other fault."""


async def test_a_node_that_fails_its_self_test_says_so_and_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes do not restart it: a restarted node would fail again, and nobody could ask it why."""
    forgotten: list[None] = []
    monkeypatch.setattr(kept, "forget", lambda: forgotten.append(None))
    async with living(monkeypatch, finding="the KV of layer 3 moved", metrics_port=0) as life:
        assert life.router.registered[0].finding == "the KV of layer 3 moved"
        assert [await life.health(), await life.health("")] == ["NOT_SERVING", "NOT_SERVING"]
        assert await life.probes() == PROBES
        life.stop.set()
        await life.end()
        assert life.stopped
    assert forgotten


async def test_a_node_drains_before_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running work ends first. Until then routers see a draining node, and its health is NOT_SERVING."""
    async with living(monkeypatch, metrics_port=0) as life:
        assert [await life.health(), await life.health("")] == ["SERVING", "SERVING"]
        assert await life.probes() == {**PROBES, "/readyz": 200}
        assert not life.router.beats[-1].draining
        life.busy = True
        life.stop.set()
        await until(lambda: life.router.beats[-1].draining)
        assert life.draining
        assert [await life.health(), await life.health("")] == ["NOT_SERVING", "NOT_SERVING"]
        assert await life.probes() == PROBES
        assert not life.stopped
        life.busy = False
        await life.end()
        assert life.stopped
        with pytest.raises(grpc.aio.AioRpcError):
            await life.health()


@pytest.mark.parametrize(
    ("sign", "reason"),
    [
        # If the engine is idle, only the question for its load shows that it died.
        ("load", "the engine died"),
        ("silence", "the engine has not answered for"),
    ],
)
async def test_an_engine_that_is_dead_or_stays_stuck_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, sign: str, reason: str
) -> None:
    """The node ends at once, whatever is running, and a supervisor starts a new generation."""
    restart = {"engine_timeout_s": 0.05, "engine_restart_s": 0.2} if sign == "silence" else {}
    async with living(monkeypatch, **restart) as life:
        life.hanging = sign == "silence"
        life.failure = RuntimeError("the engine is dead") if sign == "load" else None
        with pytest.raises(UnavailableError, match=reason):
            await life.end()
        assert life.stopped


def test_every_life_has_its_own_generation() -> None:
    config = PrefillConfig(model="/models/tiny", node_id="p0")
    refs = [node_ref(config, NodeRole.PREFILL) for _ in range(3)]
    assert {ref.node_id for ref in refs} == {"p0"}
    assert len({ref.generation for ref in refs}) == 3
    unnamed = node_ref(PrefillConfig(model="/models/tiny"), NodeRole.PREFILL)
    assert "prefill" in unnamed.node_id


def stuck(life: Life) -> str:
    """Return the reason for being stuck in the last heartbeat; empty if it was not."""
    return str(life.router.beats[-1].stuck)


async def until_health(life: Life, expected: str) -> None:
    async def poll() -> None:
        while await life.health() != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), DEADLINE_S)


async def test_a_stuck_node_that_is_told_to_stop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck engine runs nothing that the node could wait for."""
    async with living(monkeypatch, engine_timeout_s=0.05) as life:
        life.hanging = True
        await until(lambda: bool(stuck(life)))
        life.busy = True
        life.stop.set()
        await life.end()


async def test_an_engine_that_dies_in_a_drain_ends_it(life: Life) -> None:
    """The node was told to stop, and it has stopped, so the dead engine is no error."""
    life.busy = True
    life.stop.set()
    await until(lambda: life.router.beats[-1].draining)
    life.failure = RuntimeError("the engine is dead")
    await life.end()
    assert life.stopped


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (UnavailableError("the engine died"), 1),
        (DataLossError("it gave other bits"), 3),
        (asyncio.CancelledError(), 1),
    ],
)
async def test_exit_codes(error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal, which cancels the node, ends the process by the same way out."""

    async def ended(*_: Any) -> None:
        assert gc.get_freeze_count() > 0, "collections look at all that the engine has loaded"
        if error is not None:
            raise error

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(life_module, "live", ended)
    monkeypatch.setattr(life_module.os, "_exit", leave)
    monkeypatch.setattr(life_module.logging, "shutdown", lambda: None)
    gc.unfreeze()
    with pytest.raises(SystemExit) as caught:
        await live_and_leave(PrefillConfig(model="m"), None, asyncio.Event(), None)  # type: ignore[arg-type]
    gc.unfreeze()
    assert caught.value.code == code


def test_an_engine_does_not_inherit_what_asks_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With those variables, vLLM's processes would export spans of their own."""
    for name, value in (("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a:4317")):
        monkeypatch.setenv(name, value)
    start_tracing(INFO.ref, NodeRole.PREFILL)
    assert [name for name in os.environ if name.startswith("OTEL_")] == []


def test_a_node_is_reached_where_it_listens_or_where_it_says() -> None:
    facts = SimpleNamespace(kv_blocks=1, block_size=16, max_model_len=64, vocab_size=8, finding="")
    contract = SimpleNamespace(canonical_json=lambda: "{}")
    certificate = Certificate.of_ranks({Freedom.CHUNKS: "why"})
    engine = SimpleNamespace(facts=facts, contract=contract, certificate=certificate, engine_id="own")
    for advertise, reached in (("", "10.0.0.7:4000"), ("proxy:1", "proxy:1")):
        config = PrefillConfig(model="/models/tiny", advertise=advertise)
        info = node_info(config, node_ref(config, NodeRole.PREFILL), NodeRole.PREFILL, engine)
        assert info("10.0.0.7:4000").address == reached


# A colocated node: two roles, one engine.

DECODE = replace(INFO, ref=NodeRef(node_id="d0", generation=INFO.ref.generation), role=NodeRole.DECODE, nixl=None)


@asynccontextmanager
async def both_living(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[tuple[Life, Side]]:
    other = Side(info=DECODE)
    async with living(monkeypatch, "", other, **settings) as life:
        yield life, other
        other.busy = other.hanging = False


def last(life: Life) -> dict[str, Any]:
    """Return the last heartbeat of each role, by the node's id."""
    return {beat.ref.node_id: beat for beat in life.router.beats}


async def test_both_roles_register_and_drain_as_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stops when neither has work left, and each engine side is closed once, the last role first: it asks the
    engine for figures before it ends it."""
    closed: list[Side] = []
    async with both_living(monkeypatch) as (life, other):
        for side in (life, other):
            monkeypatch.setattr(side, "close", lambda side=side: asyncio.sleep(0, closed.append(side)))
        assert sorted(info.ref.node_id for info in life.router.registered) == ["d0", "p0"]
        assert len({(info.address, info.ref.generation) for info in life.router.registered}) == 1
        assert [await life.health(name) for name in ("", SERVICE, OTHER_SERVICE)] == ["SERVING"] * 3
        life.busy = other.busy = True
        life.stop.set()
        await until(lambda: all(beat.draining for beat in last(life).values()))
        assert life.draining
        assert other.draining
        assert [await life.health(name) for name in ("", SERVICE, OTHER_SERVICE)] == ["NOT_SERVING"] * 3
        life.busy = False
        beats = len(life.router.beats)
        await until(lambda: len(life.router.beats) > beats + 4)
        assert not life.task.done(), "the other role has work"
        other.busy = False
        await life.end()
        assert closed == [other, life]


@pytest.mark.parametrize("side", [0, 1])
async def test_work_of_either_role_is_given_up_after_the_grace(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    async with both_living(monkeypatch, drain_grace_s=0.1) as sides:
        life, other = sides
        sides[side].busy = True
        life.stop.set()
        await life.end()
        assert life.given_up == other.given_up == ["it was told to stop 0.1 s ago"]


async def test_both_roles_are_quarantined_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told by its own heartbeat, and the node gives up its work and ends once."""
    async with both_living(monkeypatch) as (life, other):
        life.busy = other.busy = True
        life.router.quarantined = "node d0 gave other bits"
        with pytest.raises(DataLossError, match="node d0 gave other bits"):
            await life.end()
        (reason,) = life.given_up
        assert other.given_up == [reason]
        assert {name: (beat.stuck, beat.draining) for name, beat in last(life).items()} == dict.fromkeys(
            ("p0", "d0"), (reason, True)
        )
        assert life.stopped
        assert other.stopped


@pytest.mark.parametrize("side", [0, 1])
async def test_the_engine_of_either_role_ends_both(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    async with both_living(monkeypatch) as sides:
        life, other = sides
        life.busy = other.busy = True
        sides[side].on_death()
        sides[1 - side].on_death()
        with pytest.raises(UnavailableError, match="the engine died"):
            await life.end()
        assert {beat.stuck for beat in last(life).values()} == {"the engine died"}
        assert life.stopped
        assert other.stopped


@pytest.mark.parametrize("side", [0, 1])
async def test_a_finding_of_either_role_takes_both_out_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: int
) -> None:
    """The process stays up to be read. An engine that was stuck and answers again changes nothing of it."""
    async with both_living(monkeypatch, engine_timeout_s=0.05, metrics_port=0) as sides:
        life, other = sides
        life.busy = other.busy = True
        sides[side].freedoms = (FreedomStatus(name="packed", refused="other KV"),)
        sides[side].on_finding("other KV when it runs alone")
        await until(lambda: bool(life.given_up and other.given_up))
        await until(lambda: len(life.router.registered) == 4)
        told = {info.ref.node_id: info.freedoms for info in life.router.registered[2:]}
        assert told == {"p0": life.freedoms, "d0": other.freedoms}
        await until_health(life, "NOT_SERVING")
        assert await life.probes() == PROBES
        other.hanging = True
        await until(lambda: "its engine is stuck" in caplog.text)
        other.hanging = False
        await until(lambda: "the engine answers again" in caplog.text)
        beats = len(life.router.beats)
        await until(lambda: len(life.router.beats) > beats + 4)
        assert {beat.stuck for beat in last(life).values()} == {"other KV when it runs alone"}
        assert life.closed == other.closed == "other KV when it runs alone"
        assert life.given_up == other.given_up == [life.closed]
        assert not life.task.done()


async def test_a_stuck_engine_is_said_of_both_at_once_and_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes do not restart the node: the engine may go on; if it does not, the node ends by itself."""
    async with both_living(monkeypatch, engine_timeout_s=0.1, metrics_port=0) as (life, other):
        life.busy = other.busy = other.hanging = True
        reason = "its engine is stuck: no answer and no step for 0.1 s"
        await until(lambda: {beat.stuck for beat in last(life).values()} == {reason})
        await until(lambda: bool(life.given_up and other.given_up))
        assert (life.closed, life.given_up, other.given_up) == (reason, [reason], [reason])
        await until_health(life, "NOT_SERVING")
        assert await life.probes() == PROBES
        other.hanging = False
        await until(lambda: not any(beat.stuck for beat in last(life).values()))
        assert life.closed == other.closed == ""
        assert not life.task.done()
        await until_health(life, "SERVING")
