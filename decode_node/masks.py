"""The masks of a step: which tokens each constrained row may draw, by vLLM's own way from its scheduler to its sampler.

Owns: how matchers stand in for vLLM's backends in the engine's core, and how masks reach the logits of a CPU's step.
vLLM asks for the masks when it knows all earlier tokens, also with asynchronous scheduling: then the step waits for
them, as long as one of its rows is constrained. Must not know: what a constraint means (decode_node/grammar.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

from corun.node.vllm.start import eos_token_ids
from decode_node.grammar import Matcher, tokenizer

MADE = 4
"""The number of constraints whose matchers are kept. Each may take some tens of MiB."""


class RowGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """One row's matcher under vLLM's names. What vLLM needs for speculative decoding only is refused."""

    def __init__(self, matcher: Matcher, findings: dict[str, str], fill_s: float) -> None:
        self._matcher = matcher
        self._findings = findings
        self.fill_s = fill_s
        """The processor time that the last mask took, in seconds. The next one mostly takes as long."""
        self.filled_at = time.monotonic()
        """When the last mask was made, or this row began, in seconds on the monotonic clock."""

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        began = time.thread_time()
        self._matcher.fill(bitmask.numpy(), batch_index)
        self.fill_s, self.filled_at = time.thread_time() - began, time.monotonic()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on behind drawn tokens. If this is refused, vLLM ends the request with an error."""
        is_taken = all(self._matcher.accept(token_id) for token_id in tokens)
        if not is_taken and self._matcher.finding:
            self._findings[request_id] = self._matcher.finding
        return is_taken

    def is_terminated(self) -> bool:
        """Return False: a row whose sample has ended is in no later step that vLLM asks masks for."""
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


class MaskBackend(StructuredOutputBackend):  # type: ignore[misc]
    """Makes the matchers of an engine's rows, and keeps why rows ended for want of a token."""

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self.vocab_size = model.get_vocab_size()
        self.findings: dict[str, str] = {}
        """Why requests ended that no token could follow, by their ids, until the scheduler has told it."""
        path = Path(model.model) / "tokenizer.json"
        # At the start, since it would hold up all rows later. Without it no constraint comes here (`Trials`).
        self.tokenizer: Any = None
        if path.is_file():
            with suppress(ValueError):
                self.tokenizer = tokenizer(path, self.vocab_size, eos_token_ids(model))
        self._made: OrderedDict[tuple[str, str], tuple[Matcher, float]] = OrderedDict()
        """The matchers of the last constraints, before any token, and the time of their masks."""

    def compile_grammar(self, request_type: StructuredOutputOptions, grammar_spec: str) -> RowGrammar:
        """Return a new row's matcher. A constraint is read once for its samples, since the engine takes in no other
        request meanwhile."""
        name = (request_type.name.lower(), grammar_spec)
        if name not in self._made:
            matcher = Matcher(self.tokenizer, *name)
            masks = self.allocate_token_bitmask(1).numpy()
            began = time.thread_time()
            matcher.copy().fill(masks, 0)
            self._made[name] = matcher, time.thread_time() - began
            if len(self._made) > MADE:
                self._made.popitem(last=False)
        self._made.move_to_end(name)
        matcher, fill_s = self._made[name]
        return RowGrammar(matcher.copy(), self.findings, fill_s)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing: matchers end with their requests."""


def mask_rows(logits: torch.Tensor, request_ids: Sequence[str], grammar_output: Any) -> None:
    """Set the logits of tokens that must not be drawn to -inf, in place.

    Args:
        logits: [rows, vocab]; row i is that of `request_ids[i]`.
        grammar_output: vLLM's `GrammarOutput`: [constrained rows, words of 32 bits], a bit for each allowed token.
    """
    row_of = {name: row for row, name in enumerate(request_ids)}
    for name, mask in zip(grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), count=logits.shape[1], bitorder="little").astype(bool)
        logits[row_of[name]].masked_fill_(~torch.from_numpy(allowed), -torch.inf)
