"""A prefill node's metrics: what it counts of its prompts, and what it shows of its state."""

from __future__ import annotations

from typing import Any

from corun.observe.metrics import Metrics

RATE_HALF_S = 1.0
"""The seconds of computing after which what was computed before counts half in the rate."""


class PrefillMetrics(Metrics):
    """A prefill node's metrics since its start.

    Prompts are computed in the order of their arrival, one at a time or several in a step. The computation of a prompt
    lasts from its first step, as it is scheduled, to the end of its last one, whoever else is in these steps. The
    node's own time of computing counts once, whatever the number of prompts: from the end of the prompt before, or from
    the first step if that is later, to the end of a prompt.
    """

    def __init__(self) -> None:
        super().__init__("corun_prefill_")
        self.prompts = self.counter("prompts", "Prompts computed")
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of prompts whose KV was computed")
        self.cached_tokens = self.counter("cached_tokens", "Tokens of prompts whose KV was in the prefix cache")
        text = "Prompts that got the KV of an equal one of the same client"
        self.shared_prompts = self.counter("shared_prompts", text)
        text = "Prompts that left without KV: cancelled, given up, or refused by the engine"
        self.failed_prompts = self.counter("failed_prompts", text)
        text = "Prompts computed again alone while the node was idle, by the result of the comparison"
        self.rechecked_prompts = self.counter("rechecked_prompts", text, ("result",))
        for result in ("equal", "different"):  # Shown from the start: an alert needs the zero before the first one.
            self.rechecked_prompts.labels(result)
        text = "Prompts in the node, those that are being computed included"
        self.queued_prompts = self.gauge("queued_prompts", text)
        self.queued_prompt_tokens = self.gauge("queued_prompt_tokens", "Tokens of the prompts in the node")
        text = "How long the prompts in the node will take, at the rate of the last ones"
        self.expected_wait_seconds = self.gauge("expected_wait_seconds", text)
        text = "Wait of a prompt until its first step, for other prompts or for KV room"
        self.queue_seconds = self.histogram("queue_seconds", text)
        text = "Time from a prompt's first step to the end of its last one"
        self.compute_seconds = self.histogram("compute_seconds", text)
        self._done_at = 0.0
        self._tokens = self._seconds = 0.0  # Of the last prompts, and of computing them; older ones count less.

    def note_prompt(self, num_tokens: int, num_cached: int, arrived: float, began: float, done: float) -> None:
        """Count a finished prompt of `num_tokens`, of which `num_cached` were in the prefix cache. Its times are on the
        loop's clock; `began` is that of its first step."""
        num_tokens -= num_cached
        self.prompts.inc()
        self.prompt_tokens.inc(num_tokens)
        self.cached_tokens.inc(num_cached)
        self.queue_seconds.observe(began - arrived)
        self.compute_seconds.observe(done - began)
        # The first prompt of a step has the step's time here, and the others, which are done just after it, have none.
        seconds = done - max(began, self._done_at)
        self._done_at = done
        kept = 0.5 ** (seconds / RATE_HALF_S)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds

    def seconds_for(self, num_tokens: int) -> float:
        """Return how many seconds so many tokens take at the rate of the last prompts; 0 while nothing is known."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0

    def show_engine(self, engine: Any, kv_blocks: int) -> None:
        """Show the engine's `known_kv_blocks` and `expired_claims`. kv_blocks: the blocks that prompts can use."""
        self.gauge("kv_blocks", "KV blocks that prompts can use").set(kv_blocks)
        text = "KV blocks that wait for their reader"
        self.gauge("held_kv_blocks", text).set_function(lambda: engine.known_kv_blocks)
        text = "Prompts whose KV was neither read nor released before its lease ended"
        self.counters_of("expired_claims", text, (), lambda: {(): engine.expired_claims})
