"""What the fleet makes of Ray's answers, over a Ray that is a table."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch import fleet, runtime, supervisor
from corun.launch.fleet import Fleet, Order
from corun.launch.members import ProcessSpec, members
from corun.launch.placement import Share
from corun.launch.supervisor import ProcessState, ProcessStatus
from tests.machine import wait_for

POOL = PoolSpec(common={"model": "m", "drain_grace_s": 100.0}, router={"drain_grace_s": 5.0})
ROUTER, PREFILL, DECODE = members(ClusterSpec(pools=(POOL,)))


class DiedError(Exception):
    """What Ray says of an actor that died."""


class RayError(Exception):
    """What Ray says of an actor that it starts again."""


class Actor:
    """Answers once it is told what. A question is the actor itself."""

    def __init__(self) -> None:
        self.answer: ProcessStatus | Exception | None = None
        self.is_killed = False
        self.stop = SimpleNamespace(remote=lambda: None)
        self.status = SimpleNamespace(remote=lambda: self)


class Ray:
    """The part of ray that a fleet uses."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.ids = ["first"]
        self.is_placed = False
        self.exceptions = SimpleNamespace(
            ActorDiedError=DiedError, ActorUnschedulableError=DiedError, RayActorError=RayError
        )
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(
                NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id,
                PlacementGroupSchedulingStrategy=lambda handle, **_: handle,
            ),
            placement_group=lambda bundles, strategy: bundles,
            remove_placement_group=lambda handle: handle.clear(),
            placement_group_table=lambda handle: {"state": "CREATED" if self.is_placed else "PENDING"},
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node_id, "NodeManagerAddress": "10.0.0.1", "Alive": True} for node_id in self.ids]

    def remote(self, cls: type[Any]) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: self._actor()))

    def _actor(self) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, questions: list[Actor], **_: Any) -> tuple[list[Actor], list[Actor]]:
        return [actor for actor in questions if actor.answer is not None], []

    def get(self, question: Actor) -> ProcessStatus:
        if isinstance(question.answer, Exception):
            raise question.answer
        assert question.answer is not None
        return question.answer

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(runtime, "api", lambda: made)
    return made


def order(member: ProcessSpec, gpus: float = 0.0) -> Order:
    return Order(pool=POOL, member=member, routers=(), logs=Path(), share=Share(gpus))


def status(state: ProcessState) -> ProcessStatus:
    return ProcessStatus(state=state)


def test_a_router_starts_again_on_a_host_that_came_back_at_once(ray: Ray) -> None:
    """At its address, in another life: Ray never starts the actor again that was bound to the first one."""
    tested = Fleet()
    tested.start([order(ROUTER)], {ROUTER: "10.0.0.1"})
    ray.actors[0].answer = DiedError()
    assert tested.statuses()[ROUTER].state is ProcessState.FAILED  # The host lives: its supervisor failed.
    assert tested.forget_ended() == []
    ray.ids = ["second"]
    tested.statuses()
    assert tested.forget_ended() == [ROUTER]
    tested.start([order(ROUTER)], {ROUTER: "10.0.0.2"})  # No such host.
    assert tested.running == []


def test_a_pair_waits_for_gpus_and_may_be_stopped_before_it_has_them(ray: Ray) -> None:
    tested = Fleet()
    tested.start([order(PREFILL, 1.0), order(DECODE, 1.0)], {})
    for actor in ray.actors:
        actor.answer = RayError()  # Ray starts it elsewhere.
    details = {member.name: found.detail for member, found in tested.statuses().items()}
    assert details == dict.fromkeys(details, "no machine has 1 free GPU for each of prefill-0, decode-0")
    tested.stop([DECODE])
    assert tested.forget_ended() == [DECODE]
    ray.is_placed = True
    assert tested.statuses()[PREFILL].detail == ""
    tested.start([order(DECODE, 1.0)], {})  # It gets its bundle again.
    assert len(tested._groups) == 1


def test_a_node_that_is_stopped_as_soon_as_it_is_placed_drains(ray: Ray) -> None:
    tested = Fleet()
    tested.start([order(PREFILL)], {})
    tested.statuses()
    (actor,) = ray.actors
    actor.answer = status(ProcessState.WAITING)
    tested.statuses()
    actor.answer = None
    tested.stop([PREFILL])
    assert tested.forget_ended() == []  # The process may have started since.
    for state in (ProcessState.RUNNING, ProcessState.STOPPED):
        assert tested.forget_ended() == []
        actor.answer = status(state)
        tested.statuses()
    assert tested.forget_ended() == [PREFILL]
    assert actor.is_killed


def test_every_process_has_its_own_grace(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fleet.time, "monotonic", lambda: now)
    tested = Fleet()
    tested.start([order(ROUTER), order(DECODE)], {ROUTER: "10.0.0.1"})
    for actor in ray.actors:
        actor.answer = status(ProcessState.RUNNING)
    tested.statuses()
    assert [tested.grace_s(of) for of in ([ROUTER], [ROUTER, DECODE], [])] == [15.0, 110.0, 0.0]
    tested.stop([ROUTER, DECODE])
    for now, gone in ((30.0, []), (40.0, [ROUTER]), (120.0, []), (140.0, [DECODE])):  # noqa: B007
        assert tested.forget_ended() == gone


def test_a_process_that_starts_again_finds_the_settings_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its directory, which is below /tmp by default, was cleared of what is old meanwhile."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(runtime, "own_host", lambda: "10.0.0.1")
    shows = "import sys, time; print(open(sys.argv[sys.argv.index('--config') + 1]).read(), flush=True); time.sleep(60)"
    (tmp_path / "shows.py").write_text(shows)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    logs = tmp_path / "logs"
    actor = fleet._Actor(replace(order(DECODE), logs=logs, modules={"decode": "shows"}))

    def said() -> str:
        log = logs / "decode-0.log"
        return log.read_text() if log.exists() else ""

    try:
        wait_for(lambda: "drain_grace_s = 100.0" in said(), "started")
        shutil.rmtree(logs)
        actor.kill()
        wait_for(said, "started again")
        wait_for(lambda: "drain_grace_s = 100.0" in said(), "it has its settings", timeout_s=10.0)
    finally:
        actor.stop()
        actor.stop()


def test_whatever_ray_raises_is_told_in_a_line(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception if it does not start in time (ray/_private/node.py)."""

    def init(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init, raising=False)
    with pytest.raises(UnavailableError, match=r"Ray did not start: The current node timed out during startup\."):
        runtime._init(None, {})
    with pytest.raises(InvalidArgumentError, match=r"ray_address = '': must be HOST:PORT, or auto"):
        runtime._init("", {})


def test_another_ray_in_the_environment_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(runtime, "api", lambda: SimpleNamespace(init=lambda address, **_: addresses.append(address)))
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        for address in (None, "auto", there):
            runtime._init(address, {})
    assert addresses == ["local", "auto", there]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "127.0.0.1:" + "9" * 5000, "a..b:1"])
def test_where_nothing_listens_nobody_waits_for_ray(address: str, ray: Ray) -> None:
    """Ray itself tries for longer than ten minutes, whatever --timeout-s says."""
    with pytest.raises(UnavailableError, match=f"nothing listens at {address}: "):
        runtime._init(address, {})
