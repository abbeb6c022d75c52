"""The definition of a token's log probability, for tokens that are drawn and for tokens that are scored.

A GPU computes it in kernels of its own (corun/node/vllm/logprob_kernels.py). Must not know: vLLM, requests, sampling.
"""

from __future__ import annotations

import torch

PART = 4096
"""The number of logits that are summed up at a time (`log_probabilities`). It must be a power of two."""


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each row's log probability of its token.

    The sum of exponentials is taken over parts of `PART` logits, and then over the parts, each time relative to the
    largest logit, in fp32. Where a part ends depends on nothing but the vocabulary.

    Args:
        logits: [rows, vocab], before penalties, biases and temperature.
        tokens: [rows] int64.

    Returns:
        [rows] fp32; NaN for a row that holds a NaN, whose largest logit is infinite, or in which no token is left.
    """
    padded = torch.nn.functional.pad(logits.float(), (0, -logits.shape[-1] % PART), value=float("-inf"))
    parts = padded.unflatten(-1, (-1, PART))
    largest = parts.amax(dim=-1)
    shift = largest.masked_fill(largest == float("-inf"), 0)  # A part in which no token is left has the sum 0.
    sums = (parts - shift.unsqueeze(-1)).exp().sum(dim=-1)
    most = largest.amax(dim=-1, keepdim=True)
    total = (sums * (largest - most).exp()).sum(dim=-1)
    picked = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return picked - most.squeeze(-1) - total.log()
