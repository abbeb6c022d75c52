"""A colocated node beside a pair: one fingerprint, the same bits on every path, and streams that go from one to the
other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from corun import Generation, SamplingParams
from corun.types import NodeState
from tests.e2e.conftest import ALL_CHECKED, CHUNK, SLOTS, START_TIMEOUT_S, Cluster, wait_until
from tests.e2e.test_determinism import bits, differing, make_cases, run

pytestmark = pytest.mark.e2e

SIDES = {"c0-prefill", "c0-decode"}
Path = tuple[str, str]


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> list[Generation]:
    """The outputs of the pair, one at a time, before the colocated node is there."""
    with cluster.client() as client:
        return run(client, make_cases(18), concurrency=1)


@pytest.fixture
def colocated(cluster: Cluster, alone: list[Generation]) -> Iterator[None]:
    """A colocated node beside the pair."""
    flags = ("--router", cluster.address, "--model", cluster.model, "--threads", "2", "--node-id", "c0")
    flags += ("--slots", str(SLOTS), "--chunk-size", str(CHUNK), *ALL_CHECKED)
    cluster.processes.start("c0", "colocated_node", *flags)

    def is_ready() -> bool:
        assert cluster.processes.running["c0"].poll() is None, cluster.processes.log("c0")[-3000:]
        states = {node.node.ref.node_id: node.state for node in cluster.status().nodes}
        return all(states.get(side) is NodeState.READY for side in SIDES)

    wait_until(is_ready, "the colocated node is ready", START_TIMEOUT_S)
    yield
    if "c0" in cluster.processes.running:
        assert cluster.processes.terminate("c0", 40.0) == 0


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


def test_a_stream_of_a_dead_colocated_node_goes_on_from_the_pair(cluster: Cluster, colocated: None) -> None:
    """Both of its sides are lost at once, and its samples run on bit by bit, by pairs of the others."""
    params = SamplingParams(max_tokens=160, temperature=0.8, logprobs=True, ignore_eos=True)
    cases = [(make_cases(SLOTS)[i][0], params, 900 + i) for i in range(SLOTS)]
    with cluster.client() as client, ThreadPoolExecutor(1) as pool:
        expected = run(client, cases, concurrency=2)
        running = pool.submit(run, client, cases, SLOTS)

        def decodes() -> bool:
            loads = {node.node.ref.node_id: node.load.used_slots for node in cluster.status().nodes}
            return loads["c0-decode"] > 0

        wait_until(decodes, "the colocated node decodes")
        cluster.processes.kill("c0", step_s=0.5)
        assert differing(expected, running.result(120)) == []
        assert {bits(one) for one in expected}
    gone = {node.node.ref.node_id for node in cluster.status().nodes if node.state is not NodeState.READY}
    assert gone <= SIDES
