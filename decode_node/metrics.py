"""A decode node's metrics: what it counts of its steps, and what it shows of its state."""

from __future__ import annotations

from collections.abc import Callable

from corun.observe.metrics import STEPS_S, Metrics
from corun.types import KvReads
from decode_node.slots import SlotTable


class DecodeMetrics(Metrics):
    """A decode node's metrics since its start. Each is counted once per step, with the sum over the step's rows."""

    def __init__(self, table: SlotTable) -> None:
        super().__init__("corun_decode_")
        self.num_steps = 0
        """The number of steps, including those without a row that drew a token. It is told in heartbeats only."""
        self.steps = self.counter("steps", "Steps, by the number of rows that they computed", ("rows",))
        self.rows = self.counter("rows", "Rows that steps computed, padding included")
        self.used_rows = self.counter("used_rows", "Rows of steps that drew a token")
        """On a GPU, a sample's row runs once more after a stop has ended it. A step of such rows alone, which draws
        nothing, is not counted: the engine tells nothing of it."""
        self.tokens = self.counter("tokens", "Tokens drawn for samples that held their lease")
        text = "From one step's tokens to the next one's, while samples run"
        self.step_seconds = self.histogram("step_seconds", text, STEPS_S)
        text = "Leases that ended since their router's step stream broke and did not come back in time"
        self.expired_leases = self.counter("expired_leases", text)
        self.gauge("slots", "Slots").set(table.slots)
        self.gauge("used_slots", "Samples that decode, each in a slot").set_function(lambda: table.used_slots)
        text = "Leases that routers hold: samples in slots, and those in line for one"
        self.gauge("leases", text).set_function(lambda: len(table))
        self.gauge("kv_blocks", "KV blocks that samples can use").set(table.kv_blocks)
        text = "KV blocks that are reserved for the whole of the leased samples"
        self.gauge("reserved_kv_blocks", text).set_function(lambda: table.used_kv_blocks)
        self._last_step_at = 0.0  # When the last step came that drew a token.

    def note_step(self, rows: int, used: int, tokens: int, now: float, *, ran: bool) -> None:
        """Count a step; `now` is on the loop's clock.

        rows, used: the numbers of rows that were computed and that drew a token. tokens: the number of tokens for
        samples that still held their lease. ran: whether a sample has had a slot since the last step.
        """
        self.num_steps += 1
        self.tokens.inc(tokens)
        if used:
            self.steps.labels(rows).inc()
            self.rows.inc(rows)
            self.used_rows.inc(used)
            if ran:
                self.step_seconds.observe(now - self._last_step_at)
            self._last_step_at = now

    def show_kv_reads(self, reads: Callable[[], KvReads]) -> None:
        """Show the engine's KV reads, which it counts itself."""
        text = "KV reads from prefill nodes, of the first rank; some seconds old"
        self.counters_of("kv_reads", text, (), lambda: {(): reads().count})
        text = "Bytes of KV that were read, of the first rank"
        self.counters_of("kv_read_bytes", text, (), lambda: {(): reads().bytes})
        text = "Time of the KV reads, each its own: those of parallel ones overlap"
        self.counters_of("kv_read_seconds", text, (), lambda: {(): reads().seconds})
        text = "Prompt tokens whose KV has come, of the first rank, in whole blocks"
        self.counters_of("prompt_tokens", text, (), lambda: {(): reads().prompt_tokens})
        text = "Prompt tokens that needed no read, since another sample of the prompt had read them"
        self.counters_of("shared_prompt_tokens", text, (), lambda: {(): reads().shared_tokens})
        text = "KV reads that failed, or whose KV was refused"
        self.counters_of("failed_kv_reads", text, (), lambda: {(): reads().failed})
