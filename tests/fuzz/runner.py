"""Sends cases to a target and judges every answer.

Each case is drawn from its own number, so one that was found is run again alone. What is right: an answer is a typed
status, the process lives, its log has no unexpected error, and an ordinary request gets its known bits throughout.
Tests only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from corun.errors import is_answered
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.auth import bearer
from corun.rpc.channel import channel
from corun.testing.engines import expected
from corun.v1 import cluster_service_pb2
from tests.fuzz.http2 import Connection, status_of
from tests.fuzz.messages import Maker, mutated
from tests.fuzz.raw import SCRIPTS, script
from tests.fuzz.surface import CLUSTER, HEALTH, SERVED, TYPED, UNKNOWN_METHODS, Code, Method
from tests.fuzz.target import Target

KINDS = {"message": 50, "bytes": 30, "raw": 15, "unknown method": 2, "token": 3}
"""Weights."""
MAX_FINDINGS = 100
LONGEST_S = 2.0
"""Deadline of a call."""
_UNARY_S = (0.002, *[LONGEST_S] * 9)
MAX_PAYLOAD = 2**22
RAW_WAIT_S = 0.15
CANARY_S = 120.0
CANARY_PROMPT, CANARY_PARAMS, CANARY_SEED = (1, 2, 3), SamplingParams(max_tokens=12, logprobs=True), 7
_BAD_CODES = {Code.UNKNOWN.value[0], Code.INTERNAL.value[0]}
_UNTYPED_RAW = {"odd_path": {2}, "broken_frames": {2}, "odd_frames": {2}}
"""A path that is not UTF-8 is refused by gRPC for Python itself, with UNKNOWN, before any code of ours."""
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(kw_only=True)
class Report:
    """What a run did and found."""

    seed: int
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of case; of raw ones, how the connection or stream ended."""
    findings: list[str] = field(default_factory=list)
    canaries: int = 0
    late: Counter[str] = field(default_factory=Counter)
    """Calls of unary methods that were not answered within the longest deadline."""
    seconds: float = 0.0
    memory_mib: dict[str, float] = field(default_factory=dict)
    """Resident, of the target, by the number of cases done."""
    files: dict[str, int] = field(default_factory=dict)
    log_mib: float = 0.0

    def add(self, number: int, what: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(f"case {number}: {what}")

    def count(self, kind: str, status: str) -> None:
        self.statuses.setdefault(kind, Counter())[status] += 1

    def as_dict(self) -> dict[str, Any]:
        statuses = {kind: dict(counter.most_common()) for kind, counter in sorted(self.statuses.items())}
        cases = {kind: counter.total() for kind, counter in self.statuses.items()}
        return {**vars(self), "cases": cases, "statuses": statuses, "case_count": sum(cases.values())}


class Fuzzer:
    """One run."""

    def __init__(self, target: Target, seed: int, links: dict[str, Any], kinds: Sequence[str]) -> None:
        self.report = Report(seed=seed)
        self._target = target
        self._links = links
        self._kinds = kinds

    async def run(self, *, first: int, cases: int, at_once: int, canary_every: int) -> Report:
        began, report, target = time.monotonic(), self.report, self._target
        await self.canary(first)
        files = report.files["before"] = target.files
        report.memory_mib["0"] = target.rss_mib
        numbers = iter(range(first, first + cases))
        await asyncio.gather(*(self._work(numbers, first, cases, canary_every) for _ in range(at_once)))
        if target.alive:
            await self.canary(first + cases)
            for link in self._links.values():
                await link.close()
            for leak in await target.settled(files):
                report.add(first + cases, f"still held: {leak}")
            for error in target.errors():
                report.add(first + cases, f"in the log: {error}")
            report.files["after"], report.memory_mib["settled"] = target.files, target.rss_mib
            report.log_mib = round(target.log.stat().st_size / 2**20, 1)
        report.seconds = round(time.monotonic() - began, 1)
        return report

    async def _work(self, numbers: Iterator[int], first: int, cases: int, canary_every: int) -> None:
        for number in numbers:
            if not self._target.alive:
                self.report.add(number, "the process is gone")
                return
            await self.case(number)
            done = number - first + 1
            if done % canary_every == 0:
                await self.canary(number)
            if done % max(1, cases // 10) == 0 and self._target.alive:
                self.report.memory_mib[str(done)] = self._target.rss_mib

    async def case(self, number: int) -> None:
        """Runs one case."""
        rng = Random(f"{self.report.seed} {number}")
        kind = rng.choices(self._kinds, [KINDS[kind] for kind in self._kinds])[0]
        run = {"raw": self._raw, "unknown method": self._unknown}.get(kind, self._call)
        await run(rng, number, kind)

    async def _call(self, rng: Random, number: int, kind: str) -> None:
        server = rng.choice(tuple(SERVED))
        method = Method(rng, server)
        metadata, must_be = self._credentials(rng, server, method, odd=kind == "token")
        payload = self._payload(rng, method, kind)
        answers = rng.choice((1, 2, 1000)) if rng.random() < 0.2 else 1000
        timeout_s = rng.choice(_UNARY_S if method.is_unary else (0.002, 0.05, 0.3, LONGEST_S))
        call = self._links[server].unary_stream(method.path)(payload, metadata=metadata, timeout=timeout_s)
        code, detail = await _ended(call, method, answers)
        self.report.count(kind, code.name)
        if method.is_unary and code is Code.DEADLINE_EXCEEDED and timeout_s >= LONGEST_S:
            self.report.late[f"{server} {method.path} {len(payload)}"] += 1
        allowed = TYPED if must_be is None else {must_be, Code.DEADLINE_EXCEEDED, Code.CANCELLED}
        if code not in allowed or detail.startswith("!"):
            what = f"{server} {method.path}, {kind}: {code.name} {detail}"
            self.report.add(number, f"{what}; {len(payload)} bytes {payload[:200].hex()}")

    def _payload(self, rng: Random, method: Method, kind: str) -> bytes:
        maker = Maker(rng)
        right = method.valid(rng, self._target.nodes)
        how = rng.random()
        request = right if how < 0.1 else maker.changed(right) if how < 0.7 else maker.any_of(right.DESCRIPTOR)
        data: bytes = (right if request.ByteSize() > MAX_PAYLOAD else request).SerializeToString()
        return mutated(rng, data, right.SerializeToString()) if kind == "bytes" else data

    def _credentials(self, rng: Random, server: str, method: Method, *, odd: bool) -> tuple[Any, Code | None]:
        """Metadata of a call, and the one status that it may have."""
        closed = Code.UNAUTHENTICATED if server == "guarded" and method.service != HEALTH else None
        if odd:
            return _odd_metadata(rng), closed
        if server == "guarded" and rng.random() < 0.5:
            return bearer(self._target.secrets.token("client")), None if method.service == CLUSTER else closed
        return (), closed

    async def _unknown(self, rng: Random, number: int, kind: str) -> None:
        server, path = rng.choice(tuple(SERVED)), rng.choice(UNKNOWN_METHODS)
        code, _ = await _ended(self._links[server].unary_stream(path)(rng.randbytes(rng.randrange(40)), timeout=2.0))
        self.report.count(kind, code.name)
        if code not in (Code.UNIMPLEMENTED, Code.DEADLINE_EXCEEDED):
            self.report.add(number, f"{server} {path}: {code.name}")

    async def _raw(self, rng: Random, number: int, kind: str) -> None:
        name, address = rng.choice(SCRIPTS), rng.choice(tuple(self._target.addresses.values()))
        try:
            link = await Connection.open(address, script(name, rng))
        except OSError as error:
            self.report.add(number, f"no connection: {error}")
            return
        try:
            while await link.read(RAW_WAIT_S) and not link.ended:
                pass
        finally:
            link.close()
        codes = {status_of(trailers) or 0 for trailers in link.ended.values() if len(trailers) != 4}
        outcome = "goaway" if link.goaway else "closed" if link.is_over else "silence"
        if link.ended:
            outcome = "status " + ", ".join(_NAMES.get(c, str(c)) for c in sorted(codes)) if codes else "stream reset"
        self.report.count(kind, outcome)
        if wrong := codes & _BAD_CODES - _UNTYPED_RAW.get(name, set()):
            self.report.add(number, f"raw {name}: status {wrong}")

    async def canary(self, number: int) -> None:
        """An ordinary request to each cluster gives the right bits."""
        ids, logprobs, _ = expected(CANARY_PROMPT, CANARY_PARAMS, CANARY_SEED)
        request = codec.generate_request(CANARY_PROMPT, CANARY_PARAMS, seed=CANARY_SEED).SerializeToString()
        read = cluster_service_pb2.GenerateResponse.FromString
        for server, token in (("open", ""), ("guarded", self._target.secrets.token("client"))):
            method = self._links[server].unary_stream(f"/{CLUSTER}/Generate", response_deserializer=read)
            try:
                call = method(request, metadata=bearer(token), timeout=CANARY_S)
                answers = [answer async for answer in call]
            except grpc.aio.AioRpcError as error:
                self.report.add(number, f"canary of {server}: {error.code().name} {error.details()}")
                continue
            got = [t for a in answers for t in a.token_ids], [p for a in answers for p in a.logprobs]
            self.report.canaries += 1
            if got != (ids, logprobs):
                self.report.add(number, f"canary of {server}: {got}, not {(ids, logprobs)}")


async def _ended(call: Any, method: Method | None = None, answers: int = 1000) -> tuple[Code, str]:
    """The status of a call; a detail that begins with "!" is wrong whatever the status."""
    try:
        async for answer in call:
            if method is not None:
                method.check(answer)
            answers -= 1
            if not answers:
                call.cancel()
                return Code.CANCELLED, "by us"
    except grpc.aio.AioRpcError as error:
        is_ours = is_answered(error) or error.code() in (Code.DEADLINE_EXCEEDED, Code.CANCELLED)
        too_large = error.code() is Code.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")
        return error.code(), f"{'' if is_ours or too_large else '!not ours: '}{error.details()}"
    except DecodeError as error:
        return Code.OK, f"!answered with what is not its type: {error}"
    except asyncio.CancelledError:
        return Code.CANCELLED, "by the channel"
    return Code.OK, ""


def _odd_metadata(rng: Random) -> Any:
    odd = (
        (("authorization", "Bearer " + "0" * 64),),
        (("authorization", "bearer"),),
        (("authorization", ""),),
        (("authorization", "Basic eDp5"),),
        (("authorization", "Bearer a"), ("authorization", "Bearer b")),
        (("authorization", "Bearer " + "x" * rng.choice((600, 9000))),),
        (("authorization-bin", rng.randbytes(40)),),
        tuple((f"x-{i}", "y" * 50) for i in range(60)),
    )
    return rng.choice(odd)


@asynccontextmanager
async def fuzzing(target: Target, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> AsyncIterator[Fuzzer]:
    """A fuzzer with a channel to each server."""
    addresses = {**target.addresses, **{role: node["address"] for role, node in target.nodes.items()}}
    async with AsyncExitStack() as stack:
        links = {name: await stack.enter_async_context(channel(address)) for name, address in addresses.items()}
        yield Fuzzer(target, seed, links, kinds)
