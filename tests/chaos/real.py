"""Chaos over real engines: a seeded schedule of faults against a cluster of processes, under a stream of requests.

The right answer of every request is computed first, alone, on the same cluster. Then every stream that completes must
give the same bits, every token once. The resources of each process are measured while all is idle: at the start,
half-way and at the end. Owns the judgement; requests are in `traffic`, faults in `faults`, processes in `processes`.
Tests only.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import aiohttp

from corun import AsyncClient, Condition, CorunError, OverloadedError, UnavailableError
from tests.chaos import resources
from tests.chaos.faults import CLIENTS, KINDS, Planned
from tests.chaos.processes import MAX_QUEUED_SAMPLES, SLOTS, RealCluster, started
from tests.chaos.report import Hit, Report
from tests.chaos.resources import Usage
from tests.chaos.traffic import Case, answered, make_cases, over_http, streamed

READY_AGAIN_S = 60.0
"""The limit for routers to serve again after a fault, and for clients to find one that does."""
WHOLE_AGAIN_S = 240.0
"""The limit for a process to be in use again. Three idle engines keep two cores busy while the fourth one starts."""
REQUEST_TIMEOUT_S = 300.0
PAUSE_S = 0.3
"""The average pause of a client between two requests."""
HTTP_SHARE = 0.2
"""The share of the requests that go through the gateway."""
VERIFY_EVERY_S = 60.0
VERIFY_TIMEOUT_S = 30.0
IDLE_S = 90.0
SETTLE_S = 5.0
"""The wait before a measurement, because channels to replaced processes are closed a little later."""
NUM_CASES = 24
BURST = 3 * (MAX_QUEUED_SAMPLES + 2 * SLOTS)
ALLOWED = ("nodes failed", "may be poison")
"""The texts that an UnavailableError may contain: faults hit `max_attempts` runs of a request."""


@dataclass(kw_only=True, eq=False)
class Stream:
    """A request in flight."""

    task: asyncio.Task[tuple[bytes, ...]] = field(init=False)
    is_timed: bool
    """Whether its pauses count. They do not if it may wait long for a slot anyway."""
    has_begun: bool = False
    hits: list[tuple[Hit, float]] = field(default_factory=list)
    """The faults since its last token, with the time of each."""

    def note_token(self) -> None:
        now = time.monotonic()
        for hit, at in self.hits:
            hit.pauses_s.append(round(now - at, 3))
        self.has_begun = True
        self.hits.clear()


class Chaos:
    """One run."""

    def __init__(self, cluster: RealCluster, seed: int) -> None:
        self.report = Report(seed=seed)
        self.is_cut_short = False
        """Whether no more faults are made. Members that were hit still come back and are judged."""
        self._cluster = cluster
        self._seed = seed
        self._cases: list[Case] = []
        self._streams: list[Stream] = []
        self._repairs: list[asyncio.Task[None]] = []
        self._began = 0.0

    @property
    def members(self) -> list[str]:
        return self._cluster.names()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def run(self, plan: list[Planned], *, clients: int, seconds: float = 0.0) -> Report:
        """Make the faults of a plan; with `seconds`, none of them after that time."""
        async with AsyncClient(list(self._cluster.addresses.values())) as client:
            self._cases = [await answered(client, case) for case in make_cases(NUM_CASES)]
        say(f"{len(self._cases)} answers are known")
        start = await self._measured("start")
        self._began = time.monotonic()
        rest = iter(plan)
        await self._under_load(rest if seconds else islice(rest, len(plan) // 2), clients, seconds / 2)
        middle = await self._measured("half")
        await self._under_load(rest, clients, seconds / 2)
        end = await self._measured("end")
        self.report.grown = {
            "start to half": resources.growth(start, middle),
            "half to end": resources.growth(middle, end),
        }
        await self._check_end(start, end)
        self.report.seconds = round(self._now, 1)
        self.report.ready_again_s = max((hit.ready_s for hit in self.report.hits), default=0.0)
        return self.report

    async def _under_load(self, plan: Iterable[Planned], clients: int, seconds: float) -> None:
        """Run one half: make faults in order beside the traffic, all of them or those that begin within `seconds`."""
        stop = asyncio.Event()
        traffic = [asyncio.create_task(self._client(number, stop)) for number in range(clients)]
        traffic.append(asyncio.create_task(self._verify(stop)))
        over = time.monotonic() + seconds
        for planned in plan:
            if self.is_cut_short or (seconds and time.monotonic() > over):
                break
            await self._hit(planned)
        await asyncio.gather(*self._repairs)
        self._repairs.clear()
        stop.set()
        await asyncio.gather(*traffic)

    async def _measured(self, when: str) -> dict[str, Usage]:
        """Measure every process once the cluster is idle."""
        if held := await self._idle():
            self.report.leaked += [f"{when}: {what}" for what in held]
        await asyncio.sleep(SETTLE_S)
        found = await resources.usage(self._cluster)
        self.report.resources[when] = resources.table(found)
        say(f"{when}: {self.report.resources[when]}")
        return found

    async def _client(self, number: int, stop: asyncio.Event) -> None:
        """Send one request after the other, through the proxies or the gateway."""
        draw = random.Random(f"{self._seed}/{number}")
        routers = [self._cluster.links[name].address for name in self._cluster.names("r")]
        routers = routers[number % len(routers) :] + routers[: number % len(routers)]
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with (
            AsyncClient(routers, timeout_s=REQUEST_TIMEOUT_S, connect_timeout_s=READY_AGAIN_S) as client,
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            while not stop.is_set():
                case = draw.choice(self._cases)
                if draw.random() < HTTP_SHARE:
                    await self._judge_http(session, case)
                else:
                    await self._judge(client, case)
                await asyncio.sleep(draw.expovariate(1 / PAUSE_S))

    async def _verify(self, stop: asyncio.Event) -> None:
        """Ask for a verification now and then. A difference that it finds counts; a refusal or no result does not."""
        draw = random.Random(f"{self._seed}/verify")
        async with AsyncClient(list(self._cluster.addresses.values()), timeout_s=VERIFY_TIMEOUT_S) as client:
            while not stop.is_set():
                cases = draw.sample(self._cases, 2)
                try:
                    results = client.verify([case.verification() for case in cases], [Condition.CROWDED])
                    async for result in results:
                        self._judge_verified(cases[result.case_index], result.match, result.error)
                except CorunError as error:
                    say(f"{self._now:6.1f} s  no verification: {error}")
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), VERIFY_EVERY_S)

    def _judge_verified(self, case: Case, match: bool, error: str) -> None:
        if match:
            self.report.verified += 1
        elif not error:
            self.report.wrong.append(f"{self._now:.1f} s: verification of request {case.number}")

    async def _judge_http(self, session: aiohttp.ClientSession, case: Case) -> None:
        try:
            digests = await over_http(session, self._cluster.gateway, case)
        except OverloadedError:
            self.report.refused += 1
        except CorunError as error:
            self._judge_error(case, error)
        except asyncio.TimeoutError:
            self.report.failed.append(f"{self._now:.1f} s: request {case.number}: no answer over HTTP")
        else:
            self.report.completed += 1
            if digests != case.digests:
                self.report.wrong.append(f"{self._now:.1f} s: request {case.number} over HTTP")

    async def _judge(self, client: AsyncClient, case: Case, *, is_timed: bool = True) -> None:
        stream = Stream(is_timed=is_timed)
        stream.task = asyncio.create_task(self._generate(client, case, stream))
        self._streams.append(stream)
        try:
            bits = await stream.task
        except asyncio.CancelledError:
            self.report.vanished += 1
        except CorunError as error:
            self._judge_error(case, error)
        else:
            self.report.completed += 1
            if bits != case.bits:
                self.report.wrong.append(f"{self._now:.1f} s: request {case.number}")
        finally:
            self._streams.remove(stream)

    def _judge_error(self, case: Case, error: CorunError) -> None:
        said = [text for text in ALLOWED if isinstance(error, UnavailableError) and text in str(error)]
        if said:
            self.report.allowed[f"UnavailableError: {said[0]}"] += 1
        else:
            self.report.failed.append(f"{self._now:.1f} s: request {case.number}: {type(error).__name__}: {error}")

    async def _generate(self, client: AsyncClient, case: Case, stream: Stream) -> tuple[bytes, ...]:
        """Return every sample's bits, put together from the chunks. Ask again if a full queue refuses."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            samples = [bytearray() for _ in case.bits]
            try:
                async for _ in streamed(client, case, samples):
                    stream.note_token()
            except OverloadedError as error:
                self.report.refused += 1
                if time.monotonic() + error.retry_after_s >= deadline:
                    raise
                await asyncio.sleep(max(0.05, error.retry_after_s))
            else:
                return tuple(bytes(ids) for ids in samples)

    async def _hit(self, planned: Planned) -> None:
        """Make one fault as soon as it may happen. Its repair goes on beside the next faults."""
        kind = KINDS[planned.kind]
        targets = self._cluster.names(planned.target[0]) if kind.all_of_role else [planned.target]
        if not await _within(WHOLE_AGAIN_S, lambda: planned.target == CLIENTS or self._may_hit(targets, kind.is_mild)):
            self.report.failed.append(f"{planned}: left out, since others of its role did not come back")
            return
        await asyncio.sleep(planned.wait_s)  # Only now: a returned member gets work before it is hit again.
        hit = Hit(kind=planned.kind, target=planned.target, at=round(self._now, 1))
        say(f"{hit.at:6.1f} s  {len(self.report.hits) + 1}: {planned}")
        self.report.hits.append(hit)
        self.report.faults[planned.kind] += 1
        if planned.target == CLIENTS:
            work = self._hit_clients(planned, hit)
        else:
            self._cluster.hit.update(targets)
            work = self._hit_members(planned, hit, targets)
        self._repairs.append(asyncio.create_task(work))

    def _mark(self, hit: Hit) -> None:
        """Note for every timed stream that the fault comes now."""
        for stream in self._streams:
            if stream.is_timed:
                stream.hits.append((hit, time.monotonic()))

    def _may_hit(self, targets: list[str], is_mild: bool) -> bool:
        """Return whether none of the targets is hit already and, unless the fault is mild, none of their role is.

        So one of their role is left, except in a blackout.
        """
        others = [] if is_mild else self._cluster.names(targets[0][0])
        return self._cluster.hit.isdisjoint([*targets, *others])

    async def _hit_members(self, planned: Planned, hit: Hit, targets: list[str]) -> None:
        """Make the fault, and wait until the members that it hit are in use again."""
        kind = KINDS[planned.kind]
        assert kind.fault is not None
        lives = {name: self._cluster.processes[name].lives for name in targets}
        replaced = {name: await self._cluster.generation(name) if kind.replaces else "" for name in targets}
        began = time.monotonic()
        watch = asyncio.create_task(self._watch_readiness(hit, began))
        self._mark(hit)
        await asyncio.gather(*(kind.fault(self._cluster, name, planned.strength) for name in targets))
        for name in targets:
            process, least = self._cluster.processes[name], lives[name] + kind.replaces
            came = await _within(WHOLE_AGAIN_S, lambda: process.lives >= least)  # noqa: B023
            if came and await self._cluster.back(name, replaced[name], WHOLE_AGAIN_S):
                self._cluster.hit.discard(name)
            else:  # It stays hit, so that no fault takes the last one of its role.
                self.report.failed.append(f"{planned}: {name} did not come back")
                self.is_cut_short = True
        watch.cancel()
        hit.whole_s = round(time.monotonic() - began, 2)
        say(f"{self._now:6.1f} s  in use again: {planned.target}, {hit.whole_s} s after {hit.kind}")
        if hit.ready_s > READY_AGAIN_S:
            self.report.failed.append(f"{planned}: routers served after {hit.ready_s} s")

    async def _watch_readiness(self, hit: Hit, began: float) -> None:
        """Note when a router last had no pair of nodes."""
        while True:
            if not await self._cluster.serves():
                hit.ready_s = round(time.monotonic() - began, 2)
            await asyncio.sleep(0.2)

    async def _hit_clients(self, planned: Planned, hit: Hit) -> None:
        self._mark(hit)
        if planned.kind == "burst":
            await self._burst(planned.strength)
        else:
            self._vanish(planned.strength)

    def _vanish(self, strength: float) -> None:
        """Cancel the streams of some clients."""
        begun = [stream for stream in self._streams if stream.has_begun]
        for stream in begun[: 1 + int(strength * len(begun))]:
            stream.task.cancel()

    async def _burst(self, strength: float) -> None:
        """Send more requests at once than one router's queue and all slots hold. Refused ones come back."""
        refused = self.report.refused
        routers = self._cluster.names("r")
        address = self._cluster.links[routers[int(strength * len(routers))]].address
        async with AsyncClient(address, timeout_s=REQUEST_TIMEOUT_S, connect_timeout_s=READY_AGAIN_S) as client:
            cases = random.Random(f"{self._seed}/{strength}").choices(self._cases, k=BURST)
            await asyncio.gather(*(self._judge(client, case, is_timed=False) for case in cases))
        if self.report.refused == refused:
            self.report.failed.append(f"none of {BURST} requests at once was refused")

    async def _idle(self) -> list[str]:
        """Wait until nothing is held. Return a text for each thing that still is."""
        deadline = time.monotonic() + IDLE_S
        while (held := await self._cluster.held()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return held

    async def _check_end(self, before: dict[str, Usage], after: dict[str, Usage]) -> None:
        self.report.fds = {name: (before[name].fds, after[name].fds) for name in before}
        self.report.leaked += self.report.grown["half to end"]
        self.report.reruns = self._cluster.reruns()
        self.report.failed += self._cluster.wrong_ends
        self.report.leaked += await self._cluster.stop()


@asynccontextmanager
async def under_chaos(logs: Path, seed: int, *, threads: int = 1, careless: bool = False) -> AsyncIterator[Chaos]:
    """Start a cluster that is ready for one run. careless: see `processes.started`."""
    async with started(logs, threads=threads, careless=careless) as cluster:
        say("the cluster is ready")
        yield Chaos(cluster, seed)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait for a condition. Return whether it came in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
