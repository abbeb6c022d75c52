"""`Verify` over fake engines: what it compares, whose limits it keeps, and how it gives way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from corun.client.client import AsyncClient
from corun.errors import DeadlineError, InvalidArgumentError, OverloadedError, from_rpc_error
from corun.params import SamplingParams
from corun.receipt import alternatives_digest, text_digest, tokens_digest
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
from corun.rpc.auth import ANYONE
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.testing.engines import expected, expected_alternatives, expected_digest
from corun.types import FinishReason, NodeState, Priority
from router import attempt, sample
from router.audit import verifier
from router.audit.idle import Fillers, IdleRuns
from router.queue import SampleQueue
from tests.answers import put_forward
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import PARAMS, PROMPT, started, token_of, tokenizer_of, with_tokens

LONG = 400
"""Tokens, on a node of a token a ms: so many that nothing of it ends while a test looks."""


async def verify(
    fake: FakeCluster, cases: list[VerifyCase], conditions: tuple[Condition, ...] = (), *, order_seed: int = 0
) -> list[Any]:
    request = codec.verify_request(cases, conditions, order_seed=order_seed)
    try:
        async with fake.stub() as stub:
            call = stub.Verify(request, timeout=WAIT_S)
            return [codec.verify_result_from_proto(message) async for message in call]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def case(number: int, *, digest: str = "", max_tokens: int = 10) -> VerifyCase:
    params = SamplingParams(max_tokens=max_tokens)
    return VerifyCase(prompt_token_ids=(number, 3), sampling_params=params, seed=number, output_digest=digest)


async def test_what_verifies_a_run_shares_nothing_and_is_isolated(model: str) -> None:
    async with cluster(model) as fake:
        fake.nodes[0].engine.delay_s = 0.05
        case = VerifyCase(prompt_token_ids=PROMPT, sampling_params=PARAMS, seed=5)
        await verify(fake, [case, case], (Condition.SHUFFLED,))
        assert fake.nodes[0].engine.prefilled == fake.nodes[0].engine.isolated == [PROMPT] * 2


async def test_all_conditions_match(model: str) -> None:
    async with cluster(model, decodes=2, slots=4) as fake:
        cases = [case(i) for i in range(3)]
        results = await verify(fake, cases)
        assert len(results) == len(cases) * len(Condition)
        assert all(result.match and not result.error for result in results)
        for result in results:
            wanted = cases[result.case_index]
            digest = expected_digest(wanted.prompt_token_ids, wanted.sampling_params, wanted.seed)
            assert result.expected_digest == result.receipt.output_digest == digest
        assert [r.condition for r in results] == [c for c in Condition for _ in cases]


async def test_parameters_are_made_once_for_all_conditions(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They check themselves when they are made. With long lists that takes a millisecond, and no stream goes on."""
    made, make = list[VerifyCase](), verifier._sample
    monkeypatch.setattr(verifier, "_sample", lambda case, *rest: made.append(case) or make(case, *rest))
    async with cluster(model) as fake:
        results = await verify(fake, [case(i) for i in range(3)], (Condition.ALONE, Condition.SHUFFLED))
        assert [result.match for result in results] == [True] * 6
        assert len(made) == 3


async def test_a_result_says_what_came_out(model: str) -> None:
    async with cluster(model) as fake:
        (result,) = await verify(fake, [case(3, digest="0" * 64)], (Condition.ALONE,))
        assert (result.match, result.expected_digest) == (False, "0" * 64)
        ids, _, reason = expected((3, 3), case(3).sampling_params, 3)
        assert result.text_digest == text_digest(tokenizer_of(fake).decode(ids))
        assert (result.receipt.tokens_digest, result.receipt.finish_reason) == (tokens_digest(ids), reason)


@contextlib.contextmanager
def at_start(look: Callable[[attempt.Attempt], None]) -> Iterator[None]:
    """Call `look` with the attempt of each verified case, when it starts to decode."""
    real = attempt.Attempt.start

    async def start(run: attempt.Attempt, handle: Any) -> None:
        if run.task.request_id.startswith("verify"):
            look(run)
        await real(run, handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt.Attempt, "start", start)
        yield


async def test_other_slots_are_other_slots_if_there_are_any(model: str) -> None:
    before = []  # The samples that have slots before each case gets one.
    async with cluster(model, slots=4) as fake:
        with at_start(lambda run: before.append(fake.nodes[1].engine.in_slots)):
            results = await verify(fake, [case(i) for i in range(4)], (Condition.OTHER_SLOTS,))
    assert all(result.match for result in results)
    assert len(before) == 4
    assert all(0 < number < 4 for number in before)
    async with cluster(model, slots=1) as fake:
        assert all(result.match for result in await verify(fake, [case(1)]))


