"""Scores through a whole cluster of real services: what clients get, what nodes are asked, and what comes of faults.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.completion import Scores
from corun.errors import (
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from corun.params import MAX_CONTINUATIONS, SamplingParams
from corun.receipt import output_digest
from corun.rpc.auth import Caller
from corun.testing.cluster import WAIT_S, router_config
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE, expected_scores
from corun.types import FreedomStatus, NodeRole, NodeState, Priority
from router import score as router_score
from router.request import check_priority
from tests.clusters import FakeCluster, cluster, retries
from tests.router.asking import LONG

PROMPT = (5, 6, 7)
CONTINUATIONS = ((8,), (9, 10, 11))


def engine_of(fake: FakeCluster, node_id: str = "p1") -> Any:
    return fake.node(node_id).sides[NodeRole.PREFILL].engine


def check(found: Scores) -> None:
    """The scores are those of the fake model, each with its digest."""
    for asked, score in zip(CONTINUATIONS, found.scores, strict=True):
        wanted = expected_scores((*PROMPT, *asked), len(asked))
        assert (score.token_ids, score.logprobs) == (asked, wanted.logprobs)
        assert (score.top_token_ids, score.top_logprobs) == (wanted.top_token_ids, wanted.top_logprobs)
        assert score.output_digest == output_digest(asked, wanted.logprobs)


def certify(fake: FakeCluster, node_id: str) -> None:
    """The prefill side of a colocated node tells that its drawn tokens have the bits of prompts."""
    node = fake.router.registry._prefills[node_id]
    node.describe(replace(node.info, freedoms=(FreedomStatus(name="scores"),)))


async def test_a_score_equals_generation_only_where_all_that_draw_hold_the_certificate(model: str) -> None:
    fake = FakeCluster(model, router_config())
    try:
        await fake.start(0, 0, 1, colocated=2)
        async with AsyncClient(fake.address) as client:
            claims = []
            names = sorted(fake.router.registry._prefills)
            for name in (None, *names):
                if name:
                    certify(fake, name)
                claims.append((await client.score(PROMPT, [(8,)])).scores[0].equals_generation)
            assert claims == [False, False, True]
            await fake.add_decode()
            await fake.until(lambda: len(fake.router.registry.decode_nodes()) == 3)
            assert not (await client.score(PROMPT, [(8,)])).scores[0].equals_generation
    finally:
        await fake.close()


async def test_each_continuation_is_scored_after_the_prompt_and_takes_no_slot(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        found = await client.score(PROMPT, CONTINUATIONS, request_id="mine")
        check(found)
        assert (found.request_id, found.prompt_token_ids) == ("mine", PROMPT)
        assert found.fingerprint == fake.router.registry.contract.fingerprint
        assert {score.prefill_node.node_id for score in found.scores} == {"p1"}
        assert not any(score.equals_generation for score in found.scores), "a fake engine has no certificate"
        assert sorted(engine_of(fake).scored) == sorted((*PROMPT, *each) for each in CONTINUATIONS)
        assert engine_of(fake).prefilled == []
        assert fake.node("d1").engine.most_running == 0
        assert fake.router.metrics.scored_tokens.value == 4


async def test_texts_of_scores_are_made_for_one_request_at_a_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that makes texts takes the interpreter from the event loop for some milliseconds at a time. Threads
    for many requests once stopped all streams of a router for a second."""
    threads, most = 0, 0
    texts = router_score._with_texts

    def counted(*args: Any) -> Scores:
        nonlocal threads, most
        threads += 1
        most = max(most, threads)
        time.sleep(0.002)
        found = texts(*args)
        threads -= 1
        return found

    monkeypatch.setattr(router_score, "_with_texts", counted)
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        found = await asyncio.gather(*(client.score(PROMPT, CONTINUATIONS, token_texts=True) for _ in range(12)))
    assert all(len(each.scores[1].top_token_texts) == 3 for each in found)
    assert most == 1


