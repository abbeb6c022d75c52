"""A prefill node's metrics: what it counts of its prompts, and what it shows of its state."""

from __future__ import annotations

from typing import Any

from corun.observe.metrics import Metrics

RATE_KEPT = 0.8
"""The weight of all earlier prompts in the rate, at each new one."""


class PrefillMetrics(Metrics):
    """A prefill node's metrics since its start.

    Prompts are computed one at a time, in the order of their arrival. The computation of a prompt begins when the
    previous prompt is done, or when the prompt arrives if that is later. Its time includes the wait for KV room.
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
        text = "Prompts in the node, the one that is being computed included"
        self.queued_prompts = self.gauge("queued_prompts", text)
        self.queued_prompt_tokens = self.gauge("queued_prompt_tokens", "Tokens of the prompts in the node")
        text = "How long the prompts in the node will take, at the rate of the last ones"
        self.expected_wait_seconds = self.gauge("expected_wait_seconds", text)
        self.queue_seconds = self.histogram("queue_seconds", "Wait of a prompt until it was computed")
        text = "Computation of a prompt, with its wait for KV room"
        self.compute_seconds = self.histogram("compute_seconds", text)
        self._done_at = 0.0
        self._tokens = self._seconds = 0.0  # Of the last prompts; older ones count less and less.

    def note_prompt(self, num_tokens: int, num_cached: int, arrived: float, now: float) -> tuple[float, float]:
        """Count a finished prompt of `num_tokens`, of which `num_cached` were in the prefix cache; times are on the
        loop's clock. Return its waiting and computing time in seconds."""
        num_tokens -= num_cached
        began = max(arrived, self._done_at)
        self._done_at = now
        self.prompts.inc()
        self.prompt_tokens.inc(num_tokens)
        self.cached_tokens.inc(num_cached)
        self.queue_seconds.observe(began - arrived)
        self.compute_seconds.observe(now - began)
        self._tokens = RATE_KEPT * self._tokens + num_tokens
        self._seconds = RATE_KEPT * self._seconds + now - began
        return began - arrived, now - began

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
