"""The load of a router measurement: a process that keeps a number of samples running and times every token.

It is a closed loop: when a sample ends, the next is requested. The first samples are shorter, each by a different
length, so that they do not all end in one step. During the run, messages are only stored; everything that can wait is
done afterwards. `python -m corun_bench.router.load` is one such process. It must not know what is between it and the
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
import uvloop

from corun.params import SamplingParams
from corun.receipt import OutputDigest
from corun.rpc import codec
from corun.v1 import cluster_service_pb2 as pb
from corun_bench.router.fake_engines import FIRST_TOKEN, NUM_TOKENS, read_code
from corun_bench.router.raw_client import RawConnection, messages

CONNECT_S = 20.0
DRAIN_S = 120.0
"""The time for samples that still run at the end to finish, in seconds."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """One load generator."""

    addresses: tuple[str, ...]
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
    output: Path
    """File of the results. A file beside it, .times, has two doubles per token: when it came, and its step's code.
    An empty file beside it, .ready, says that the load begins."""


@dataclass(kw_only=True, slots=True)
class Call:
    """One sample that was requested."""

    connection: RawConnection
    number: int
    sent: float
    num_tokens: int
    """The number of tokens that were requested."""


@dataclass(kw_only=True, slots=True)
class Results:
    """The results of all calls."""

    calls: int = 0
    tokens: int = 0
    messages: int = 0
    errors: list[str] = field(default_factory=list)
    """A text for each call that did not give all it should."""
    first: list[tuple[float, float]] = field(default_factory=list)
    """For each call: when it was sent, and when its first token came."""
    times: array.array[float] = field(default_factory=lambda: array.array("d"))
    """For each token: when it came, and the code of its step."""


class Load:
    """The closed loop."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._draw = random.Random(options.seed)
        self._calls: list[Call] = []
        self._running = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._number = 0
        self._links: list[tuple[RawConnection, str]] = []

    async def run(self, stop: asyncio.Event) -> Results:
        """Run until `stop` is set, then wait for the samples in flight."""
        await self._connect()
        self._options.output.with_suffix(".ready").touch()
        await self._ramp()
        await stop.wait()
        self._stopping = True
        if self._running:
            await asyncio.wait_for(self._idle.wait(), DRAIN_S)
        for connection, _ in self._links:
            connection.close()
        return self._results()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        for address in self._options.addresses:
            host, _, port = address.rpartition(":")
            connecting = loop.create_connection(lambda: RawConnection(self._ended), host, int(port))
            _, connection = await asyncio.wait_for(connecting, CONNECT_S)
            self._links.append((connection, address))

    async def _ramp(self) -> None:
        options, began = self._options, time.monotonic()
        for place in range(options.concurrency):
            await asyncio.sleep(max(0.0, began + options.ramp_s * place / options.concurrency - time.monotonic()))
            self._start(-(-options.output_tokens * (place + 1) // options.concurrency))

    def _start(self, num_tokens: int) -> None:
        connection, address = self._links[self._number % len(self._links)]
        prompt = [FIRST_TOKEN + self._draw.randrange(NUM_TOKENS) for _ in range(self._options.prompt_tokens)]
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=True)
        message = codec.generate_request(prompt, params, seed=self._number).SerializeToString()
        sent = time.monotonic()
        number = connection.call(address, self._options.method, message)
        self._calls.append(Call(connection=connection, number=number, sent=sent, num_tokens=num_tokens))
        self._number += 1
        self._running += 1

    def _ended(self, connection: RawConnection, number: int) -> None:
        self._running -= 1
        if not self._stopping:
            self._start(self._options.output_tokens)
        elif not self._running:
            self._idle.set()

    def _results(self) -> Results:
        results = Results(calls=len(self._calls))
        for call in self._calls:
            if error := _read(call, results):
                results.errors.append(f"{error}; {_printable(call.connection.trailers.get(call.number, b''))}")
        return results


def _read(call: Call, results: Results) -> str:
    """Add the outcome of a call to the results; return what is wrong with it, or an empty text."""
    digest, receipt = OutputDigest(), None
    codes: list[float] = []
    for now, data in messages(call.connection.chunks[call.number]):
        response = pb.GenerateResponse.FromString(data)
        results.messages += 1
        if response.token_ids and not codes:
            results.first.append((call.sent, now))
        for token_id, logprob in zip(response.token_ids, response.logprobs, strict=True):
            digest.update(token_id, logprob)
            results.times.extend((now, logprob))
            codes.append(logprob)
        receipt = response.receipt if response.HasField("receipt") else receipt
    results.tokens += len(codes)
    if len(codes) != call.num_tokens:
        return f"{len(codes)} of {call.num_tokens} tokens came"
    if receipt is not None and receipt.output_digest != digest.hexdigest():
        return "its receipt is of other tokens"
    steps = [read_code(code)[1] for code in codes]
    if steps != list(range(steps[0], steps[0] + len(steps))):
        return "its tokens are not of one step after the other"
    return ""


def _printable(block: bytes) -> str:
    """Return the readable characters of a header block, which gRPC's servers do not compress."""
    return "".join(chr(byte) for byte in block if 32 <= byte < 127)[:300]


def _write(results: Results, path: Path) -> None:
    path.with_suffix(".times").write_bytes(results.times.tobytes())
    facts: dict[str, Any] = {
        name: getattr(results, name) for name in ("calls", "tokens", "messages", "errors", "first")
    }
    path.write_text(json.dumps(facts))


def main() -> None:
    options = tyro.cli(LoadOptions, prog="python -m corun_bench.router.load")
    gc.disable()  # The collector would go through the stored messages again and again.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    _write(asyncio.run(_until_input_ends(options)), options.output)


async def _until_input_ends(options: LoadOptions) -> Results:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    try:
        return await Load(options).run(stop)
    finally:
        asyncio.get_running_loop().remove_reader(sys.stdin)


if __name__ == "__main__":
    main()
