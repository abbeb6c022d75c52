"""What `corun.testing` promises to those who test their own clients with it, by public names only."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from corun import AsyncClient, Client, DataLossError, Generation, InvalidArgumentError, SamplingParams, UnavailableError
from corun.testing import LocalCluster, expected, local_cluster
from corun.types import NodeRole, NodeState

PARAMS = SamplingParams(max_tokens=60, logprobs=True)
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def bits(done: Generation) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return done.token_ids, done.logprobs


async def test_one_seed_gives_one_output_and_it_is_known_ahead() -> None:
    async with local_cluster() as cluster, AsyncClient(cluster.address) as client:
        one, two, other = [await client.generate([5, 6, 7], PARAMS, seed=seed) for seed in (1, 1, 2)]
        assert bits(one) == bits(two) != bits(other)
        token_ids, logprobs, reason = expected([5, 6, 7], PARAMS, seed=1)
        assert (bits(one), one.finish_reason) == ((tuple(token_ids), tuple(logprobs)), reason)


async def drawing(cluster: LocalCluster) -> str:
    """Wait until a decode node has drawn more than ten tokens; return its name."""
    names = ("d1", "d2")
    await cluster.until(lambda: any(cluster.node(name).drawn_tokens > 10 for name in names))
    return next(name for name in names if cluster.node(name).drawn_tokens)


async def test_a_killed_decode_node_changes_no_bit() -> None:
    async with local_cluster(decode=2, step_ms=5) as cluster, AsyncClient(cluster.address) as client:
        tokens: list[int] = []
        async for chunk in client.stream("Once upon a time", PARAMS, seed=3):
            if not tokens:
                name = await drawing(cluster)
                held = ", ".join(cluster.held())
                assert all(f"{what} of {name}@" in held for what in ("1 leases", "claim on a place", "claim on KV"))
                await cluster.kill(name)
            tokens += chunk.token_ids
        done = await client.generate("Once upon a time", PARAMS, seed=3)
        assert tuple(tokens) == done.token_ids
        await cluster.idle()


async def test_nodes_and_routers_come_back() -> None:
    async with local_cluster(routers=2) as cluster, AsyncClient(cluster.address) as client:
        first = await client.generate([1], PARAMS, seed=1)
        for name in ("p1", "d1"):
            await cluster.stop(name)
            await cluster.restart(name)
        again = await client.generate([1], PARAMS, seed=1)
        assert bits(again) == bits(first)
        assert again.receipt.decode_node != first.receipt.decode_node
        for index in (0, 1):
            await cluster.kill_router(index)
            assert bits(await client.generate([1], PARAMS, seed=1)) == bits(first)
            await cluster.restart_router(index)
            await cluster.ready("p1", "d1")


async def test_faults_of_engines_reach_the_client_as_typed_errors() -> None:
    async with local_cluster(max_attempts=1) as cluster, AsyncClient(cluster.address) as client:
        engine = cluster.node("d1").engine
        engine.start_errors = [InvalidArgumentError("sampling_params.top_k", 3, "must not be")]
        with pytest.raises(InvalidArgumentError, match="must not be"):
            await client.generate([1], PARAMS)
        engine.not_finite = [4]
        with pytest.raises(InvalidArgumentError, match="not finite at output token 4"):
            await client.generate([1], PARAMS)


async def test_a_sample_that_an_engine_fails_runs_again() -> None:
    async with local_cluster(decode=2) as cluster, AsyncClient(cluster.address) as client:
        for name in ("d1", "d2"):
            cluster.node(name).engine.fail_after = 4
        done = await client.generate([1], PARAMS, seed=1)
        assert list(done.token_ids) == expected([1], PARAMS, seed=1)[0]
        assert len(cluster.node("p1").engine.prefilled) > 1
        cluster.node("d1").engine.die()
        with pytest.raises(UnavailableError, match="the engine died"):
            await cluster.node("d1").end()


async def test_wrong_bits_are_found_and_end_the_nodes_that_may_have_given_them() -> None:
    async with local_cluster(decode=2, step_ms=5) as cluster, AsyncClient(cluster.address) as client:
        running = asyncio.create_task(client.generate([1], PARAMS, seed=1))
        name = await drawing(cluster)
        for node in cluster.nodes[1:]:
            node.engine.corrupt = True
        await cluster.kill(name)
        with pytest.raises(DataLossError):
            await running
        with pytest.raises(DataLossError, match="other bits"):
            await cluster.node("p1").end()


async def test_both_sides_of_a_colocated_node_end_and_come_back_together() -> None:
    async with local_cluster(prefill=0, decode=0, colocated=1) as cluster, AsyncClient(cluster.address) as client:
        done = await client.generate([1], PARAMS, seed=1)
        sides = done.receipt.prefill_node, done.receipt.decode_node
        assert [side.node_id for side in sides] == ["c1-prefill", "c1-decode"]
        assert sides[0].generation == sides[1].generation
        prefill, decode = (status.node for status in cluster.router.registry.statuses())
        assert prefill.engine_id == decode.engine_id != ""
        assert prefill.address == decode.address
        await cluster.stop("c1-decode")
        await cluster.until(lambda: {cluster.state("c1-prefill"), cluster.state("c1-decode")} == {NodeState.LOST})
        await cluster.restart("c1-prefill")
        again = await client.generate([1], PARAMS, seed=1)
        assert bits(again) == bits(done)
        assert again.receipt.decode_node.generation != sides[1].generation
        cluster.node("c1").sides[NodeRole.PREFILL].engine.die()
        with pytest.raises(UnavailableError, match="the engine died"):
            await cluster.node("c1-decode").end()


def test_without_asyncio_it_runs_in_a_thread() -> None:
    with local_cluster(decode=2) as cluster, Client(cluster.address) as client:
        first = client.generate([1], PARAMS, seed=1)
        cluster.run(cluster.kill(first.receipt.decode_node.node_id))
        assert bits(client.generate([1], PARAMS, seed=1)) == bits(first)


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(TypeError, match="slot_count"), local_cluster(slot_count=3):
        pass


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_an_interrupted_start_leaves_no_thread_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by Ctrl-C."""
    main = threading.get_ident()

    async def start(self: LocalCluster, **counts: int) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(LocalCluster, "start", start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), local_cluster():
        raise AssertionError("it was interrupted")
    assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())
