"""The contract on the real cluster: every bit of every sample, whatever runs beside it, wherever and whenever."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from corun import Client, Condition, Generation, SamplingParams
from corun.records.verification import VerifyCase
from corun.types import NodeRole, NodeState
from tests.e2e.conftest import CHUNK, SLOTS, START_TIMEOUT_S, Cluster, ready
from tests.machine import wait_for

pytestmark = pytest.mark.e2e

# Prompt lengths around chunk and KV block edges (both 128 here), and beyond.
LENGTHS = (1, 2, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 300, 513)
STYLES = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {40: 4.0, 41: -100.0}},
    {"temperature": 1.0, "min_tokens": 12},
)
Case = tuple[list[int], SamplingParams, int]


def make_cases(count: int) -> list[Case]:
    """Greedy, seeded and penalised samples over all prompt lengths."""
    draw = random.Random(20)
    cases = []
    for i in range(count):
        prompt = [draw.randrange(3, 500) for _ in range(LENGTHS[i % len(LENGTHS)])]
        params = SamplingParams(max_tokens=draw.randrange(8, 40), logprobs=True, **STYLES[(i * 5) % len(STYLES)])
        cases.append((prompt, params, draw.randrange(2**63)))
    return cases


def run(client: Client, cases: list[Case], concurrency: int) -> list[Generation]:
    prompts, params, seeds = zip(*cases, strict=True)
    return client.generate_many(list(prompts), list(params), seeds=list(seeds), concurrency=concurrency, progress=False)


def bits(generation: Generation) -> bytes:
    """Token ids and logprobs of all samples, as the bytes that have to agree."""
    return b"".join(
        struct.pack(f"<{len(s.token_ids)}I{len(s.logprobs)}f", *s.token_ids, *s.logprobs) for s in generation.samples
    )


def differing(left: list[Generation], right: list[Generation]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if bits(a) != bits(b)]


def test_20_prompts_on_8_slots_in_two_orders(cluster: Cluster) -> None:
    cases = make_cases(20)
    order = list(range(len(cases)))
    random.Random(4).shuffle(order)
    with cluster.client() as client:
        alone = run(client, cases, concurrency=1)
        crowded = run(client, cases, concurrency=20)
        shuffled = run(client, [cases[i] for i in order], concurrency=SLOTS)
    # Equal bits mean little if every output is the same.
    assert len({bits(generation) for generation in alone}) == len(alone)
    assert len({token for generation in alone for token in generation.token_ids}) > 50
    assert differing(alone, crowded) == []
    assert differing([alone[i] for i in order], shuffled) == []


def test_eight_samples_read_their_prompt_once_and_have_the_bits_of_samples_that_share_nothing(cluster: Cluster) -> None:
    """A prompt of 513 tokens has four blocks before its last position. Cases of a verification share nothing."""
    draw = random.Random(21)
    prompt = [draw.randrange(3, 500) for _ in range(513)]
    params = SamplingParams(max_tokens=20, temperature=1.0, logprobs=True)

    before = cluster.kv_reads()
    with cluster.client() as client:
        together = client.generate(prompt, replace(params, n=8), seed=7)
        assert len({sample.receipt.output_digest for sample in together.samples}) == 8
        after = cluster.kv_reads()
        assert after.count == before.count + 8
        assert after.shared_tokens - before.shared_tokens == 7 * 4 * 128
        assert after.failed == before.failed
        cases = [
            VerifyCase(
                prompt_token_ids=tuple(prompt),
                sampling_params=params,
                seed=sample.receipt.seed,
                output_digest=sample.receipt.output_digest,
            )
            for sample in together.samples
        ]
        assert [result.match for result in client.verify(cases, [Condition.ALONE])] == [True] * 8
    alone = cluster.kv_reads()
    assert (alone.count, alone.shared_tokens) == (after.count + 8, after.shared_tokens)


def test_verify_under_every_condition(cluster: Cluster) -> None:
    """A wrong digest is the negative control of the check itself."""
    cases = make_cases(10)
    prompt, params, seed = cases[1]
    wrong = VerifyCase(prompt_token_ids=tuple(prompt), sampling_params=params, seed=seed, output_digest="0" * 64)
    with cluster.client() as client:
        verify_all(client, cases)
        assert [result.match for result in client.verify([wrong], [Condition.ALONE])] == [False]


def verify_all(client: Client, cases: list[Case]) -> None:
    """The router's own check: alone, crowded, behind samples that hold the first slots, shuffled."""
    checked = [VerifyCase(prompt_token_ids=tuple(p), sampling_params=q, seed=s) for p, q, s in cases]
    results = list(client.verify(checked))
    assert len(results) == len(checked) * len(Condition)
    assert [result for result in results if not result.match] == []


def test_n_samples_are_n_seeds(cluster: Cluster) -> None:
    """Samples differ, are the same again, and each one can be had alone by its own seed."""
    params = SamplingParams(n=4, max_tokens=16, temperature=1.0, logprobs=True)
    with cluster.client() as client:
        first = client.generate("Once upon a time", params, seed=42)
        again = client.generate("Once upon a time", params, seed=42)
        assert first.seed == 42
        assert len({sample.seed for sample in first.samples}) == 4
        assert len({sample.token_ids for sample in first.samples}) == 4
        assert bits(first) == bits(again)
        one = SamplingParams(max_tokens=16, temperature=1.0, logprobs=True)
        for sample in first.samples:
            assert client.generate("Once upon a time", one, seed=sample.seed).logprobs == sample.logprobs


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_without_a_prefix_cache_gives_the_same_bits(cluster: Cluster) -> None:
    """Prompts that begin alike, computed and taken from the cache, and computed by a node that has none."""
    draw = random.Random(22)
    text = [draw.randrange(3, 500) for _ in range(5 * CHUNK)]
    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=True)
    cases = [(text[:length], params, length) for length in (CHUNK + 1, 2 * CHUNK, 300, 4 * CHUNK, 5 * CHUNK)]

    def rerun() -> tuple[list[Generation], float]:
        before = cluster.shown("prefill")["corun_prefill_cached_tokens_total"]
        with cluster.client() as client:
            done = run(client, cases, concurrency=1)
        after = cluster.shown("prefill")["corun_prefill_cached_tokens_total"]
        return done, after - before

    first, again = rerun(), rerun()
    command = cluster.processes.running["prefill"].args[2:]  # Behind python -m.
    restart(cluster, [*command, "--no-prefix-caching"])
    try:
        without = rerun()
    finally:
        restart(cluster, command)
    assert again[1] > first[1] > without[1] == 0
    assert differing(first[0], again[0]) == differing(first[0], without[0]) == []


def restart(cluster: Cluster, command: list[str]) -> None:
    """Stop the prefill node, and start it with this command."""
    before = generation(cluster)
    process = cluster.processes.running["prefill"]
    process.terminate()
    process.wait(60)
    cluster.processes.start("prefill", *command)
    wait_for(lambda: ready(cluster.status) and generation(cluster) != before, "it is back", START_TIMEOUT_S)


def generation(cluster: Cluster) -> list[str]:
    nodes = cluster.status().nodes
    return [
        one.node.ref.generation for one in nodes if one.node.role is NodeRole.PREFILL and one.state is NodeState.READY
    ]
