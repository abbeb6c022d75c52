"""The log probabilities of drawn and of scored tokens on a GPU: two Triton kernels, around vLLM's draw if there is one.

Owns: how the definition in corun/node/vllm/logprobs.py is computed there. A row's logits are read
once, in parts of a fixed size, before vLLM's sampler works on them in place; after the draw the parts are combined. No
number of rows reaches a kernel, neither as an argument nor as the alignment of one, so a row's bits cannot depend on
it. Must not know: requests, parameters of sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from corun.node.vllm.logprobs import PART

Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function from [rows, vocab] logits, which it may change, to [rows] tokens and the logits they were drawn from."""


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each row's fp32 log probability of its token, as `draw_and_score` does for a drawn one.

    Args:
        logits: [rows, vocab], each row contiguous.
        tokens: [rows] int64, or [rows, columns] for several tokens of each row, each in the vocabulary.
    """
    return draw_and_score(lambda given: (tokens, given), logits, changes=False)[1]


def draw_and_score(draw: Draw, logits: torch.Tensor, *, changes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row, and compute its log probability under the logits as they were before.

    Args:
        draw: the sampler, which works in place.
        logits: [rows, vocab], each row contiguous.
        changes: whether the draw may change any logit. If so, it gets a copy.

    Returns:
        [rows] int64 tokens, each in the vocabulary, and [rows] fp32 log probabilities. A log probability is NaN if the
        row holds a NaN or an infinite logit, or if its token was drawn from a logit that is not finite: for a row of
        NaN, vLLM's argmax may even give a number beyond the vocabulary.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    # The copy has the strides of the logits, and every tensor its own allocation: Triton compiles by alignment.
    given = logits.new_empty_strided(logits.shape, logits.stride()) if changes else logits
    largest, sums = (logits.new_empty((rows, parts), dtype=torch.float32) for _ in range(2))
    _sum_parts[(rows, parts)](logits, given, int(changes), logits.stride(0), vocab, largest, sums, PART, num_warps=8)
    tokens, drawn_from = draw(given)
    found = torch.empty_like(tokens, dtype=torch.float32)
    strides = logits.stride(0), drawn_from.stride(0)
    width = triton.next_power_of_2(parts)
    _combine[(rows, tokens.numel() // rows)](
        logits, drawn_from, *strides, vocab, tokens, largest, sums, parts, found, width, num_warps=1
    )
    return tokens, found


@triton.jit(do_not_specialize=["copies"])  # type: ignore[untyped-decorator]
def _sum_parts(
    logits: tl.tensor,
    copy: tl.tensor,
    copies: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Find the largest logit of one part of one row, and the sum of exp(logit - largest); copy the part if asked.

    One compiled kernel serves steps with and without copies, so that a neighbour's parameters cannot choose it.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * size + tl.arange(0, size)
    inside = at < vocab
    raw = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    tl.store(copy + row * stride + at, raw, mask=inside & (copies != 0))
    values = raw.to(tl.float32)
    most = tl.max(values)
    shift = tl.where(most == float("-inf"), 0.0, most)  # A part without any token left has the sum 0.
    to = row * tl.num_programs(1) + part
    tl.store(largest + to, most)
    tl.store(sums + to, tl.sum(tl.exp(values - shift)))


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    logits: tl.tensor,
    drawn_from: tl.tensor,
    stride: tl.tensor,
    drawn_stride: tl.tensor,
    vocab: tl.tensor,
    tokens: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    parts: tl.tensor,
    found: tl.tensor,
    width: tl.constexpr,
) -> None:
    """Combine the parts of one row, and give the log probability of one of its tokens. How many tokens a row has is
    no argument, so one compiled kernel serves any number of them."""
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, width)
    inside = part < parts
    each = tl.load(largest + row * parts + part, mask=inside, other=float("-inf"))
    sum_of_each = tl.load(sums + row * parts + part, mask=inside, other=0.0)
    most = tl.max(each)
    total = tl.sum(sum_of_each * tl.exp(each - most))
    token = tl.minimum(tl.load(tokens + at), vocab - 1)
    raw = tl.load(logits + row * stride + token).to(tl.float32)
    drawn = tl.load(drawn_from + row * drawn_stride + token).to(tl.float32)
    is_finite = drawn - drawn == 0.0
    tl.store(tokens + at, token)
    tl.store(found + at, tl.where(is_finite, raw - most - tl.log(total), float("nan")))
