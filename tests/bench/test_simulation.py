"""Simulated clusters whose times can be computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from corun.errors import InvalidArgumentError
from corun_bench import simulation, workloads
from corun_bench.driver import Request, Run, Workload
from corun_bench.simulation import STEP_TOKENS, Rates, Simulated, at_best, simulate, work_s
from corun_bench.systems import NodeCounts
from router import placement as router_placement

RATES = Rates(
    prefill_tokens_per_s=1000.0, decode_steps=((1, 0.01), (4, 0.025)), handoff_s_per_token=0.001, slots=4, kv_tokens=0
)
"""A prompt token takes 1 ms, and another to be read; steps of 1 to 4 rows take 10, 15, 20 and 25 ms."""


def workload(*requests: tuple[int, int], at: tuple[float, ...] = ()) -> Workload:
    """Requests of (prompt, output) tokens, all at once or at these times."""
    made = tuple(
        Request(
            index=index,
            prompt_token_ids=(3,) * prompt,
            max_tokens=output,
            seed=index,
            arrival_s=at[index] if at else 0.0,
        )
        for index, (prompt, output) in enumerate(requests)
    )
    return Workload(name="by hand", requests=made, request_rate=1.0 if at else math.inf)


def run(placement: str, work: Workload, rates: Rates = RATES, samples: int = 1) -> Simulated:
    return simulate(NodeCounts.parse(placement), rates, work, samples=samples)


def times(run: Run) -> list[tuple[float, float]]:
    """When each request had its first token and its last, in seconds; whole microseconds, as a hand computes."""
    return [(round(one.arrivals[0][0], 6), round(one.done_s, 6)) for one in run.outcomes]


LONG = STEP_TOKENS["colocated"] + 100
APART = workload((100, 3), (200, 1), at=(0.0, 0.105))
"""The second prompt comes during the first one's first decode step."""


@pytest.mark.parametrize(
    ("placement", "work", "samples", "expected", "handoffs"),
    [
        # 100 ms for the prompt, 100 ms for its KV, then three steps.
        pytest.param("1p1d", workload((100, 3)), 1, [(0.21, 0.23)], 1, id="a pair"),
        pytest.param("1c", workload((100, 3)), 1, [(0.11, 0.13)], 0, id="a colocated node hands nothing over"),
        pytest.param("1c", workload((100, 1), (100, 1)), 1, [(0.215, 0.215)] * 2, 0, id="two prompts in a step"),
        # The second prompt is computed in the second step, with the rest of the first.
        pytest.param("1c", workload((LONG, 1), (200, 1)), 1, [(8.507, 8.507)] * 2, 0, id="a prompt of two steps"),
        pytest.param("1c", workload(*[(10, 2)] * 5), 1, [(0.075, 0.1)] * 4 + [(0.11, 0.12)], 0, id="four slots"),
        # The next step has both, 200 + 10 ms. The second sample decodes in the step after its prompt's, as on a node.
        pytest.param("1c", APART, 1, [(0.11, 0.335), (0.335, 0.335)], 0, id="rows wait for the prompt in their step"),
        pytest.param("1p1d", APART, 1, [(0.21, 0.23), (0.515, 0.515)], 2, id="rows of a pair do not"),
        pytest.param("1p1d", workload((100, 1), (100, 1)), 1, [(0.31, 0.31), (0.41, 0.41)], 2, id="reads in turn"),
        pytest.param("1p1d", workload((100, 2), (100, 2)), 2, [(0.215, 0.23)] * 2, 1, id="a prompt of two samples"),
    ],
)
def test_times_by_hand(
    placement: str, work: Workload, samples: int, expected: list[tuple[float, float]], handoffs: int
) -> None:
    rates = RATES if handoffs else replace(RATES, handoff_s_per_token=None)
    found = run(placement, work, rates, samples)
    assert (times(found.run), found.handoffs) == (expected, handoffs)
    prompts = sum(len(one.prompt_token_ids) for one in work.requests) / samples
    assert sum(engine.prompt_tokens for engine in found.engines) == prompts


def test_tokens_after_the_first_come_at_the_end_and_load_is_a_share_of_the_time() -> None:
    found = run("1p1d", workload((100, 3)))
    (outcome,) = found.run.outcomes
    assert outcome.arrivals == [(pytest.approx(0.21, abs=1e-9), 1), (pytest.approx(0.23, abs=1e-9), 2)]
    assert found.load("prefill") == pytest.approx(0.1 / 0.23)
    assert found.load("colocated") is None


def test_kv_room_limits_a_node() -> None:
    """Two requests of 10 blocks fit into 20 blocks; the others wait for them to end."""
    found = run("1c", workload(*[(150, 10)] * 4), replace(RATES, kv_tokens=320))
    firsts = [first for first, _ in times(found.run)]
    assert firsts[0] == firsts[1] < firsts[2] == firsts[3]
    assert firsts[2] > found.run.outcomes[0].done_s
    with pytest.raises(InvalidArgumentError, match="kv_tokens = 100: must hold the longest request, 160 tokens"):
        run("1c", workload((150, 10)), replace(RATES, kv_tokens=100))


