"""The bit-by-bit comparison of an audit's output with the output that the client got.

Only token ids and the bits of log probabilities are compared, because text is a function of the tokens. If a stop
string ended the sample, the node did not know that, so the audit ends at the same token, whatever the node would do
next. This module must not know nodes.
"""

from __future__ import annotations

from corun.receipt import OutputDigest
from corun.records.reproduction import Drawn
from corun.types import FinishReason
from router.output import RECORD
from router.sample import Finished


class Comparison:
    """Takes the tokens of one audit (`router.attempt.Output`). It goes on after a difference, for the digest."""

    def __init__(self, finished: Finished) -> None:
        self.position = 0
        """The number of tokens that the audit has given so far."""
        self.differs_at: int | None = None
        """The index of the first token, from 0, that differs. If all tokens of the shorter run are equal, it is the
        index after them, where only one run ended or both ended for different reasons. None while nothing differs."""
        self._finished = finished
        self._found = b""  # The record of the audit's token at the difference; empty if the audit had ended.
        self._digest = OutputDigest()

    @property
    def num_tokens(self) -> int:
        return self.position

    def take(self, token_id: int, logprob: float) -> bool:
        """Take the audit's next token. Return True if a stop string ended the first run at this token."""
        record = RECORD.pack(token_id, logprob)
        if self._expected(self.position) != record:
            self._differ(self.position, record)
        self.position += 1
        self._digest.update(token_id, logprob)
        return self._finished.node_reason is None and self.position * RECORD.size >= len(self._finished.records)

    def end(self, reason: FinishReason) -> FinishReason:
        """End the audit, and compare its end with that of the first run. Return `reason`."""
        if self._expected(self.position) or self._finished.node_reason not in (None, reason):
            self._differ(self.position, b"")
        return reason

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def tokens_hexdigest(self) -> str:
        return self._digest.tokens_hexdigest()

    def tokens(self) -> tuple[Drawn | None, Drawn | None]:
        """Return the client's token and the audit's token at the difference. A token is None if its run had ended."""
        assert self.differs_at is not None
        return _drawn(self._expected(self.differs_at)), _drawn(self._found)

    def _expected(self, position: int) -> bytes | bytearray:
        """Return the record of the first run's token at `position`; empty after the last token."""
        return self._finished.records[position * RECORD.size : (position + 1) * RECORD.size]

    def _differ(self, position: int, record: bytes) -> None:
        if self.differs_at is None:
            self.differs_at, self._found = position, record


def _drawn(record: bytes | bytearray) -> Drawn | None:
    return Drawn.of(*RECORD.unpack(record)) if record else None
