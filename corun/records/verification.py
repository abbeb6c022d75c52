"""What is verified, under which company, and what came out: a case, its conditions, a result."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from corun.params import SamplingParams
from corun.receipt import Receipt


class Condition(enum.Enum):
    """Under what conditions a case is run again."""

    ALONE = "alone"
    """One sample at a time."""
    CROWDED = "crowded"
    """Beside as many other samples as there are idle slots, and as the client may have."""
    OTHER_SLOTS = "other_slots"
    """Behind samples that hold the first slots."""
    SHUFFLED = "shuffled"
    """Many cases at once, in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCase:
    """One sample to run again."""

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    """n must be 1."""
    seed: int
    output_digest: str = ""
    """Expected. Empty: the first condition's run sets it."""
    text: str = ""
    """That the prompt's token ids were made of, to check that they were. Empty: not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """What one case gave under one condition."""

    case_index: int
    condition: Condition
    match: bool
    expected_digest: str
    receipt: Receipt | None = None
    """Of the run that was compared; None when the run failed."""
    error: str = ""
    """Set when the run itself failed; then match is False."""
    text_digest: str = ""
    """Over the text of the run that was compared; 64 hex digits (`corun.receipt.text_digest`)."""
