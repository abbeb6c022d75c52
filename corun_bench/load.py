"""The load of a router measurement: a process that keeps a number of samples running and times every token.

It is a closed loop: when a sample ends, the next is requested. The first samples are shorter, each by a different
length, so that they do not all end in one step. During the run, messages are only stored; everything that can wait is
done afterwards. `python -m corun_bench.load JSON` is one such process. It must not know what is between it and the
nodes.
"""

from __future__ import annotations

import array
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio
import uvloop

from corun.params import SamplingParams
from corun.receipt import OutputDigest
from corun.rpc import codec
from corun.v1 import cluster_service_pb2 as pb
from corun_bench.options import MAX_NODES

CONNECT_S = 20.0
DRAIN_S = 120.0
"""The time for samples that still run at the end to finish, in seconds."""
FIRST_TOKEN, NUM_TOKENS = 256, 128
"""The first of the token ids that are drawn, and their number: they are words of the built-in tiny model."""

Method = Callable[[pb.GenerateRequest], AsyncIterable[bytes]]
"""A call of one connection: it streams the messages of a sample as bytes."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of one load generator."""

    addresses: list[str]
    """host:port of each connection."""
    method: str
    """Method to call, as /package.Service/Method."""
    concurrency: int
    """Samples in flight."""
    prompt_tokens: int
    output_tokens: int
    ramp_s: float
    """Seconds over which the first samples are sent."""
    seed: int = 0
    output: str
    """File of the results. A file beside it, .times, has two doubles per token: when it came, and its step's code.
    An empty file beside it, .ready, says that the load begins."""


@dataclass(kw_only=True, slots=True)
class Results:
    """The results of all samples."""

    calls: int = 0
    tokens: int = 0
    messages: int = 0
    errors: list[str] = field(default_factory=list)
    """A text for each sample that did not give all it should."""
    first: list[tuple[float, float]] = field(default_factory=list)
    """For each sample: when it was requested, and when its first token came."""
    times: array.array[float] = field(default_factory=lambda: array.array("d"))
    """For each token: when it came, and the code of its step."""


def step_code(index: int, step: int) -> float:
    """Return the log probability of all tokens of one step of one node, exact in fp32 for a million steps."""
    return -float(step * MAX_NODES + index)


def read_code(logprob: float) -> tuple[int, int]:
    """Return the node's index and the step."""
    step, index = divmod(int(-logprob), MAX_NODES)
    return index, step


@dataclass(kw_only=True, slots=True)
class Call:
    """One sample that was requested."""

    sent: float
    num_tokens: int
    """The number of tokens that were requested."""
    received: list[tuple[float, bytes]] = field(default_factory=list)
    """When each message came, on the monotonic clock, and its bytes."""
    failure: str = ""

    def read_into(self, results: Results) -> str:
        """Add the outcome to the results; return what is wrong with it, or an empty text."""
        digest, receipt = OutputDigest(), None
        codes: list[float] = []
        for now, data in self.received:
            response = pb.GenerateResponse.FromString(data)
            results.messages += 1
            if response.token_ids and not codes:
                results.first.append((self.sent, now))
            for token_id, logprob in zip(response.token_ids, response.logprobs, strict=True):
                digest.update(token_id, logprob)
                results.times.extend((now, logprob))
                codes.append(logprob)
            receipt = response.receipt if response.HasField("receipt") else receipt
        results.tokens += len(codes)
        if len(codes) != self.num_tokens:
            return f"{len(codes)} of {self.num_tokens} tokens came; {self.failure}"
        if receipt is not None and receipt.output_digest != digest.hexdigest():
            return "its receipt is of other tokens"
        steps = [read_code(code)[1] for code in codes]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            return "its tokens are not of one step after the other"
        return self.failure


class Load:
    """The closed loop."""

    def __init__(self, options: LoadOptions) -> None:
        self.calls: list[Call] = []
        self._options = options
        self._draw = random.Random(options.seed)

    async def run(self, stop: asyncio.Event) -> Results:
        """Run until `stop` is set, then wait for the samples in flight."""
        own = (("grpc.use_local_subchannel_pool", 1),)  # Channels to one address share no connection.
        channels = [grpc.aio.insecure_channel(address, options=own) for address in self._options.addresses]
        try:
            await asyncio.wait_for(asyncio.gather(*(one.channel_ready() for one in channels)), CONNECT_S)
            Path(self._options.output).with_suffix(".ready").touch()
            serialize = pb.GenerateRequest.SerializeToString
            methods = [one.unary_stream(self._options.method, serialize, None) for one in channels]
            workers = [
                asyncio.ensure_future(self._work(place, methods[place % len(methods)], stop))
                for place in range(self._options.concurrency)
            ]
            await stop.wait()
            await asyncio.wait_for(asyncio.gather(*workers), DRAIN_S)
        finally:
            await asyncio.gather(*(one.close(None) for one in channels))
        results = Results(calls=len(self.calls))
        results.errors = [error for call in self.calls if (error := call.read_into(results))]
        return results

    async def _work(self, place: int, method: Method, stop: asyncio.Event) -> None:
        options = self._options
        await asyncio.sleep(options.ramp_s * place / options.concurrency)
        await self._call(method, -(-options.output_tokens * (place + 1) // options.concurrency))
        while not stop.is_set():
            await self._call(method, options.output_tokens)

    async def _call(self, method: Method, num_tokens: int) -> None:
        prompt = [FIRST_TOKEN + self._draw.randrange(NUM_TOKENS) for _ in range(self._options.prompt_tokens)]
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=True)
        message = codec.generate_request(prompt, params, seed=len(self.calls))
        call = Call(sent=time.monotonic(), num_tokens=num_tokens)
        self.calls.append(call)
        try:
            async for data in method(message):
                call.received.append((time.monotonic(), data))
        except grpc.aio.AioRpcError as error:
            call.failure = f"{error.code()}: {error.details()}"


async def _until_input_ends(options: LoadOptions) -> Results:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    try:
        return await Load(options).run(stop)
    finally:
        asyncio.get_running_loop().remove_reader(sys.stdin)


def main() -> None:
    options = LoadOptions(**json.loads(sys.argv[1]))
    gc.disable()  # The collector would go through the stored messages again and again.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    results, path = asyncio.run(_until_input_ends(options)), Path(options.output)
    path.with_suffix(".times").write_bytes(results.times.tobytes())
    path.write_text(json.dumps({**asdict(results), "times": None}))


if __name__ == "__main__":
    main()
