"""What a verification runs, under which conditions, and what it finds: a case, its conditions, a result."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from corun.params import SamplingParams
from corun.receipt import Receipt


class Condition(enum.Enum):
    """The condition under which a case is run again."""

    ALONE = "alone"
    """The cases run one sample at a time."""
    CROWDED = "crowded"
    """Each case runs beside other samples: as many as there are idle slots, and as the client may have."""
    OTHER_SLOTS = "other_slots"
    """Each case runs in another slot, because other samples hold the first slots."""
    SHUFFLED = "shuffled"
    """Many cases run at once, in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCase:
    """One sample to run again."""

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    """The parameters that the sample was drawn with. n must be 1."""
    seed: int
    output_digest: str = ""
    """The expected output digest. Empty: the run under the first condition sets it."""
    text: str = ""
    """The text that the prompt's token ids were made from, to check that they were. Empty: this is not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """The result of one case under one condition."""

    case_index: int
    condition: Condition
    match: bool
    expected_digest: str
    receipt: Receipt | None = None
    """The receipt of the run that was compared. None if the run failed."""
    error: str = ""
    """Why the run itself failed; then `match` is False. Empty if it did not."""
    text_digest: str = ""
    """The digest of the text of the run that was compared; 64 hex digits (`corun.receipt.text_digest`)."""
