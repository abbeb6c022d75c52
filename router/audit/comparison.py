"""The output of an audit, compared bit by bit with what the client got.

Token ids and log probability bits only: text is a function of them. Where a stop string ended the sample, the node did
not know it, so the audit ends at the same token whatever the node would do next. This module must not know nodes.
"""

from __future__ import annotations

from corun.receipt import OutputDigest
from corun.records.reproduction import Drawn
from corun.types import FinishReason
from router.failover import Finished
from router.output import RECORD


class Comparison:
    """Takes the tokens of one audit (`router.failover.Output`). After a difference it goes on, for the digest."""

    def __init__(self, finished: Finished) -> None:
        self.position = 0
        """Tokens of the audit."""
        self.differs_at: int | None = None
        """The first token, from 0, that differs; one past the last if only one of both ended, or how."""
        self._finished = finished
        self._found = b""  # The audit's token at the difference.
        self._digest = OutputDigest()

    @property
    def num_tokens(self) -> int:
        return self.position

    def take(self, token_id: int, logprob: float) -> bool:
        """Takes the audit's next token; True where a stop string ended the sample."""
        record = RECORD.pack(token_id, logprob)
        if self._expected(self.position) != record:
            self._differ(self.position, record)
        self.position += 1
        self._digest.update(token_id, logprob)
        return self._finished.node_reason is None and self.position * RECORD.size >= len(self._finished.records)

    def end(self, reason: FinishReason) -> FinishReason:
        """The audit is over, and ended like that."""
        if self._expected(self.position) or self._finished.node_reason not in (None, reason):
            self._differ(self.position, b"")
        return reason

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def tokens_hexdigest(self) -> str:
        return self._digest.tokens_hexdigest()

    def tokens(self) -> tuple[Drawn | None, Drawn | None]:
        """What the client got and what the audit gave where they differ; None where a run had ended."""
        assert self.differs_at is not None
        return _drawn(self._expected(self.differs_at)), _drawn(self._found)

    def _expected(self, position: int) -> bytes | bytearray:
        """Empty after the last token."""
        return self._finished.records[position * RECORD.size : (position + 1) * RECORD.size]

    def _differ(self, position: int, record: bytes) -> None:
        if self.differs_at is None:
            self.differs_at, self._found = position, record


def _drawn(record: bytes | bytearray) -> Drawn | None:
    return Drawn.of(*RECORD.unpack(record)) if record else None
