"""A run of chaos: a schedule of faults against a cluster, under a stream of requests, and what came out.

The right answer of every request is known first. Then every stream that completes must give the same bits, every token
once. The resources of each process are measured while all is idle: at the start, half-way and at the end. Owns the
judgement; requests are in `traffic`, schedules in `faults`; the cluster, and how its faults are made, in `fakes` or
`processes`. Tests only.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice

import aiohttp

from corun import AsyncClient, Condition, CorunError, OverloadedError, UnavailableError
from tests.chaos.faults import CLIENTS, Kind, Planned, Target, draw, within
from tests.chaos.report import Hit, Report, Usage, growth
from tests.chaos.traffic import Case, over_http, streamed

READY_AGAIN_S = 60.0
"""The limit for routers to serve again after a fault, and for clients to find one that does."""
WHOLE_AGAIN_S = 240.0
"""The limit for a process to be in use again. Three idle engines keep two cores busy while the fourth one starts."""
HTTP_SHARE = 0.2
"""The share of the requests that go through the gateway."""
VERIFY_EVERY_S = 60.0
VERIFY_TIMEOUT_S = 30.0
IDLE_S = 90.0
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

    def __init__(self, target: Target, seed: int) -> None:
        self.report = Report(seed=seed)
        self.target = target
        self.is_cut_short = False
        """Whether no more faults are made. Members that were hit still come back and are judged."""
        self._seed = seed
        self._cases: list[Case] = []
        self._streams: list[Stream] = []
        self._repairs: list[asyncio.Task[None]] = []
        self._began = 0.0

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def plan(
        self, count: int, members: Sequence[str] = (), kinds: Sequence[str] = (), lasting: Sequence[str] = ()
    ) -> list[Planned]:
        """Draw a schedule for this cluster; see `faults.draw`."""
        target = self.target
        return draw(target.kinds, self._seed, count, members or target.names(), kinds, lasting, target.pause_s)

    async def run(self, plan: Sequence[Planned], *, clients: int, seconds: float = 0.0) -> Report:
        """Make the faults of a plan; with `seconds`, none of them after that time."""
        self._cases = await self.target.cases()
        say(f"{len(self._cases)} answers are known")
        start = await self._measured("start")
        self._began = time.monotonic()
        rest = iter(plan)
        await self._under_load(rest if seconds else islice(rest, len(plan) // 2), clients, seconds / 2)
        middle = await self._measured("half")
        await self._under_load(rest, clients, seconds / 2)
        end = await self._measured("end")
        report, target = self.report, self.target
        grown = {"start to half": growth(start, middle), "half to end": growth(middle, end)}
        report.grown = grown
        report.reruns = target.reruns()
        report.failed += target.wrong_ends
        report.leaked += [*grown["half to end"], *await target.stop()]
        report.seconds = round(self._now, 1)
        return report

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
        deadline = time.monotonic() + IDLE_S
        while (held := await self.target.held()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        self.report.leaked += [f"{when}: {what}" for what in held]
        found = await self.target.usage()
        self.report.resources[when] = {name: asdict(used) for name, used in found.items()}
        say(f"{when}: {self.report.resources[when]}")
        return found

    async def _client(self, number: int, stop: asyncio.Event) -> None:
        """Send one request after the other, through the proxies or the gateway."""
        draw = random.Random(f"{self._seed}/{number}")
        routers, first = self.target.routers, number % len(self.target.routers)
        limit = self.target.request_timeout_s
        async with (
            AsyncClient(
                [*routers[first:], *routers[:first]], timeout_s=limit, connect_timeout_s=READY_AGAIN_S
            ) as client,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit)) as session,
        ):
            while not stop.is_set():
                case = draw.choice(self._cases)
                if self.target.gateway and draw.random() < HTTP_SHARE:
                    await self._judge_http(session, case)
                else:
                    await self._judge(client, case)
                await asyncio.sleep(self.target.think_s * draw.expovariate(1.0))

    async def _verify(self, stop: asyncio.Event) -> None:
        """Ask for a verification now and then. A difference that it finds counts; a refusal or no result does not."""
        draw = random.Random(f"{self._seed}/verify")
        async with AsyncClient(self.target.addresses, timeout_s=VERIFY_TIMEOUT_S) as client:
            while not stop.is_set():
                cases = draw.sample(self._cases, 2)
                try:
                    results = client.verify([case.verification() for case in cases], [Condition.CROWDED])
                    async for result in results:
                        self.report.verified += result.match
                        if not result.match and not result.error:
                            number = cases[result.case_index].number
                            self.report.wrong.append(f"{self._now:.1f} s: verification of request {number}")
                except CorunError as error:
                    say(f"{self._now:6.1f} s  no verification: {error}")
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), VERIFY_EVERY_S)

    async def _judge_http(self, session: aiohttp.ClientSession, case: Case) -> None:
        try:
            digests = await over_http(session, self.target.gateway, case)
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
        deadline = time.monotonic() + self.target.request_timeout_s
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
        kind = self.target.kinds[planned.kind]
        targets = self.target.names(planned.target[0]) if kind.all_of_role else [planned.target]
        if planned.target != CLIENTS and not await within(WHOLE_AGAIN_S, lambda: self._may_hit(targets, kind)):
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
            self.target.hit.update(targets)
            work = self._hit_members(planned, hit, targets)
        self._repairs.append(asyncio.create_task(work))

    def _may_hit(self, targets: list[str], kind: Kind) -> bool:
        """Return whether none of the targets is hit already and others do their work, where that matters."""
        is_free = self.target.hit.isdisjoint(targets)
        return is_free and (kind.is_mild or kind.all_of_role or self.target.may_lose(targets))

    def _mark(self, hit: Hit) -> None:
        """Note for every timed stream that the fault comes now."""
        for stream in self._streams:
            if stream.is_timed:
                stream.hits.append((hit, time.monotonic()))

    async def _hit_members(self, planned: Planned, hit: Hit, targets: list[str]) -> None:
        """Make the fault, and wait until the members that it hit are in use again."""
        kind = self.target.kinds[planned.kind]
        assert kind.fault is not None
        marks = {name: await self.target.mark(name, replaces=kind.replaces) for name in targets}
        began = time.monotonic()
        watch = asyncio.create_task(self._watch_readiness(hit, began))
        self._mark(hit)
        await asyncio.gather(*(kind.fault(self.target, name, planned.strength) for name in targets))
        for name in targets:
            if await self.target.back(name, marks[name], WHOLE_AGAIN_S):
                self.target.hit.discard(name)
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
            if not await self.target.serves():
                hit.ready_s = round(time.monotonic() - began, 2)
            await asyncio.sleep(0.2)

    async def _hit_clients(self, planned: Planned, hit: Hit) -> None:
        self._mark(hit)
        if planned.kind == "burst":
            await self._burst(planned.strength)
        else:  # Some clients vanish.
            begun = [stream for stream in self._streams if stream.has_begun]
            for stream in begun[: 1 + int(planned.strength * len(begun))]:
                stream.task.cancel()

    async def _burst(self, strength: float) -> None:
        """Send more requests at once than one router's queue and all slots hold. Refused ones come back."""
        refused, target = self.report.refused, self.target
        address = target.routers[int(strength * len(target.routers))]
        async with AsyncClient(address, timeout_s=target.request_timeout_s, connect_timeout_s=READY_AGAIN_S) as client:
            cases = random.Random(f"{self._seed}/{strength}").choices(self._cases, k=target.burst)
            await asyncio.gather(*(self._judge(client, case, is_timed=False) for case in cases))
        if self.report.refused == refused:
            self.report.failed.append(f"none of {target.burst} requests at once was refused")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