async def test_a_run_that_fails_is_a_result(model: str) -> None:
    async with cluster(model) as fake:
        fake.nodes[0].engine.errors = [RuntimeError("secret")] * 3
        results = await verify(fake, [case(1), case(2)], (Condition.ALONE,))
        assert [result.match for result in results] == [False, True]
        assert "failed 3 runs" in results[0].error
        assert results[0].receipt is None


async def test_bad_cases_and_conditions_are_refused_before_anything_runs(model: str) -> None:
    async with cluster(model) as fake:
        bad = VerifyCase(prompt_token_ids=(1, 999), sampling_params=SamplingParams(), seed=0)
        with pytest.raises(InvalidArgumentError) as caught:
            await verify(fake, [case(1), bad])
        assert caught.value.field == "cases[1].prompt.token_ids[1]"
        several = VerifyCase(prompt_token_ids=(1,), sampling_params=SamplingParams(n=2), seed=0)
        with pytest.raises(InvalidArgumentError, match=r"cases\[0\]\.sampling_params\.n"):
            await verify(fake, [several])
        with pytest.raises(InvalidArgumentError, match="cases"):
            await verify(fake, [])
        with pytest.raises(InvalidArgumentError) as caught:
            await verify(fake, [case(1)], (Condition.ALONE, Condition.CROWDED, Condition.ALONE))
        assert (caught.value.field, caught.value.limit) == ("conditions[2]", "must be given once")
        assert fake.nodes[0].engine.prefilled == []


async def test_alternatives_run_and_are_compared(model: str) -> None:
    params = SamplingParams(max_tokens=5, logprobs=True, top_logprobs=3)
    async with cluster(model) as fake:
        asked = VerifyCase(prompt_token_ids=(3, 3), sampling_params=params, seed=3)
        results = await verify(fake, [asked, case(3)])
        ids, logprobs, _ = expected((3, 3), params, 3)
        tops = [expected_alternatives(*drawn, 3) for drawn in zip(ids, logprobs, strict=True)]
        tops = [each._replace(texts=tokenizer_of(fake).texts_alone(each.token_ids)) for each in tops]
        found = {(result.case_index, result.alternatives_digest, result.match) for result in results}
        assert found == {(0, alternatives_digest(tops), True), (1, "", True)}


async def test_text_that_gives_other_tokens_is_a_result(model: str) -> None:
    async with cluster(model) as fake:
        params = SamplingParams(max_tokens=2)
        ids = tokenizer_of(fake).encode("once")
        cases = [VerifyCase(prompt_token_ids=ids, sampling_params=params, seed=1, text=t) for t in ("once", "upon")]
        found = {(result.case_index, result.match, result.error) for result in await verify(fake, cases)}
        assert found == {(0, True, ""), (1, False, "its prompt's text gives other token ids than its own")}
        assert (len(await verify(fake, cases)), 4 * 2) == (8, 8)


