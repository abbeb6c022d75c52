"""Shape-aligned, request-bound sampling on a fixed number of rows (paper, Section IV-C).

Owns: R(seed, position), and how a token is drawn from logits and R. Every reduction runs over the same [rows, vocab]
shape, for any number of live requests, and a row reads nothing of another row. Must not know: vLLM, requests, slots.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The versions are part of the contract: any change that can change a token or a log probability gets a new version.
SAMPLER_VERSION = "corun-inverse-cdf-2"
"""The sampler of this module, which CPU nodes use."""
GPU_SAMPLER_VERSION = "vllm-v2-gumbel-2"
"""vLLM's draw with the log probabilities of corun/node/vllm/logprob_kernels.py, which GPU nodes use."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row draws its token. `temperature` 0 is greedy; `top_k` 0 keeps all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


IDLE = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


def variate(seed: int, position: int) -> float:
    """Return R(s, t): a uniform variate in [0, 1) with 53 bits, a pure function of seed and output position.

    It is made of 53 bits of BLAKE2b over the two numbers, so that it can be recomputed in any language.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"corun-R").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, for any contents of the row and of its draw.

    Args:
        logits: [rows, vocab] fp32, after penalties and biases.
        draws: one per row; idle rows hold `IDLE`.

    Returns:
        [rows] int64 token ids, each in the vocabulary, and [rows] bool: whether the token is valid. No valid token can
        be drawn from a row that holds a NaN, whose largest logit is infinite, or in which no token is left.
    """
    greedy = logits.argmax(dim=-1)
    largest = logits.gather(-1, greedy.unsqueeze(-1)).squeeze(-1)  # This is NaN if the row holds a NaN.
    if all(draw.temperature == 0 for draw in draws):
        return greedy, largest.isfinite()
    temperature = _column([draw.temperature or 1.0 for draw in draws], logits)
    scaled = logits / temperature
    if any(draw.filters for draw in draws):
        scaled = _filtered(scaled, draws)
    uniform = torch.tensor([variate(draw.seed, draw.position) for draw in draws], dtype=torch.float64)
    probs = scaled.softmax(dim=-1)
    drawn = _inverse_cdf(probs, uniform.to(logits.device))
    chance = probs.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    is_greedy = torch.tensor([draw.temperature == 0 for draw in draws], device=logits.device)
    return torch.where(is_greedy, greedy, drawn), largest.isfinite() & (is_greedy | (chance > 0))


def _filtered(scaled: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Apply min_p, then top_k, then top_p, in vLLM's order; a row without filters stays unchanged."""
    vocab = scaled.shape[-1]
    probs = scaled.softmax(dim=-1)
    min_p = _column([draw.min_p for draw in draws], probs)
    scaled = scaled.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), float("-inf"))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([[draw.top_k or vocab] for draw in draws], device=scaled.device)
    rank = torch.arange(vocab, device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    mass = ordered.softmax(dim=-1).double()
    before = mass.cumsum(dim=-1) - mass  # The mass of the likelier tokens: 0 for the likeliest, which always stays.
    top_p = _column([draw.top_p for draw in draws], mass)
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulated probability exceeds uniform * total; its probability is never 0.

    For a row of NaN, where no comparison holds, return the last token.
    """
    cdf = probs.double().cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