async def test_a_colocated_node_scores_too(model: str) -> None:
    fake = FakeCluster(model, router_config())
    try:
        await fake.start(0, 0, 1, colocated=1)
        async with AsyncClient(fake.address) as client:
            check(await client.score(PROMPT, CONTINUATIONS))
    finally:
        await fake.close()


async def test_a_text_prompt_gets_special_tokens_and_a_continuation_none(chat_model: str) -> None:
    async with cluster(chat_model) as fake, AsyncClient(fake.address) as client:
        found = await client.score("ab", ["cd"])
        assert found.prompt_token_ids == (await client.tokenize("ab")).token_ids
        assert found.scores[0].token_ids == (await client.tokenize("cd", add_special_tokens=False)).token_ids
        assert len(found.prompt_token_ids) == 3
        assert len(found.scores[0].token_ids) == 2


async def test_a_changed_token_changes_its_score_and_the_later_ones_only(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        found = await client.score(PROMPT, [(8, 9, 10), (8, 1, 10)])
    one, other = (score.logprobs for score in found.scores)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


async def test_greedy_is_told_by_the_likeliest_tokens(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        found = await client.score(PROMPT, [(3, 9), (3, 10)])
    assert [score.is_greedy for score in found.scores] == [True, False]


@pytest.mark.parametrize(
    ("prompt", "continuations", "field"),
    [
        ((), [(1,)], "prompt.token_ids"),
        ((1,), [], "continuations"),
        ((1,), [(1,)] * (MAX_CONTINUATIONS + 1), "continuations"),
        ((1,), [(2,), ()], "continuations[1].token_ids"),
        ((1,), "text", "continuations"),
        ((1,), [(VOCAB_SIZE,)], "continuations[0].token_ids[0]"),
        ((VOCAB_SIZE,), [(1,)], "prompt.token_ids[0]"),
        ((1,), [(1,) * MAX_MODEL_LEN], "continuations[0].token_ids"),
        ((1,) * MAX_MODEL_LEN, [(1,)], "prompt.token_ids"),
        ("x" * MAX_MODEL_LEN, ["a"], "prompt.text"),
        ("x", ["a" * MAX_MODEL_LEN], "continuations[0].text"),
        ("x", ["b", ""], "continuations[1].text"),
    ],
)
async def test_refusals_name_the_field(model: str, prompt: Any, continuations: Any, field: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        with pytest.raises(InvalidArgumentError) as refused:
            await client.score(prompt, continuations)
        assert refused.value.field == field
        assert engine_of(fake).scored == []


async def test_a_sequence_may_be_as_long_as_the_model(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        found = await client.score((1,), [(2,) * (MAX_MODEL_LEN - 1)])
        assert len(found.scores[0].logprobs) == MAX_MODEL_LEN - 1


async def test_all_tokens_of_a_request_are_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corun.params.MAX_SCORED_TOKENS", 10)
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        with pytest.raises(InvalidArgumentError, match=f"at most {MAX_MODEL_LEN} tokens together"):
            await client.score((1,), [(2,) * 400, (3,) * 400])


async def test_scores_wait_in_the_queue_for_room_and_the_queue_is_bounded(model: str) -> None:
    async with cluster(model, max_queued_samples=4) as fake, AsyncClient(fake.address) as client:
        async with engine_of(fake).turn:
            first = [asyncio.ensure_future(client.score(PROMPT, [(8,)])) for _ in range(4)]
            await fake.until(lambda: fake.node("p1").queued_tokens == 16)
            waiting = asyncio.ensure_future(client.score(PROMPT, [(8,)] * 4))
            await fake.until(lambda: fake.router.queue.waiting == 4)
            with pytest.raises(OverloadedError):
                await client.score(PROMPT, [(8,)])
        await asyncio.gather(*first, waiting)


async def test_a_score_needs_no_slot_while_samples_hold_all_of_them(model: str) -> None:
    async with cluster(model, slots=1) as fake, AsyncClient(fake.address) as client:
        sample = asyncio.ensure_future(client.generate(PROMPT, LONG, seed=1))
        await fake.until(lambda: fake.node("d1").drawn_tokens)
        check(await client.score(PROMPT, CONTINUATIONS))
        assert not sample.done()
        sample.cancel()
        await asyncio.wait((sample,))


async def test_a_cancelled_call_gives_everything_back(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client, engine_of(fake).turn:
        asked = asyncio.ensure_future(client.score(PROMPT, [(8,)] * 8))
        await fake.until(lambda: fake.node("p1").queued_tokens and fake.router.queue.waiting)
        asked.cancel()
        await fake.idle()
        await fake.until(lambda: not fake.node("p1").queued_tokens)


async def test_a_deadline_ends_a_score(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        await client.get_cluster()  # Without a connection, its end would be the error.
        async with engine_of(fake).turn:
            with pytest.raises(DeadlineError):
                await client.score(PROMPT, [(8,)], timeout_s=0.6)
        await fake.idle()


async def test_a_node_that_dies_is_replaced_by_another(model: str) -> None:
    async with cluster(model, prefills=2) as fake, AsyncClient(fake.address) as client:
        async with engine_of(fake, "p1").turn:
            asked = asyncio.ensure_future(client.score(PROMPT, CONTINUATIONS))
            await fake.until(lambda: fake.node("p1").queued_tokens)
            await fake.kill("p1")
        found = await asked
        check(found)
        assert "p2" in {score.prefill_node.node_id for score in found.scores}
        assert retries(fake) == {"lost": 1}


async def test_faults_end_a_score_at_last(model: str) -> None:
    async with cluster(model, max_attempts=2) as fake, AsyncClient(fake.address) as client:
        engine_of(fake).errors = [InternalError("broken"), InternalError("broken")]
        with pytest.raises(UnavailableError, match="nodes failed 2 runs of score 0"):
            await client.score(PROMPT, [(8,)])
        engine_of(fake).errors = [InternalError("broken")]
        check(await client.score(PROMPT, CONTINUATIONS))


async def test_logits_that_are_twice_not_finite_are_the_requests_fault(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        engine_of(fake).not_finite = 2
        with pytest.raises(InvalidArgumentError, match="not finite"):
            await client.score(PROMPT, [(8,)])
        assert fake.state("p1") is NodeState.READY


async def test_a_node_whose_logits_another_contradicts_is_quarantined(model: str) -> None:
    async with cluster(model, prefills=2) as fake, AsyncClient(fake.address) as client:
        engine_of(fake, "p1").not_finite = 1
        found = await client.score(PROMPT, [(8,)])
        assert found.scores[0].prefill_node.node_id == "p2"
        await fake.until(lambda: fake.state("p1") is NodeState.REFUSED)


async def test_a_node_that_contradicts_itself_is_quarantined(model: str) -> None:
    """Its first logits were not finite, and its second ones were: one of both is wrong."""
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        engine_of(fake).not_finite = 1
        await client.score(PROMPT, [(8,)])
        await fake.until(lambda: fake.state("p1") is NodeState.REFUSED)


async def test_an_answer_with_other_bits_than_its_digest_is_not_believed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.score.output_digest", lambda *_: "0" * 64)
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        with pytest.raises(DataLossError, match="score 0 differs from its digest"):
            await client.score(PROMPT, [(8,)])


async def test_a_score_of_what_was_drawn_is_asked_with_its_tokens(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        done = await client.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=True), seed=3)
        found = await client.score(done.prompt_token_ids, [done.token_ids], timeout_s=WAIT_S)
        assert found.scores[0].token_ids == done.token_ids


async def test_a_client_may_not_ask_for_a_higher_priority_than_its_own(model: str) -> None:
    with pytest.raises(PermissionDeniedError):
        check_priority(Priority.HIGH, Caller(name="low", max_priority=Priority.NORMAL))


async def test_sequences_that_no_node_could_hold_are_refused(model: str) -> None:
    async with cluster(model, decodes=0) as fake, AsyncClient(fake.address) as client:
        await fake.add_decode(kv_blocks=2)
        await fake.ready("p1", "d1")
        with pytest.raises(InvalidArgumentError, match="room in the KV"):
            await client.score((1,) * 20, [(2,) * 20])
