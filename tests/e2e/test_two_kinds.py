"""A colocated node beside a pair: one fingerprint, the same bits on every path, and streams that go from one to the
other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from corun import AsyncClient, Client, Generation, SamplingParams
from corun.processes import descendants
from corun.types import NodeState
from tests.e2e.conftest import ALL_CHECKED, CHUNK, SLOTS, START_TIMEOUT_S, Cluster
from tests.e2e.test_determinism import bits, differing, make_cases, run
from tests.e2e.test_faults import stopped
from tests.e2e.test_scores import bits as score_bits
from tests.e2e.test_scores import cases as score_cases
from tests.e2e.test_scores import score
from tests.machine import free_port, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SIDES = {"c0-prefill", "c0-decode"}
STREAMS = 4
PARAMS = SamplingParams(max_tokens=800, temperature=0.8, logprobs=True, ignore_eos=True)
Path = tuple[str, str]


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> list[Generation]:
    """The outputs of the pair, one at a time, before the colocated node is there."""
    with cluster.client() as client:
        return run(client, make_cases(18), concurrency=1)


@pytest.fixture(scope="module")
def colocated(cluster: Cluster, alone: list[Generation]) -> Iterator[None]:
    """A colocated node beside the pair, until a test kills it."""
    cluster.metrics["c0"] = free_port()
    flags = ("--router", cluster.address, "--model", cluster.model, "--threads", "2", "--node-id", "c0")
    flags += ("--slots", str(SLOTS), "--chunk-size", str(CHUNK), *ALL_CHECKED)
    flags += ("--metrics-port", str(cluster.metrics["c0"]))
    cluster.processes.start("c0", "colocated_node", *flags)

    def is_ready() -> bool:
        assert cluster.processes.running["c0"].poll() is None, cluster.processes.log("c0")[-3000:]
        states = {node.node.ref.node_id: node.state for node in cluster.status().nodes}
        return all(states.get(side) is NodeState.READY for side in SIDES)

    wait_for(is_ready, "the colocated node is ready", START_TIMEOUT_S)
    yield
    if "c0" in cluster.processes.running:
        assert cluster.processes.terminate("c0", 40.0) == 0
    del cluster.metrics["c0"]


def path_of(generation: Generation) -> Path:
    return generation.receipt.prefill_node.node_id, generation.receipt.decode_node.node_id


def test_every_path_gives_the_bits_of_the_pair(cluster: Cluster, colocated: None, alone: list[Generation]) -> None:
    """Prompts and samples of both engines, within one and from one to the other."""
    cases, seen = make_cases(18), set[Path]()
    with cluster.client() as client:
        assert client.get_cluster().fingerprint == alone[0].receipt.fingerprint
        for _ in range(6):
            crowded = run(client, cases, concurrency=len(cases))
            assert differing(alone, crowded) == []
            seen |= {path_of(one) for one in crowded}
            if len(seen) == 4:
                break
    assert ("c0-prefill", "c0-decode") in seen
    assert {"p0", "c0-prefill"} == {prefill for prefill, _ in seen}
    assert {"d0", "c0-decode"} == {decode for _, decode in seen}


def test_both_kinds_give_a_score_the_same_bits(cluster: Cluster, colocated: None) -> None:
    found: dict[str, list[bytes]] = {}

    def note(client: Client, number: int) -> None:
        one = score(client, score_cases()[number])
        found.setdefault(f"{number} {one.prefill_node.node_id}", []).append(score_bits(one))

    numbers = range(len(score_cases()))
    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
        for _ in range(6):
            list(pool.map(note, 8 * [client] * len(numbers), 8 * list(numbers)))
            if len(found) == 2 * len(numbers):
                break
    assert {name.split()[1] for name in found} == {"p0", "c0-prefill"}
    for number in numbers:
        assert len({each for name, all_ in found.items() if name.split()[0] == str(number) for each in all_}) == 1


@pytest.mark.timeout(240)
async def test_streams_go_from_the_pair_to_the_colocated_node_and_back(cluster: Cluster, colocated: None) -> None:
    """The pair's decode node falls silent. The colocated node dies while it does that one's work, so both its sides are
    lost. Then there is only the pair."""
    async with AsyncClient(cluster.address, timeout_s=180) as client:

        def start(name: str) -> list[asyncio.Task[Generation]]:
            asked = (client.generate([5, i], PARAMS, seed=i, request_id=f"{name}-{i}") for i in range(STREAMS))
            return [asyncio.create_task(one) for one in asked]

        def decoding(node: str) -> float:
            return cluster.shown(node)["corun_decode_used_slots"]

        def all_have_moved() -> bool:
            return decoding("c0") == sum(not stream.done() for stream in streams)

        streams = start("there-and-back")
        await asyncio.to_thread(wait_for, lambda: decoding("decode"), "the pair has streams")
        decode = cluster.processes.running["decode"].pid
        with stopped(decode, *descendants(decode)):
            await asyncio.to_thread(wait_for, all_have_moved, "the colocated node has all streams")
            cluster.processes.kill("c0", step_s=0.5)
        done = await asyncio.gather(*streams)
        undisturbed = await asyncio.gather(*start("undisturbed"))
    assert [bits(one) for one in done] == [bits(one) for one in undisturbed]
    attempts: dict[str, list[str]] = {}
    failure = r"of request 'there-and-back-(\d)' failed: ([\w-]+)@"
    for name, node in re.findall(failure, cluster.processes.log("router")):
        attempts.setdefault(name, []).append(node)
    assert ["d0", "c0-decode"] in attempts.values()
    assert {path_of(done[int(name)]) for name in attempts} == {("p0", "d0")}
    unused = {node.node.ref.node_id for node in cluster.status().nodes if node.state is not NodeState.READY}
    assert unused == SIDES
