"""What a prefill node makes of the times of its prompts."""

from __future__ import annotations

import pytest

from prefill_node.metrics import PrefillMetrics


def sums(metrics: PrefillMetrics) -> list[float]:
    """All waits and all computations, in seconds."""
    histograms = (metrics.queue_seconds, metrics.compute_seconds)
    return [next(s.value for m in h.collect() for s in m.samples if s.name.endswith("_sum")) for h in histograms]


def test_prompts_of_one_step_have_its_time_and_the_node_has_it_once() -> None:
    """A step of 0.2 s begins at 10.0 with three prompts of 100 tokens, the next one at 10.2 with one that had waited.
    The prompts of a step are counted one just after the other."""
    metrics = PrefillMetrics()
    for number in range(3):
        metrics.note_prompt(100, 0, arrived=9.9, began=10.0, done=10.2 + number * 1e-6)
    assert sums(metrics) == pytest.approx([0.3, 0.6], abs=1e-4)
    assert metrics.seconds_for(300) == pytest.approx(0.2, rel=1e-2)
    # It was scheduled while the step before it ran.
    metrics.note_prompt(100, 0, arrived=10.0, began=10.1, done=10.4)
    assert sums(metrics) == pytest.approx([0.4, 0.9], abs=1e-4)
    assert metrics.seconds_for(400) == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("together", [1, 64])
def test_the_rate_is_that_of_the_last_second_however_many_prompts_a_step_has(together: int) -> None:
    metrics = PrefillMetrics()
    assert metrics.seconds_for(1000) == 0.0
    for step in range(100):
        seconds = 0.1 if step < 50 else 0.2  # The node becomes half as fast.
        for number in range(together):
            done = 100.0 * step + seconds + number * 1e-6
            metrics.note_prompt(4096 // together, 0, arrived=100.0 * step, began=100.0 * step, done=done)
    assert metrics.seconds_for(4096) == pytest.approx(0.2, rel=0.01)


def test_time_in_which_there_was_no_prompt_does_not_count() -> None:
    metrics = PrefillMetrics()
    metrics.note_prompt(100, 0, arrived=1.0, began=1.0, done=1.1)
    metrics.note_prompt(100, 0, arrived=50.0, began=50.0, done=50.1)
    assert metrics.seconds_for(100) == pytest.approx(0.1)
