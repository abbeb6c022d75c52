"""`python -m tests.chaos.overload`: measure a router at the load it can serve and at ten times that; print JSON.

The router and every client are processes of their own. The nodes' engines are fakes, so only the router is measured.
First one client asks as fast as it is served ("1x"). Then three clients ask at ten times that rate, whatever the
answers are ("10x"): a hog with most of the arrivals, a small client that wants more than its share, and a tiny one that
wants less. Last, a queue that stays full refuses one request after the other. All times are measured at the clients,
except "from_grant", which is measured at the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import tyro

from corun.config.fields import RouterConfig
from corun.errors import OverloadedError, from_rpc_error
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import Access, channel
from corun.testing.cluster import router_config
from corun.testing.engines import expected_digest
from corun.testing.model import write_tokenizer
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceStub
from router.app import Router
from tests.clusters import FakeCluster

TIMEOUT_S = 60.0
SEED = 7
SHARES = {"hog": 0.9, "small": 0.09, "tiny": 0.01}
"""Each client's share of the arrivals at 10x."""
MEMBERS_TOKEN = "members-of-the-cluster"


@dataclass(frozen=True, kw_only=True)
class Options:
    """A measurement."""

    seconds: float = 10.0
    """The duration of each phase."""
    repeats: int = 3
    factor: float = 10.0
    """The rate of arrivals at overload, as a multiple of the rate that is served."""
    slots: int = 16
    step_ms: float = 10.0
    max_tokens: int = 32
    prompt_tokens: int = 32
    max_queued_samples: int = 256
    max_queue_wait_s: float = 2.0
    refusals: int = 2000
    """The number of refusals in the last phase."""


@dataclass(kw_only=True)
class Tally:
    """The outcomes that one client saw, with times in seconds."""

    ended: list[float] = field(default_factory=list)
    """The time from the call to the receipt, for each request that completed."""
    first: list[float] = field(default_factory=list)
    """The time from the call to the first token, for each request that completed."""
    refused: list[float] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    """The number of other outcomes by their text, wrong bits included."""

    @property
    def asked(self) -> int:
        return len(self.ended) + len(self.refused) + self.other.total()

    def add(self, tally: Tally) -> Tally:
        for name in ("ended", "first", "refused"):
            getattr(self, name).extend(getattr(tally, name))
        self.other.update(tally.other)
        return self


