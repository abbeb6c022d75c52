"""Where two outputs of one sample part: the first token, and the bits of its log probability.

This module must not know how samples are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from corun.records.reproduction import logprob_bits


def parting(first: tuple[Sequence[int], Sequence[float]], second: tuple[Sequence[int], Sequence[float]]) -> str:
    """Return in words where two outputs part, each its token ids and log probabilities. Empty: nowhere.

    Log probabilities count where both outputs have them: bits are compared, so -0.0 is not 0.0.
    """
    with_logprobs = bool(first[1]) and bool(second[1])
    pairs = zip_longest(_drawn(*first, with_logprobs), _drawn(*second, with_logprobs), fillvalue="the end")
    return next((f"token {at}: {one} and {other}" for at, (one, other) in enumerate(pairs) if one != other), "")


def _drawn(token_ids: Sequence[int], logprobs: Sequence[float], with_logprobs: bool) -> list[str]:
    if not with_logprobs:
        return list(map(str, token_ids))
    drawn = zip(token_ids, logprobs, strict=True)
    return [f"{token_id} (logprob {logprob_bits(logprob)})" for token_id, logprob in drawn]
