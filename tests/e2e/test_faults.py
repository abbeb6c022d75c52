"""Processes and connections that fail under streams: every stream ends with the bits it has without faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from corun import AsyncClient, SamplingParams
from corun.processes import descendants, living
from tests.e2e.conftest import Cluster, ready
from tests.e2e.test_determinism import bits
from tests.machine import wait_for
from tests.proxy import CuttingProxy

pytestmark = pytest.mark.e2e

PARAMS = SamplingParams(max_tokens=400, temperature=1.0, logprobs=True, ignore_eos=True)
CONSTRAINED = replace(PARAMS, ignore_eos=False, structured_outputs={"regex": "[a-f]{2000}"})
STREAMS = 4
STOP_S = 7.0
"""Longer than a node may be silent."""


@pytest.mark.timeout(400)  # Also counts the start of the engines, and their end, when it runs alone.
async def test_streams_survive_a_killed_node_a_stopped_node_and_a_cut_connection(cluster: Cluster) -> None:
    async with CuttingProxy(cluster.address) as proxy, AsyncClient(proxy.address, timeout_s=180) as client:
        each = [CONSTRAINED if i % 2 else PARAMS for i in range(STREAMS)]
        alone = [await client.generate([5, i], params, seed=i) for i, params in enumerate(each)]
        streams = [asyncio.create_task(client.generate([5, i], params, seed=i)) for i, params in enumerate(each)]
        await asyncio.to_thread(wait_for, lambda: running(cluster) == STREAMS, "the streams run")
        assert not any(stream.done() for stream in streams)
        proxy.cut()
        await kill(cluster, "decode")
        prefill = cluster.processes.running["prefill"].pid
        with stopped(prefill, *descendants(prefill)):
            await asyncio.sleep(STOP_S)
        done = await asyncio.gather(*streams)
    assert [bits(generation) for generation in done] == [bits(generation) for generation in alone]
    assert done[0].receipt.decode_node != alone[0].receipt.decode_node
    assert all(set(generation.text) <= set("abcdef") for generation in done[1::2])
    assert {len(generation.token_ids) for generation in done} == {PARAMS.max_tokens}
    wait_for(lambda: ready(cluster.status), "both nodes are in use again")


def running(cluster: Cluster) -> float:
    """Samples at the decode node now: what its heartbeats say may have ended since."""
    return cluster.shown("decode")["corun_decode_leases"]


async def kill(cluster: Cluster, name: str) -> None:
    """SIGKILL for the node's own process. Its engine ends without it; then the node is started again."""
    process = cluster.processes.running[name]
    tree = descendants(process.pid)
    try:
        process.kill()
        process.wait()
        await asyncio.to_thread(wait_for, lambda: not living(tree), "its engine has ended")
    finally:  # A failure here leaves the other tests their cluster.
        cluster.processes.start(name, *process.args[2:])  # Behind python -m.


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that stand still in the block."""
    signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(pids, signal.SIGCONT)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # A helper process that has ended since they were listed.
            os.kill(pid, number)
