"""The vLLM worker of a colocated node: a decode node's fixed rows and a prefill node's steps, in one engine.

Owns: that a step with prompts has the shapes of a prefill node's, and one without the shapes of a decode node's. The
scheduler says which of the two a step is (colocated_node/scheduler.py). Must not know: gRPC, leases.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from colocated_node.certify import MixedCertification, Room, ScoreCertification
from colocated_node.shares import BUCKETS, SLOTS
from corun.node.vllm import attention, graphs, pin
from corun.node.vllm.selftest import Stepper, Trace
from corun.types import Freedom
from decode_node.slots import smaller_than
from decode_node.worker import FixedShapeWorker, sampling_style
from prefill_node.worker import FreedomTest, PrefillWorker


class ColocatedWorker(FixedShapeWorker, PrefillWorker):
    """Computes prompts and samples."""

    holds_prompts = False
    """Whether the step that runs holds prompts, as its metadata says; then its length is not that of rows."""

    @property
    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        return settings

    @property
    def slots(self) -> int:
        return int(self._settings[SLOTS])

    @property
    def places(self) -> int:
        return super().places - self.slots

    @property
    def buckets(self) -> list[int]:
        return list(self._settings[BUCKETS])

    @property
    def row_lengths(self) -> Sequence[int]:
        return (*smaller_than(self.slots), self.slots)

    @property
    def may_be_whole(self) -> bool:
        """Whether a captured step with prompts may be whole. What is captured keeps its cuts, so it may not where
        attention cuts rows, and not prompts."""
        return not self.piece and super().may_be_whole

    def rows_of(self, live: int) -> int:
        return live if self.holds_prompts else super().rows_of(live)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step: one of the scheduler, of a self-test, or of vLLM's own warm-up, which says nothing of prompts."""
        meta = scheduler_output.kv_connector_metadata
        self.holds_prompts = meta is not None and meta.rows is not None
        if self.piece:
            if self.holds_prompts and meta.rows:
                raise RuntimeError(f"a step of prompts holds {meta.rows} rows, which it would not cut (decode_split)")
            self._builders(cut=not self.holds_prompts)
        return super().execute_model(scheduler_output)

    def _builders(self, *, cut: bool) -> list[Any]:
        """Return the builders of attention's metadata. From now on they cut rows by their own length, or nothing."""
        builders = attention.builders_of(self.model_runner)
        attention.limit(builders, pin.SPLITS["own-length" if cut else "none"])
        return builders

    def certify(self) -> str:
        """Return the first difference that the self-tests of both sides find; empty if there is none."""
        return PrefillWorker.certify(self) or FixedShapeWorker.certify(self)

    def certify_freedoms(self, wanted: Sequence[str], by_name: bool = True) -> dict[str, Any]:
        """Test the freedoms of one side: `rows` is the decode side's, all others are the prefill side's."""
        if Freedom.ROWS.value in wanted:
            return FixedShapeWorker.certify_freedoms(self, wanted)
        return PrefillWorker.certify_freedoms(self, wanted, by_name)

    def test_mixed(self, test: FreedomTest) -> None:
        name = Freedom.MIXED.value
        if test.refused.get(name, "not wanted"):
            return
        # Only the test of `packed` has a control, which shows that a difference would be noticed.
        test.refuse(
            {Freedom.MIXED: test.refused.get(Freedom.PACKED.value, "it needs packed steps, which are not wanted")}
        )
        if not test.refused[name]:
            began = time.monotonic()
            cuts, draws = (not test.refused.get(one.value, "not wanted") for one in (Freedom.CHUNKS, Freedom.SCORES))
            room = self.budget - self.slots
            chunk = room if cuts else self.chunk_size
            beside = Room(tokens=room, sequences=self.places, chunk=chunk, cuts=cuts, samples=draws)
            mixed = MixedCertification(Stepper(self), self.slots, sampling_style, beside)
            test.refused[name] = mixed.difference(self.slots)
            test.add("mixed steps", mixed.steps, mixed.comparisons, time.monotonic() - began)

    def test_scores(self, test: FreedomTest) -> None:
        name = Freedom.SCORES.value
        if test.refused.get(name, "not wanted"):
            return
        # A score cuts what was drawn into other chunks than those that the prompt had.
        test.refuse({Freedom.SCORES: test.refused.get(Freedom.CHUNKS.value, "it needs free chunks, not wanted here")})
        if not test.refused[name]:
            began = time.monotonic()
            # A greedy token is the same at any place of its output; other styles draw by the place.
            scores = ScoreCertification(Stepper(self), sampling_style(3), self.chunk_size, self.score_of)
            test.refused[name] = scores.difference()
            test.add("scores", scores.steps, scores.comparisons, time.monotonic() - began)

    def score_of(self, trace: Trace) -> bytes:
        """Return the score of the token that was drawn at the end of a prompt, as the bytes of an fp32 number."""
        hidden = trace.hidden.unsqueeze(0)
        _, logprobs = self.scorer().score(self.model_runner.model.compute_logits, hidden, trace.token)
        return bytes(logprobs[0, 0].cpu().numpy().tobytes())

    def observe(self) -> dict[str, Any]:
        """Return what a decode node's worker would: the contract has the graphs of its steps."""
        seen = super().observe()
        if "graph" in seen:
            seen["graph"] = f"FULL_DECODE_ONLY {graphs.of_rows(self.model_runner.cudagraph_manager)}"
        if self.piece and not self.unfit_attention:
            seen[pin.PROMPT_SPLITS] = attention.policy(self._builders(cut=False))
            self._builders(cut=True)
        return seen
