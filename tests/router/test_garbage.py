"""When full garbage collections run, in a process of their own, and how little is left to them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from corun.errors import CorunError
from corun.params import SamplingParams
from corun.rpc import codec
from corun.testing.cluster import WAIT_S
from corun.v1 import cluster_service_pb2 as cluster_pb2
from router.attempt import Attempt, NodeFaultError, SampleTask
from router.delivery import Responses
from router.nodes.node import Placement
from router.nodes.node_client import RemoteLease
from router.output import Outbox, SampleOutput
from router.queue import QueueEntry
from router.request import Request, RunningRequest
from router.sample import SampleRun
from tests.answers import put_forward
from tests.clusters import FakeCluster, cluster, short_calls
from tests.router.asking import PARAMS, PROMPT

SCRIPT = """
import asyncio, gc, sys
from router import garbage

full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)

async def main():
    is_ours = "usual" not in sys.argv
    if is_ours:
        garbage.begin(lambda: 5000)
    full.clear()
    held = []
    for _ in range(40):  # Samples come and stay.
        held += [[k] for k in range(20_000)]
        if is_ours:
            garbage.look(5000)
    print(len(full))
    if is_ours:
        garbage.look(garbage.FEW)
        print(len(full))
        garbage.look(garbage.FEW)
        print(len(full))
        garbage.MOST = 2
        for _ in range(40):
            held += [[k] for k in range(20_000)]
        garbage.look(5000)
        print(len(full))

asyncio.run(main())
"""


def run(*arguments: str) -> list[int]:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return list(map(int, made.stdout.split()))


def test_a_full_collection_runs_when_few_samples_wait_or_much_has_come() -> None:
    """None while many wait; one when few do, and no second one for nothing; one when there could be much garbage."""
    assert run() == [0, 1, 1, 2]


def test_python_itself_collects_while_many_wait() -> None:
    """The control."""
    assert run("usual")[0] > 0


OF_ONE_REQUEST = (
    *(Attempt, CorunError, NodeFaultError, Outbox, Placement, QueueEntry, RemoteLease, Request, Responses),
    *(RunningRequest, SampleOutput, SampleRun, SampleTask),
)


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Count what a garbage collection finds at the end of the block, of what each request is made of."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if isinstance(each, OF_ONE_REQUEST))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def finished(fake: FakeCluster) -> None:
    async with fake.stub() as stub:
        async for _ in stub.Generate(codec.generate_request(PROMPT, SamplingParams(n=4)), timeout=WAIT_S):
            pass


async def left(fake: FakeCluster, *, hanging: bool) -> None:
    """The client of a request goes while 2 of its samples have slots and 6 wait."""
    _, decode = fake.nodes
    decode.engine.step_ms, decode.engine.hanging = 20, hanging
    async with fake.stub() as stub:
        call = stub.Generate(codec.generate_request(PROMPT, SamplingParams(max_tokens=400, n=8), seed=1))
        reading = asyncio.ensure_future(call.read())
        await fake.until(lambda: decode.leases == 2 and fake.router.queue.waiting == 6)
        await fake.until(lambda: hanging or decode.drawn_tokens > 0)
        call.cancel()
        await asyncio.wait((reading,))
    decode.engine.hanging = False
    await fake.idle()


async def left_decoding(fake: FakeCluster) -> None:
    await left(fake, hanging=False)


async def left_reserving(fake: FakeCluster) -> None:
    await left(fake, hanging=True)


async def refused(fake: FakeCluster) -> None:
    refusals = [
        (codec.generate_request((10**6,), PARAMS), grpc.StatusCode.INVALID_ARGUMENT),
        (codec.generate_request("a" * 10**6, PARAMS), grpc.StatusCode.INVALID_ARGUMENT),
        (cluster_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    async with fake.stub() as stub:
        for request, code in refusals:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=WAIT_S).read()
            assert caught.value.code() == code


async def late(fake: FakeCluster) -> None:
    """The router's deadline passes while the prompt's KV waits to be read."""
    _, decode = fake.nodes
    decode.engine.hanging = True
    async with fake.stub() as stub:
        call = stub.Generate(codec.generate_request(PROMPT, PARAMS), timeout=WAIT_S)
        await fake.until(lambda: decode.engine._running)
        put_forward(WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="the deadline passed in an attempt"):
            await call.read()
    decode.engine.hanging = False
    await fake.idle()


async def late_prefilling(fake: FakeCluster) -> None:
    """It passes in a call to a node, whose error ends the request."""
    prefill, _ = fake.nodes
    async with fake.stub() as stub, prefill.engine.turn:
        with short_calls(), pytest.raises(grpc.aio.AioRpcError, match="the deadline passed in an attempt"):
            await stub.Generate(codec.generate_request(PROMPT, PARAMS), timeout=WAIT_S).read()
    await fake.idle()


@pytest.mark.parametrize("way", [finished, left_decoding, left_reserving, refused, late, late_prefilling])
async def test_a_request_leaves_no_garbage_however_it_ends(
    model: str, way: Callable[[FakeCluster], Awaitable[None]]
) -> None:
    """What it is made of is freed at once. Under siege, a hundred thousand objects took a collection 0.15 s."""
    with garbage() as found:
        async with cluster(model, slots=2) as fake:
            await way(fake)
    assert found == {}


def test_a_cycle_is_found() -> None:
    """The control."""
    with garbage() as found:
        outbox = Outbox()
        outbox.ready = outbox.notify
        del outbox
    assert found == {"Outbox": 1}
