"""Scores on the real cluster: the same bits alone, in a crowd, and after a hit in the prefix cache."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from corun import Client, SamplingParams, Score
from tests.e2e.conftest import CHUNK, Cluster

pytestmark = pytest.mark.e2e

LENGTHS = ((1, 1), (1, 40), (CHUNK - 1, 2), (CHUNK, 17), (CHUNK + 1, 16), (300, 33), (5, 400))
"""Tokens of prompts and of continuations, around the edges of chunks and of pieces of scored rows."""
Case = tuple[list[int], list[int]]


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 500) for _ in range(count)]


def cases() -> list[Case]:
    draw = random.Random(31)
    return [
        ([draw.randrange(3, 500) for _ in range(a)], [draw.randrange(3, 500) for _ in range(b)]) for a, b in LENGTHS
    ]


def bits(score: Score) -> bytes:
    """Return all that must agree, as bytes."""
    count = len(score.token_ids)
    columns = (*score.token_ids, *score.top_token_ids, *score.logprobs, *score.top_logprobs)
    return struct.pack(f"<{2 * count}I{2 * count}f", *columns)


def score(client: Client, case: Case) -> Score:
    prompt, continuation = case
    return client.score(prompt, [continuation]).scores[0]


def test_a_score_has_the_same_bits_alone_in_a_crowd_and_after_a_hit(cluster: Cluster) -> None:
    draw = random.Random(32)
    with cluster.client() as client, ThreadPoolExecutor(24) as pool:
        alone = [score(client, case) for case in cases()]
        again = [score(client, case) for case in cases()]
        samples = [
            pool.submit(client.generate, case[0], SamplingParams(max_tokens=30), seed=draw.getrandbits(60))
            for case in cases()
        ]
        crowded = [each.result() for each in [pool.submit(score, client, case) for case in cases() * 3]]
        for sample in samples:
            sample.result()
    assert [bits(one) for one in again] == [bits(one) for one in alone]
    assert [bits(one) for one in crowded] == 3 * [bits(one) for one in alone]
    assert any(one.cached_tokens for one in again), "some of them were scored after a hit"
    assert all(one.cached_tokens <= len(case[0]) - 1 for one, case in zip(again, cases(), strict=True))
    for one in alone:
        assert all(logprob <= top <= 0 for logprob, top in zip(one.logprobs, one.top_logprobs, strict=True))


def test_a_changed_token_has_another_score(cluster: Cluster) -> None:
    """The negative control: bits that could not differ would show nothing."""
    prompt, continuation = cases()[5]
    other = [*continuation[:9], continuation[9] + 1, *continuation[10:]]
    with cluster.client() as client:
        one, changed = (client.score(prompt, [each]).scores[0] for each in (continuation, other))
    same = [a == b for a, b in zip(one.logprobs, changed.logprobs, strict=True)]
    assert all(same[:9])
    assert not any(same[9:])


def test_what_was_drawn_is_scored_closely_and_no_more_is_claimed(cluster: Cluster) -> None:
    """A CPU's kernels follow the number of rows, so no certificate says that rows have the bits of prompts."""
    with cluster.client() as client:
        done = client.generate([7, 8, 9] * 60, SamplingParams(max_tokens=60, logprobs=True), seed=3)
        (found,) = client.score(done.prompt_token_ids, [done.token_ids]).scores
    assert max(abs(a - b) for a, b in zip(found.logprobs, done.logprobs, strict=True)) < 0.1
    assert not found.equals_generation
