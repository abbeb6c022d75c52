"""The contract on the real cluster: every bit of every sample, whatever runs beside it, wherever and whenever."""

from __future__ import annotations

import random
import struct

import pytest

from corun import Client, Condition, Generation, SamplingParams
from tests.e2e.conftest import CHUNK, SLOTS, Cluster

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


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(40)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, cases: list[Case]) -> list[Generation]:
    with cluster.client() as client:
        return run(client, cases, concurrency=1)


def test_outputs_are_diverse(alone: list[Generation]) -> None:
    """Equal bits mean little if every output is the same."""
    assert len({bits(generation) for generation in alone}) == len(alone)
    assert len({token for generation in alone for token in generation.token_ids}) > 50


def test_crowded_40_prompts_on_8_slots(cluster: Cluster, cases: list[Case], alone: list[Generation]) -> None:
    with cluster.client() as client:
        assert differing(alone, run(client, cases, concurrency=40)) == []


def test_shuffled_arrival(cluster: Cluster, cases: list[Case], alone: list[Generation]) -> None:
    order = list(range(len(cases)))
    random.Random(4).shuffle(order)
    with cluster.client() as client:
        shuffled = run(client, [cases[i] for i in order], concurrency=SLOTS)
    assert differing([alone[i] for i in order], shuffled) == []


def test_verify_under_every_condition(cluster: Cluster, cases: list[Case]) -> None:
    with cluster.client() as client:
        verify_all(client, cases[:10])


def verify_all(client: Client, cases: list[Case]) -> None:
    """The router's own check: alone, crowded, behind samples that hold the first slots, shuffled."""
    from corun.records.verification import VerifyCase

    checked = [VerifyCase(prompt_token_ids=tuple(p), sampling_params=q, seed=s) for p, q, s in cases]
    results = list(client.verify(checked))
    assert len(results) == len(checked) * len(Condition)
    assert [result for result in results if not result.match] == []


def test_verify_notices_a_wrong_digest(cluster: Cluster, cases: list[Case]) -> None:
    """Negative control of the check itself."""
    from corun.records.verification import VerifyCase

    prompt, params, seed = cases[1]
    wrong = VerifyCase(prompt_token_ids=tuple(prompt), sampling_params=params, seed=seed, output_digest="0" * 64)
    with cluster.client() as client:
        results = list(client.verify([wrong], [Condition.ALONE]))
    assert [result.match for result in results] == [False]


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


def test_derived_seed_follows_the_request_id(cluster: Cluster) -> None:
    params = SamplingParams(max_tokens=8)
    with cluster.client() as client:
        same = [client.generate("The clock", params, request_id="job-7") for _ in range(2)]
        other = client.generate("The clock", params, request_id="job-8")
    assert same[0].seed == same[1].seed != other.seed
    assert same[0].token_ids == same[1].token_ids


def test_a_neighbours_seed_plus_one_is_another_stream(cluster: Cluster) -> None:
    """vLLM seeds sample i with seed + i, so that neighbours share streams; ours must not."""
    params = SamplingParams(n=2, max_tokens=24, temperature=1.0)
    with cluster.client() as client:
        second_of_seven = client.generate("A quiet town", params, seed=7).samples[1]
        eight = client.generate("A quiet town", SamplingParams(max_tokens=24, temperature=1.0), seed=8)
    assert second_of_seven.token_ids != eight.token_ids


def test_receipt_says_what_ran(cluster: Cluster) -> None:
    with cluster.client() as client:
        done = client.generate("The hills", SamplingParams(max_tokens=5, logprobs=True, ignore_eos=True), seed=3)
        fingerprint = client.get_cluster().fingerprint
    receipt = done.receipt
    assert (receipt.prefill_node.node_id, receipt.decode_node.node_id) == ("p0", "d0")
    assert (receipt.seed, receipt.num_output_tokens, receipt.fingerprint) == (3, 5, fingerprint)
    assert len(fingerprint) == 64