class Asker:
    """One client, which sends one request with a known answer over and over."""

    def __init__(self, stub: Any, *, max_tokens: int, prompt_tokens: int) -> None:
        self.tally = Tally()
        self._stub = stub
        prompt, params = list(range(1, prompt_tokens + 1)), SamplingParams(max_tokens=max_tokens, logprobs=True)
        self._request = codec.generate_request(prompt, params, seed=SEED)
        self._digest = expected_digest(prompt, params, SEED)

    async def ask(self) -> None:
        began, first, digest = time.monotonic(), 0.0, ""
        try:
            async for message in self._stub.Generate(self._request, timeout=TIMEOUT_S):
                first = first or time.monotonic() - began
                digest = message.receipt.output_digest
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if isinstance(typed, OverloadedError) and typed.retry_after_s > 0:
                self.tally.refused.append(time.monotonic() - began)
            else:
                self.tally.other[f"{type(typed).__name__}: {typed}"] += 1
        else:
            if digest == self._digest:
                self.tally.ended.append(time.monotonic() - began)
                self.tally.first.append(first)
            else:
                self.tally.other["wrong bits"] += 1

    async def closed(self, concurrency: int, seconds: float) -> Tally:
        """Keep `concurrency` requests in flight for `seconds`: when one ends, the next one starts."""
        end = time.monotonic() + seconds

        async def cycle() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*(cycle() for _ in range(concurrency)))
        return self.tally

    async def closed_count(self, concurrency: int, number: int) -> Tally:
        """Run `concurrency` loops of `number` requests each."""

        async def cycle() -> None:
            for _ in range(number):
                await self.ask()

        await asyncio.gather(*(cycle() for _ in range(concurrency)))
        return self.tally

    async def open(self, rate: float, seconds: float, seed: int) -> Tally:
        """Send requests at random times, whatever the outcome of the earlier ones."""
        draw, calls = random.Random(seed), []
        at = time.monotonic()
        end = at + seconds
        while (at := at + draw.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            calls.append(asyncio.ensure_future(self.ask()))
        await asyncio.gather(*calls)
        return self.tally


@contextlib.asynccontextmanager
async def asker(address: str, token: str, **size: int) -> AsyncIterator[Asker]:
    async with channel(address, access=Access(token=token)) as link:
        yield Asker(ClusterServiceStub(link), **size)  # type: ignore[no-untyped-call]


def token_of(client: str) -> str:
    return f"token-of-client-{client}"


def write_tokens(directory: Path) -> dict[str, str]:
    """Write the files of the clients' and the members' tokens; return the router settings that name them."""
    clients, members = directory / "clients.tokens", directory / "members.token"
    clients.write_text("".join(f"{name}: {token_of(name)}\n" for name in SHARES))
    members.write_text(MEMBERS_TOKEN)
    return {"client_tokens_file": str(clients), "cluster_token_file": str(members)}


class Process:
    """Another process that carries out orders, one at a time."""

    def __init__(self, main: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    async def tell(self, *order: Any) -> Any:
        self._pipe.send(order)
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> Any:
        if not self._pipe.poll(10 * TIMEOUT_S):
            raise TimeoutError("a process of the measurement does not answer")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _run(main: Callable[..., Coroutine[Any, Any, None]], pipe: Any, *arguments: Any) -> None:
    asyncio.run(main(pipe, *arguments))


async def _orders(pipe: Any) -> AsyncIterator[tuple[Any, ...]]:
    while True:
        try:
            yield await asyncio.to_thread(pipe.recv)
        except EOFError:
            return


async def client_main(pipe: Any, address: str, token: str, size: dict[str, int]) -> None:
    async for kind, *arguments in _orders(pipe):
        async with asker(address, token, **size) as client:
            pipe.send(await getattr(client, kind)(*arguments))


async def router_main(pipe: Any, config: RouterConfig) -> None:
    router = Router(config)
    await router.start()
    served = times_from_grant(router)
    async for (kind,) in _orders(pipe):
        if kind == "address":
            pipe.send(router.server.address)
        else:
            usage = {"cpu_s": time.process_time(), "rss_mib": rss_mib(), "waiting": router.queue.waiting}
            pipe.send({**usage, "from_grant": list(served)})
            served.clear()
    await router.stop()


def times_from_grant(router: Router) -> list[float]:
    """Return a list that gets, for each sample that ends from now on, the seconds from its first seat to its end."""
    seat, run = router.queue.place, router.runner.run
    granted: dict[Any, float] = {}
    times: list[float] = []

    async def timed_seat(ticket: Any, deadline: float) -> Any:
        found = await seat(ticket, deadline)
        granted.setdefault(ticket, time.monotonic())
        return found

    async def timed_run(sample: Any, ticket: Any, output: Any) -> Any:
        try:
            receipt = await run(sample, ticket, output)
            times.append(time.monotonic() - granted[ticket])
            return receipt
        finally:
            granted.pop(ticket, None)

    router.queue.place, router.runner.run = timed_seat, timed_run  # type: ignore[method-assign]
    return times


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


class Nodes(FakeCluster):
    """Fake nodes of a router that runs in another process."""

    def __init__(self, model: str, config: RouterConfig, address: str) -> None:
        super().__init__(model, config, Access(token=MEMBERS_TOKEN))
        self._address = address

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    async def serving(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        async with self.stub() as stub:
            while time.monotonic() < deadline:
                status = codec.cluster_status_from_proto(
                    await stub.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S)
                )
                if sum(node.state.value == "ready" for node in status.nodes) == len(self.nodes):
                    return
                await asyncio.sleep(0.05)
        raise TimeoutError("the nodes were never ready")


class Measurement:
    """All processes of one measurement."""

    def __init__(self, options: Options, router: Process, clients: dict[str, Process], nodes: Nodes) -> None:
        self._options = options
        self._router = router
        self._clients = clients
        self._nodes = nodes

    async def run(self) -> dict[str, Any]:
        options = self._options
        # Warm up: everything is loaded and used once, and the router sees how fast it serves.
        await self._clients["hog"].tell("closed", 2 * options.slots, 2.0)
        runs = [await self._pair(number) for number in range(options.repeats)]
        return {
            "conditions": {"cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], "python": sys.version.split()[0]},
            "options": asdict(options),
            "goodput_ratio": round(statistics.median(each["10x"]["per_s"] / each["1x"]["per_s"] for each in runs), 3),
            "rss_mib": [each["10x"]["rss_mib"] for each in runs],
            "runs": runs,
            "refusals": await self._refusals(),
        }

    async def _pair(self, number: int) -> dict[str, Any]:
        options = self._options
        once = await self._phase({"hog": ("closed", options.slots, options.seconds)})
        rate = options.factor * once["per_s"]
        orders = {
            name: ("open", rate * share, options.seconds, 10 * number + index)
            for index, (name, share) in enumerate(SHARES.items())
        }
        return {"1x": once, "10x": await self._phase(orders)}

    async def _phase(self, orders: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        before, began = await self._router.tell("usage"), time.monotonic()
        tallies = await asyncio.gather(*(self._clients[name].tell(*order) for name, order in orders.items()))
        seconds, after = time.monotonic() - began, await self._router.tell("usage")
        every = Tally()
        for tally in tallies:
            every.add(tally)
        return {
            "per_s": round(len(every.ended) / seconds, 1),
            "latency": quantiles(every.ended),
            "to_first_token": quantiles(every.first),
            "from_grant": quantiles(after["from_grant"]),
            "refusal": quantiles(every.refused),
            "other": dict(every.other),
            "clients": {name: self._share(tally, every) for name, tally in zip(orders, tallies, strict=True)},
            "router_cpu": round((after["cpu_s"] - before["cpu_s"]) / seconds, 2),
            "rss_mib": [before["rss_mib"], after["rss_mib"]],
            "left_waiting": after["waiting"],
        }

    def _share(self, tally: Tally, every: Tally) -> dict[str, Any]:
        return {
            "asked": tally.asked,
            "ended": len(tally.ended),
            "success": round(len(tally.ended) / max(1, tally.asked), 3),
            "of_goodput": round(len(tally.ended) / max(1, len(every.ended)), 3),
            "latency": quantiles(tally.ended),
        }

    async def _refusals(self) -> dict[str, Any]:
        """Measure what one refusal costs while nothing else goes on: the nodes stand still and the queue is full."""
        options = self._options
        for node in self._nodes.nodes:
            node.engine.hanging = True
        size = {"max_tokens": options.max_tokens, "prompt_tokens": options.prompt_tokens}
        async with asker(self._nodes.address, token_of("small"), **size) as filler:
            fill = options.slots + options.max_queued_samples + 64
            calls = [asyncio.ensure_future(filler.ask()) for _ in range(fill)]
            deadline = time.monotonic() + TIMEOUT_S
            while not filler.tally.refused:
                assert time.monotonic() < deadline, "the queue was never full"
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            before = await self._router.tell("usage")
            tally = await self._clients["small"].tell("closed_count", 8, options.refusals // 8)
            after = await self._router.tell("usage")
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        cpu_ms = 1000 * (after["cpu_s"] - before["cpu_s"]) / max(1, tally.asked)
        rss = [before["rss_mib"], after["rss_mib"]]
        return {
            "number": len(tally.refused),
            "ended": len(tally.ended),
            "latency": quantiles(tally.refused),
            "cpu_ms": round(cpu_ms, 3),
            "waiting": before["waiting"],
            "rss_mib": rss,
        }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds; empty for no values."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    return {
        name: round(1000 * ranked[min(len(ranked) - 1, round(share * len(ranked)))], 1)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


async def measure(options: Options, scratch: Path) -> dict[str, Any]:
    config = router_config(
        max_queued_samples=options.max_queued_samples,
        max_queue_wait_s=options.max_queue_wait_s,
        heartbeat_timeout_ms=60_000,  # A machine that stalls must not spoil the measurement.
        **write_tokens(scratch),
    )
    size = {"max_tokens": options.max_tokens, "prompt_tokens": options.prompt_tokens}
    with contextlib.ExitStack() as stack:

        def start(*arguments: Any) -> Process:
            process = Process(*arguments)
            stack.callback(process.close)
            return process

        router = start(router_main, config)
        address = await router.tell("address")
        nodes = Nodes(write_tokenizer(scratch), config, address)
        try:
            await nodes.add_prefill()
            decode = await nodes.add_decode(slots=options.slots)
            decode.engine.step_ms = options.step_ms
            await nodes.serving()
            clients = {name: start(client_main, address, token_of(name), size) for name in SHARES}
            return await Measurement(options, router, clients, nodes).run()
        finally:
            await nodes.close()


def main() -> int:
    options = tyro.cli(Options, prog="tests.chaos.overload")
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(measure(options, Path(scratch))), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
