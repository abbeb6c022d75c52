"""What the fleet makes of Ray's answers, over a Ray that is a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.launch import fleet, runtime
from corun.launch.fleet import Fleet, Order
from corun.launch.members import ProcessSpec, members
from corun.launch.supervisor import ProcessState, ProcessStatus

POOL = PoolSpec(common={"model": "m", "drain_grace_s": 100.0}, router={"drain_grace_s": 5.0})
ROUTER, PREFILL, DECODE = members(ClusterSpec(pools=(POOL,)))


class DiedError(Exception):
    """As Ray says it of an actor."""


class Question:
    def __init__(self, actor: Actor) -> None:
        self.actor = actor


class Actor:
    """Answers once it is told what."""

    def __init__(self) -> None:
        self.answer: ProcessStatus | Exception | None = None
        self.is_killed = False
        self.stop = SimpleNamespace(remote=lambda: None)
        self.status = SimpleNamespace(remote=lambda: Question(self))


class Ray:
    """The part of ray that a fleet without GPUs uses."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.ids = ["first"]
        self.exceptions = SimpleNamespace(
            ActorDiedError=DiedError, ActorUnschedulableError=DiedError, RayActorError=DiedError
        )
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(
                NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id, PlacementGroupSchedulingStrategy=None
            )
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node_id, "NodeManagerAddress": "10.0.0.1", "Alive": True} for node_id in self.ids]

    def remote(self, cls: type[Any]) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: self._actor()))

    def _actor(self) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, questions: list[Question], **_: Any) -> tuple[list[Question], list[Question]]:
        return [question for question in questions if question.actor.answer is not None], []

    def get(self, question: Question) -> ProcessStatus:
        if isinstance(question.actor.answer, Exception):
            raise question.actor.answer
        assert question.actor.answer is not None
        return question.actor.answer

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(runtime, "api", lambda: made)
    return made


def order(member: ProcessSpec) -> Order:
    return Order(pool=POOL, member=member, routers=(), logs=Path())


def status(state: ProcessState) -> ProcessStatus:
    return ProcessStatus(name="x", state=state)


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
    assert (order(ROUTER).grace_s, order(DECODE).grace_s) == (15.0, 110.0)
    assert tested.grace_s([ROUTER, DECODE]) == 110.0
    assert tested.grace_s([]) == 0.0
    tested.stop([ROUTER, DECODE])
    for now, gone in ((30.0, []), (40.0, [ROUTER]), (120.0, []), (140.0, [DECODE])):  # noqa: B007
        assert tested.forget_ended() == gone


def test_another_ray_in_the_environment_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(runtime, "api", lambda: SimpleNamespace(init=lambda address, **_: addresses.append(address)))
    for address in (None, "10.0.0.1:6379"):
        runtime._init(address, {})
    assert addresses == ["local", "10.0.0.1:6379"]
