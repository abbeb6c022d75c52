"""Where two outputs of one sample part: the first token, and the bits of its log probability.

This module must not know how samples are run, or how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from corun.records.reproduction import Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first token at which two outputs differ."""

    position: int
    """The token's index, from 0."""
    first: Drawn | None
    """The first output's token there. None: it had ended before."""
    second: Drawn | None

    def __str__(self) -> str:
        return f"token {self.position}: {_shown(self.first)} and {_shown(self.second)}"


def parting(
    first: tuple[Sequence[int], Sequence[float]], second: tuple[Sequence[int], Sequence[float]]
) -> Parting | None:
    """Return where two outputs part, each its token ids and log probabilities. None: nowhere.

    Log probabilities count where both outputs have them: bits are compared, so -0.0 is not 0.0.
    """
    with_logprobs = bool(first[1]) and bool(second[1])
    pairs = zip_longest(_drawn(*first, with_logprobs), _drawn(*second, with_logprobs))
    for position, (one, other) in enumerate(pairs):
        if one != other:
            return Parting(position=position, first=one, second=other)
    return None


def _drawn(token_ids: Sequence[int], logprobs: Sequence[float], with_logprobs: bool) -> list[Drawn]:
    if with_logprobs:
        return [Drawn.of(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True)]
    return [Drawn(token_id=token_id, logprob_bits="") for token_id in token_ids]


def _shown(token: Drawn | None) -> str:
    if token is None:
        return "the end"
    return f"{token.token_id} (logprob {token.logprob_bits})" if token.logprob_bits else str(token.token_id)
