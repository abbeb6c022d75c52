"""A prefill worker whose test of freedoms is forced to find something. For `tests.gpu.certificate` only."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from corun.node.vllm.selftest import Stepper
from prefill_node.worker import PrefillWorker


class ForcedPrefillWorker(PrefillWorker):
    def certify_forced(self, what: str) -> dict[str, Any]:
        """What `certify_freedoms` returns while `what` of `tests.gpu.certificate` is forced."""
        with self._forced(what):
            return self.certify_freedoms(["packed", "chunks"], by_name=what != "not by name")

    def _forced(self, what: str) -> Any:
        if what == "dead":
            return mock.patch.object(Stepper, "other_splits", return_value=nullcontext())
        step = Stepper.step

        def leaking(stepper: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
            cut = any(sequence.computed % self.chunk_size for sequence, _ in tokens)
            leaks = len(tokens) > 1 if what == "neighbours leak" else cut and len(tokens) == 1
            found = step(stepper, tokens, *args, **kwargs)
            return {name: replace(trace, token=-trace.token - 1) if leaks else trace for name, trace in found.items()}

        return mock.patch.object(Stepper, "step", leaking) if what.endswith("leak") else nullcontext()