def test_a_closed_loop_sends_the_next_when_one_ends() -> None:
    found = run("1c", replace(workload((100, 1), (100, 1)), max_concurrency=1))
    assert [round(one.sent_s, 6) for one in found.run.outcomes] == [0.0, 0.11]
    assert times(found.run) == [(0.11, 0.11), (0.22, 0.22)]


def test_kv_between_engines_needs_a_rate() -> None:
    with pytest.raises(InvalidArgumentError, match="handoff_us_per_token = None: must be known for 1p1d"):
        run("1p1d", workload((1, 1)), replace(RATES, handoff_s_per_token=None))


def test_step_times() -> None:
    assert [RATES.step_s(rows) for rows in (1, 2, 4, 5)] == pytest.approx([0.01, 0.015, 0.025, 0.03])
    assert replace(RATES, decode_steps=((4, 0.02), (8, 0.03))).step_s(1) == 0.02
    assert replace(RATES, decode_steps=((4, 0.02),)).step_s(8) == 0.04


def test_at_best() -> None:
    """A request is 0.1 s of prefill and 0.3 s of decode."""
    assert at_best(NodeCounts.parse("1c"), 0.1, 0.3) == pytest.approx(2.5)
    assert at_best(NodeCounts.parse("1p1d"), 0.1, 0.3) == pytest.approx(1 / 0.3)
    assert at_best(NodeCounts.parse("1p3d"), 0.1, 0.3) == pytest.approx(10)
    assert at_best(NodeCounts.parse("1d1c"), 0.1, 0.3) == pytest.approx(5)
    assert work_s(RATES, workload((100, 4)).requests) == pytest.approx((0.1, 0.025))
    assert work_s(RATES, workload((100, 4), (100, 4)).requests, 2) == pytest.approx((0.05, 0.025))


H200 = Rates(
    prefill_tokens_per_s=40_000.0, decode_steps=((44, 0.0065), (256, 0.0151)), handoff_s_per_token=3.4e-6, slots=256
)


def made(spec: str, requests: int, **options: float) -> Workload:
    limits = {"vocab_size": workloads.ONE_TOKEN, "max_model_len": 8192, "seed": 3}
    return workloads.make(
        workloads.parse(spec), num_requests=requests, tokenize=workloads.tokenizer(""), **limits, **options
    )