async def test_a_case_that_ended_for_another_reason_is_another(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter(("length", "stop"))
    real = sample.receipt_of

    def receipt_of(*args: Any) -> Any:
        receipt = real(*args)
        return dataclasses.replace(receipt, finish_reason=FinishReason(next(reasons)))

    monkeypatch.setattr(sample, "receipt_of", receipt_of)
    async with cluster(model) as fake:
        results = await verify(fake, [case(1)], (Condition.ALONE, Condition.SHUFFLED))
        assert [result.match for result in results] == [True, False]


# The limits of the caller


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    tokens = with_tokens(tmp_path, "small max_requests=2 max_priority=low", "other")
    return {**tokens, "client": Access(token=token_of("other"))}


def of(fake: FakeCluster, name: str) -> AsyncClient:
    return AsyncClient(fake.address, token=token_of(name), timeout_s=WAIT_S)


async def results_of(client: AsyncClient, cases: list[VerifyCase], *conditions: Condition) -> list[VerifyResult]:
    return [result async for result in client.verify(cases, conditions)]


@pytest.mark.parametrize("condition", list(Condition))
async def test_it_runs_at_its_callers_limits(
    model: str, settings: dict[str, Any], condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case counts among them: a crowd and its case were one more than the client may have at once."""
    priorities = set()
    real = SampleQueue.enter

    def enter(queue: SampleQueue, needs: Any, **who: Any) -> Any:
        priorities.add((who["caller"].name, who["priority"]))
        return real(queue, needs, **who)

    monkeypatch.setattr(SampleQueue, "enter", enter)
    async with cluster(model, slots=16, **settings) as fake, of(fake, "small") as small:
        results = await results_of(small, [case(i, max_tokens=30) for i in range(8)], condition)
        assert [result.match for result in results] == [True] * 8
        assert priorities == {("small", Priority.LOW)}
        most = {Condition.ALONE: 1, Condition.CROWDED: 2, Condition.OTHER_SLOTS: 2, Condition.SHUFFLED: 2}
        assert fake.nodes[1].engine.most_running == most[condition]


async def test_each_caller_has_one_at_a_time(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, **settings) as fake, of(fake, "small") as small, of(fake, "other") as other:
        fake.nodes[1].engine.hanging = True
        first = asyncio.ensure_future(results_of(small, [case(1)], Condition.ALONE))
        await fake.until(lambda: fake.nodes[1].leases == 1)
        with pytest.raises(OverloadedError, match="client small: another verification is running"):
            await results_of(small, [case(2)])
        second = asyncio.ensure_future(results_of(other, [case(2)], Condition.ALONE))
        await fake.until(lambda: fake.nodes[1].leases == 2)
        fake.nodes[1].engine.hanging = False
        assert (await first)[0].match
        assert (await second)[0].match
        assert (await results_of(small, [case(2)], Condition.SHUFFLED))[0].match


async def test_its_time_ends(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "LONGEST_S", WAIT_S / 3)
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        fake.nodes[1].engine.step_ms = 20
        matches, began = [], asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match=r"time of the verification is over, with [1-9] of 800 runs done"):  # noqa: PT012
            async for result in client.verify([case(i, max_tokens=1) for i in range(200)]):
                fake.nodes[1].engine.hanging = True  # However quick the machine is, the rest does not end in time.
                if not matches:
                    put_forward(WAIT_S / 3)
                matches.append(result.match)
        assert asyncio.get_running_loop().time() - began < WAIT_S / 2, "the call's own deadline was not what ended it"
        assert 1 <= len(matches) < 10
        assert all(matches)


# Those who come meanwhile


async def crowded(fake: FakeCluster, client: AsyncClient) -> asyncio.Task[list[VerifyResult]]:
    """A verification that has filled every slot."""
    call = asyncio.ensure_future(results_of(client, [case(1, max_tokens=LONG)], Condition.CROWDED))
    await fake.until(lambda: fake.nodes[1].leases == fake.nodes[1].info.slots)
    return call


async def test_a_crowd_is_there_before_its_case_and_leaves_it_a_slot(model: str) -> None:
    others: list[int] = []
    placements: list[Any] = []
    async with cluster(model, slots=4) as fake:
        fake.router.registry.watch(placements.append)
        engine = fake.nodes[1].engine
        engine.step_ms = 10
        with at_start(lambda run: others.append(len(engine._running))):
            await verify(fake, [case(i, max_tokens=5) for i in range(3)], (Condition.CROWDED,))
        assert fake.nodes[0].engine.isolated == [(i, 3) for i in range(3)]  # Not the crowd.
    assert others[0] >= 2  # Of 3: one may just have come to its end.
    assert min(others) >= 1
    assert placements
    assert None not in placements  # No case had to wait, so no filler gave way.


async def test_a_case_whose_predecessor_was_stopped_keeps_its_crowd(model: str) -> None:
    """The router ends a sample at a stop string; its slot is still being given back when the next case comes."""
    others: list[int] = []
    async with cluster(model, slots=8) as fake:
        engine = fake.nodes[1].engine
        engine.step_ms = 4
        params = SamplingParams(max_tokens=LONG, stop=tuple("eaotn12AZx"))
        cases = [VerifyCase(prompt_token_ids=(i, 3), sampling_params=params, seed=i) for i in range(20)]
        with at_start(lambda run: others.append(len(engine._running))):
            results = await verify(fake, cases, (Condition.CROWDED,))
    assert {result.receipt.finish_reason for result in results} == {FinishReason.STOP}
    assert sum(others) > 4 * len(cases)


@pytest.mark.parametrize("gives_way", [True, False])
async def test_a_request_gets_the_slot_of_a_filler(
    model: str, settings: dict[str, Any], gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would wait for it, if fillers did not give way."""
    if not gives_way:
        monkeypatch.setattr(IdleRuns, "give_way", lambda idle, placement: None)
        monkeypatch.setattr(IdleRuns, "review", lambda idle: None)
    async with cluster(model, slots=4, **settings) as fake, of(fake, "other") as client:
        call = await crowded(fake, client)
        fake.nodes[1].engine.hanging = True  # So that no filler can end by itself.
        running = fake.nodes[1].engine._running  # The first four have the slots.
        request = started(fake, (9, 9, 9), PARAMS, seed=4)

        def place() -> int:
            """The request's place at the node, from 0; -1 if it is not there."""
            return next((i for i, (r, _) in enumerate(running.values()) if tuple(r.prompt_token_ids) == (9, 9, 9)), -1)

        if gives_way:
            await fake.until(lambda: 0 <= place() < 4)
        else:
            await fake.until(lambda: place() >= 0)
            await asyncio.sleep(0.2)
            assert place() == 4
        fake.nodes[1].engine.hanging = False
        assert (await request)[0].token_ids == expected((9, 9, 9), PARAMS, 4)[0]
        assert (await call)[0].match


async def test_a_crowd_stays_away_while_somebody_waits(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, slots=2, **settings) as fake, of(fake, "other") as client:
        fake.nodes[1].engine.hanging = True
        long = SamplingParams(max_tokens=LONG)
        requests = [started(fake, (9, i), long, seed=i) for i in range(3)]
        await fake.until(lambda: fake.router.queue.waiting == 1)
        call = asyncio.ensure_future(results_of(client, [case(1)], Condition.CROWDED, Condition.OTHER_SLOTS))
        await fake.until(lambda: fake.router.queue.waiting == 2)
        assert {key[0] for key in fake.nodes[0].engine.prefilled} == {9}
        fake.nodes[1].engine.hanging = False
        await asyncio.gather(*requests)
        assert [result.match for result in await call] == [True, True]


async def test_shuffled_cases_leave_slots_to_others(model: str) -> None:
    async with cluster(model, slots=8) as fake:
        results = await verify(fake, [case(i, max_tokens=40) for i in range(12)], (Condition.SHUFFLED,))
        assert all(result.match for result in results)
        assert fake.nodes[1].engine.most_running == 4


async def test_audits_are_run_beside_a_crowd(model: str) -> None:
    async with cluster(model, slots=8, audit_fraction=1.0) as fake:
        call = asyncio.ensure_future(verify(fake, [case(1, max_tokens=LONG)], (Condition.CROWDED,)))
        await fake.until(lambda: fake.nodes[1].leases == 8)
        await generate(fake, PROMPT, PARAMS, seed=8)
        await fake.until(lambda: fake.router.auditor.status().matched == 1)
        assert not call.done()
        assert (await call)[0].match
        await fake.until(lambda: fake.router.auditor.status().waiting == 0)


async def test_a_full_queue_is_no_difference(model: str) -> None:
    async with cluster(model, slots=1, max_queued_samples=1) as fake:
        fake.nodes[1].engine.hanging = True
        requests = []
        for number in range(2):  # One holds the slot, one fills the queue.
            requests.append(started(fake, (9, number), PARAMS, seed=number))
            await fake.until(lambda number=number: fake.router.queue.waiting == number)  # type: ignore[misc]
        await fake.until(lambda: fake.nodes[1].leases == 1)
        refused = fake.router.queue.refused
        call = asyncio.ensure_future(verify(fake, [case(1)], (Condition.ALONE,)))
        await fake.until(lambda: fake.router.queue.refused > refused)
        fake.nodes[1].engine.hanging = False
        assert (await call)[0].match
        await asyncio.gather(*requests)


async def test_a_verification_that_is_left_leaves_nothing(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, slots=4, **settings) as fake, of(fake, "other") as client:
        call = await crowded(fake, client)
        call.cancel()
        await asyncio.wait((call,))
        await fake.idle()
        assert not fake.router.idle._running


async def test_a_node_that_fails_fillers_is_not_asked_for_ever(model: str) -> None:
    async with cluster(model, slots=4) as fake:
        fake.nodes[0].engine.errors = [RuntimeError("no")] * 2
        results = await verify(fake, [case(i, max_tokens=60) for i in range(2)], (Condition.CROWDED,))
        assert all(result.match for result in results)
        assert fake.nodes[1].engine.most_running == 2
        assert fake.state("d1") is NodeState.READY


async def test_fillers_have_every_kind_of_filter(model: str) -> None:
    async with cluster(model) as fake:
        known = await fake.router.requests.model(asyncio.get_running_loop().time())
        draw = Fillers(known, random.Random(1), 0.0, ANYONE)
        drawn = [draw.draw(64).params for _ in range(40)]
        assert {(p.top_p < 1, p.top_k > 0, p.min_p > 0) for p in drawn} == {
            (False, False, False),
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (False, False, True),
        }
        assert {p.temperature for p in drawn} == {0.0, 0.6, 1.0}
        for name, plain in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
            assert {getattr(p, name) == plain for p in drawn} == {True, False}
