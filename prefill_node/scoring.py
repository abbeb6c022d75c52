"""How the tokens of a prompt are scored: from hidden states to log probabilities, in pieces of a fixed number of rows.

Owns: the pieces. lm_head and the sums behind it always run on the same number of rows, so that a token's bits do not
depend on how many others are scored with it. Must not know: vLLM, steps, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

SCORER_VERSION = "corun-scores-1"
"""The version is part of the contract: any change that can change a bit of a score gets a new one."""
CPU_ROWS = 16
"""The rows of a piece on a CPU, where a row costs time whether it is used or not."""
GPU_ROWS = 256
"""The rows of a piece on a GPU, where lm_head takes hardly longer for so many than for one."""
LogProbabilities = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from [rows, vocab] logits and [rows] int64 tokens to [rows] fp32 log probabilities."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores rows of hidden states."""

    rows: int
    """The number of rows of a piece."""
    log_probabilities: LogProbabilities

    @property
    def name(self) -> str:
        """What the contract says of it."""
        return f"{SCORER_VERSION}, {self.rows} rows"

    def score(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score the token that follows each hidden state.

        Args:
            compute_logits: lm_head, a function from [rows, hidden size] to [rows, vocab].
            hidden: [tokens, hidden size], at least one token.
            targets: [tokens] int64, each in the vocabulary.

        Returns:
            [tokens] int64, the likeliest tokens, the first of equal ones; and [tokens, 2] fp32 log probabilities, of
            the targets and of the likeliest. A row whose logits are not finite has NaN.
        """
        tops, logprobs = [], []
        for piece, wanted, count in self._pieces(hidden, targets):
            logits = compute_logits(piece)
            top = logits.argmax(dim=-1)
            both = [self.log_probabilities(logits, tokens)[:count] for tokens in (wanted, top.clone())]
            tops.append(top[:count])
            logprobs.append(torch.stack(both, dim=-1))
        return torch.cat(tops), torch.cat(logprobs)

    def _pieces(self, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield hidden states and targets of `rows` rows each, padded with zeros, and how many of the rows are used."""
        for start in range(0, len(targets), self.rows):
            count = min(self.rows, len(targets) - start)
            piece, wanted = hidden.new_zeros((self.rows, hidden.shape[-1])), targets.new_zeros(self.rows)
            piece[:count], wanted[:count] = hidden[start : start + count], targets[start : start + count]
            yield piece, wanted, count