def throughput(placement: str, spec: str, requests: int, rates: Rates = H200) -> float:
    work = replace(made(spec, requests), max_concurrency=requests // 2)
    found = simulate(NodeCounts.parse(placement), rates, work)
    outputs = sum(outcome.num_output_tokens for outcome in found.run.outcomes)
    assert outputs == sum(one.max_tokens for one in work.requests)
    return outputs / found.run.duration_s


@pytest.mark.parametrize("spec", ["in=512,out=32", "in=2048,out=8", "in=128,out=64", "rl=30x8,in=512,out=16"])
@pytest.mark.parametrize(
    "chain", [("1p1d", "2p1d", "2p2d", "4p4d"), ("1c", "2c", "3c", "4c", "8c"), ("1p1d", "1p1d1c", "1p1d2c", "2p2d2c")]
)
def test_more_nodes_never_lower_throughput(spec: str, chain: tuple[str, ...]) -> None:
    found = [throughput(placement, spec, 240, replace(H200, slots=32)) for placement in chain]
    assert all(fewer <= more for fewer, more in itertools.pairwise(found)), found


@pytest.mark.parametrize("spec", ["in=512,out=32", "in=2048,out=8", "in=128,out=64", "rl=30x8,in=512,out=16"])
def test_colocated_nodes_read_no_kv_of_each_other_in_even_work(spec: str) -> None:
    work = replace(made(spec, 240), max_concurrency=120)
    assert run("2c", work, H200).handoffs == 0
    assert run("1p1d1c", work, H200).handoffs > 0, "control"


@pytest.mark.parametrize("beside", [router_placement.BESIDE, 0])
@pytest.mark.parametrize("placement", ["2p2c", "1d3c"])
def test_prompts_hold_up_rows_no_more_than_they_must(
    monkeypatch: pytest.MonkeyPatch, placement: str, beside: int
) -> None:
    """Nodes of one role are used first. Else prompts go to the engines that decode, while prefill nodes are idle."""
    monkeypatch.setattr(router_placement, "BESIDE", beside)
    found = run(placement, made("in=2048,out=256", 1200, request_rate=50.0), H200)
    per_token = sorted((one.done_s - one.arrivals[0][0]) / 255 for one in found.run.outcomes)
    assert (per_token[-12] < 0.025) == bool(beside), "the 99th percentile"


@pytest.mark.parametrize("part", [router_placement.BESIDE_PART, 1])
@pytest.mark.parametrize("placement", ["1p1d1c", "1d3c"])
def test_colocated_nodes_decode_in_a_rollout_too(monkeypatch: pytest.MonkeyPatch, placement: str, part: int) -> None:
    """Prompts hold up nobody there. Without a bound, the decode node would have all rows."""
    monkeypatch.setattr(router_placement, "BESIDE_PART", part)
    found = throughput(placement, "in=128,out=1024", 400)
    assert (found > 16_000) == (part > 1), "more than 17,000 tokens a second, or 15,400"


@pytest.mark.parametrize("counts", [True, False])
def test_samples_that_end_together_leave_even_work_behind(monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    """One of two nodes is slower by 1 %, so its samples end a moment later. If they do not count as good as gone, the
    other one gets all that come meanwhile."""
    begin = simulation.Engine.begin_step

    def slower(engine: simulation.Engine) -> simulation._Step | None:
        step = begin(engine)
        return step and step._replace(duration_s=step.duration_s * (1.01 if engine.name == "c1" else 1.0))

    monkeypatch.setattr(simulation.Engine, "begin_step", slower)
    if not counts:
        monkeypatch.setattr(router_placement, "ENDING", 0)
    found = run("2c", replace(made("in=128,out=1024", 640), max_concurrency=512), H200)
    first, second = (engine.output_tokens for engine in found.engines)
    assert (first == second) == counts
    assert (found.run.duration_s < 25.0) == counts, "24.2 or 26.7 s"


ONE_BY_ONE = replace(H200, step_tokens=512, decode_steps=((1, 0.005), (64, 0.007)))
"""A step has one prompt of 512 tokens. It takes 12.8 ms, and with rows up to half as much again."""
TOO_MANY = made("in=512,out=64", 1000, request_rate=110.0)


def last_first_token_s(found: Simulated) -> float:
    """Return the 99th percentile of times to first tokens, in seconds."""
    return sorted(one.arrivals[0][0] - one.sent_s for one in found.run.outcomes)[-10]


def test_under_a_target_nodes_take_prompts_only_and_first_tokens_come_sooner() -> None:
    two = NodeCounts.parse("2c")
    without = simulate(two, ONE_BY_ONE, TOO_MANY)
    found, again = (simulate(two, ONE_BY_ONE, TOO_MANY, ttft_target_ms=300) for _ in range(2))
    assert without.flexed is None
    assert found.flexed is not None
    assert found.flexed.times > 0
    assert 0 < found.flexed.prompts_only_s < found.run.duration_s, "one of them goes on to decode"
    assert last_first_token_s(found) < 0.7 * last_first_token_s(without)
    assert found.handoffs > 0, "what those nodes compute is decoded on others"
    assert repr(found.run) == repr(again.run)


@pytest.mark.parametrize(
    ("placement", "targets"),
    [
        pytest.param("2c", {}, id="no target"),
        pytest.param("2c", {"ttft_target_ms": 60_000}, id="a target that is kept"),
        pytest.param("1p1d", {"ttft_target_ms": 300, "tpot_target_ms": 1}, id="no colocated node"),
        pytest.param("1c", {"ttft_target_ms": 300}, id="one node goes on to decode"),
    ],
)
def test_nothing_flexes_without_need(placement: str, targets: dict[str, int]) -> None:
    counts = NodeCounts.parse(placement)
    found = simulate(counts, ONE_BY_ONE, TOO_MANY, **targets)
    assert found.flexed is None or (found.flexed.times, found.flexed.prompts_only_s) == (0, 0.0)
    assert repr(found.run) == repr(simulate(counts, ONE_BY_ONE, TOO_MANY).run)


def test_slow_nodes_get_prompts_last() -> None:
    work = made("in=2048,out=256", 1500, request_rate=50.0)
    found = simulate(NodeCounts.parse("2p2c"), H200, work, tpot_target_ms=10)
    fast = simulate(NodeCounts.parse("2p2c"), H200, work, tpot_target_ms=1000)
    assert found.flexed is not None
    assert fast.flexed is not None
    assert found.flexed.prompts_last_s > 0 == fast.flexed.prompts_last_s
    prompts = [sum(engine.prompt_tokens for engine in run.engines[2:]) for run in (found, fast)]
    assert prompts[0] < 0.85 * prompts[1], "the colocated ones compute fewer"


def test_no_placement_is_faster_than_at_best() -> None:
    requests = workload(*[(512, 256)] * 4).requests
    for placement in ("1c", "1p1d", "2p1d", "1p1d1c"):
        best = at_best(NodeCounts.parse(placement), *work_s(H200, requests))
        assert 0.5 * best < throughput(placement, "in=512,out=256", 1200) / 256 <= best


def test_the_same_run_has_the_same_bits() -> None:
    first, again = (run("2p1d1c", made("burstgpt", 200, request_rate=50.0), H200) for _ in range(2))
    assert repr(first.run) == repr(again.run)
    assert first.handoffs == again.handoffs > 0


def test_hundreds_of_nodes() -> None:
    found = run("60p1d80c", replace(workload(*[(512, 8)] * 400), max_concurrency=400), H200)
    assert all(one.done_s > 0 for one in found.run.outcomes)
    assert len({engine.name for engine in found.engines if engine.output_tokens}) == 81
