from __future__ import annotations

import math

from corun.errors import UnavailableError
from corun_bench.driver import Request, Workload, drive
from tests.bench.targets import FakeTarget


def workload(count: int, *, concurrency: int = 4, rate: float = math.inf, gap_s: float = 0.0) -> Workload:
    requests = (
        Request(index=i, prompt_token_ids=(i, i + 1), max_tokens=3, seed=i, arrival_s=i * gap_s) for i in range(count)
    )
    return Workload(name="w", requests=tuple(requests), max_concurrency=concurrency, request_rate=rate)


async def test_a_closed_loop_keeps_as_many_in_flight_as_may_be() -> None:
    target = FakeTarget()
    run = await drive(target, workload(13))
    assert (target.most, target.started, target.forgotten, target.settled) == (4, list(range(13)), 1, 1)
    assert [outcome.request.index for outcome in run.outcomes] == list(range(13))
    assert all(len(outcome.token_ids) == 3 and not outcome.error for outcome in run.outcomes)
    assert run.duration_s == max(outcome.done_s for outcome in run.outcomes)


async def test_an_open_loop_sends_at_its_times_whatever_became_of_the_others() -> None:
    target = FakeTarget(delay_s=0.5)
    run = await drive(target, workload(5, concurrency=5, rate=100.0, gap_s=0.01))
    assert target.most == 5
    for i, outcome in enumerate(run.outcomes):
        assert outcome.sent_s >= i * 0.01


async def test_an_open_loop_may_have_a_limit() -> None:
    """A system that is too slow for the rate would else look as good as one that carries it."""
    target = FakeTarget(delay_s=0.05)
    run = await drive(target, workload(9, concurrency=2, rate=1e6))
    assert target.most == 2
    assert max(outcome.sent_s for outcome in run.outcomes) < target.delay_s, "who waits for others has asked already"


async def test_a_failure_is_the_requests_own() -> None:
    target = FakeTarget(errors={1: UnavailableError("the engine died")})
    run = await drive(target, workload(4))
    assert [outcome.error for outcome in run.outcomes] == ["", "UnavailableError: the engine died", "", ""]


async def test_a_request_that_hangs_ends_with_the_run() -> None:
    run = await drive(FakeTarget(hanging=frozenset({2})), workload(6), timeout_s=2.0)
    assert [bool(outcome.error) for outcome in run.outcomes] == [False, False, True, False, False, False]
    assert run.outcomes[2].error == "not done 2 s after the run began"


async def test_missing_tokens_are_a_failure() -> None:
    run = await drive(FakeTarget(lost_tokens=1), workload(1))
    assert run.outcomes[0].error == "2 of 3 tokens came"
