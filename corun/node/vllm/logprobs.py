"""The definition of a token's log probability, for tokens that are drawn and for tokens that are scored.

A GPU computes it in kernels of its own (corun/node/vllm/logprob_kernels.py). Must not know: vLLM, requests, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

LogProbabilities = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from [rows, vocab] logits and int64 tokens, [rows] or [rows, columns], to fp32 log probabilities."""
PIECE_ROWS = 16
"""The rows whose likeliest tokens are searched at a time, which takes about 30 bytes for each of their logits."""
PART = 4096
"""The number of logits that are summed up at a time (`log_probabilities`). It must be a power of two."""


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each row's log probability of its token.

    The sum of exponentials is taken over parts of `PART` logits, and then over the parts, each time relative to the
    largest logit, in fp32. Where a part ends depends on nothing but the vocabulary.

    Args:
        logits: [rows, vocab], before penalties, biases and temperature.
        tokens: [rows] int64, or [rows, columns] for several tokens of each row.

    Returns:
        fp32 in the shape of `tokens`; NaN for a row that holds a NaN, whose largest logit is infinite, or in which no
        token is left. What a row gives a token does not depend on the columns beside it.
    """
    padded = torch.nn.functional.pad(logits.float(), (0, -logits.shape[-1] % PART), value=float("-inf"))
    parts = padded.unflatten(-1, (-1, PART))
    largest = parts.amax(dim=-1)
    shift = largest.masked_fill(largest == float("-inf"), 0)  # A part in which no token is left has the sum 0.
    sums = (parts - shift.unsqueeze(-1)).exp().sum(dim=-1)
    most = largest.amax(dim=-1, keepdim=True)
    total = (sums * (largest - most).exp()).sum(dim=-1)
    picked = logits.gather(-1, tokens.view(len(logits), -1)).float()
    return (picked - most - total.log().unsqueeze(-1)).view(tokens.shape)


def alternatives(
    logits: torch.Tensor, counts: Sequence[int], log_probabilities: LogProbabilities
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of the rows that ask for some, and their log probabilities.

    They follow from the row's own logits alone. The log probabilities come from the function that gives those of drawn
    tokens, over the same rows, so a token has the same bits in both places.

    Args:
        logits: [rows, vocab], before penalties, biases, masks and temperature.
        counts: how many tokens each row asks for; there may be fewer counts than rows. At least one is not 0.

    Returns:
        [rows, most] int64, where most is the largest count: the likeliest first, the lower id first of equal ones; -1
        behind a row's own count, and where no token with a finite logit is left. And [rows, most] fp32.
    """
    most = min(max(counts), logits.shape[-1])
    asking = [row for row, count in enumerate(counts) if count]
    tokens = torch.zeros((len(logits), most), dtype=torch.int64, device=logits.device)
    for start in range(0, len(asking), PIECE_ROWS):
        piece = _sent(asking[start : start + PIECE_ROWS], logits)
        tokens[piece] = top_tokens(logits[piece], most)
    values = log_probabilities(logits, tokens)
    own = _sent([*counts, *[0] * (len(logits) - len(counts))], logits).unsqueeze(-1)
    is_there = (torch.arange(most, device=logits.device) < own) & values.isfinite()
    return tokens.masked_fill(~is_there, -1), values


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [rows, count] int64, the likeliest tokens of [rows, vocab] logits, the lower id first of equal ones.

    Logit and token make one integer, and no two of these are equal. So any algorithm gives the same order, for any
    number of rows. torch's `topk` does not say which of equal values it takes.
    """
    values = logits.float()
    bits = values.masked_fill(values == 0, 0).view(torch.int32)  # 0 and -0 are equal, but differ in bits.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # As integers in the order of the numbers.
    last = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    keys = ordered.long() * 2**32 + last
    return keys.topk(count, dim=-1).indices


def _sent(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return integers on a tensor's device. Nobody waits until they are there."""
    return torch.tensor(values).to(like.device, non_blocking=True)
