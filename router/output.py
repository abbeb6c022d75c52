"""What comes out of a sample: tokens checked against an earlier run, text, stop strings, the digest; and the way out.

Owns: everything between a token that arrives and a message that may be sent. All of it is called in the decode stream's
own loop, once per token, and wakes one task per request. This module must not know nodes, queues or gRPC.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from corun.cluster import FinishReason
from corun.errors import CorunError, DataLossError
from corun.params import SamplingParams
from corun.receipt import OutputDigest, Receipt
from router.text import Detokenizer, StopMatcher

_RECORD = struct.Struct("<If")


@dataclass(kw_only=True, slots=True)
class Piece:
    """New output of one sample; pieces that wait to be sent grow together."""

    sample_index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    receipt: Receipt | None = None
    """Set in the sample's last piece."""


class Outbox:
    """Output of one request's samples on its way to the client."""

    def __init__(self) -> None:
        self._pending: dict[int, Piece] = {}  # By sample index, oldest first.
        self._error: CorunError | None = None
        self._ready = asyncio.Event()

    def piece(self, sample_index: int, seed: int) -> Piece:
        """The piece to add new output of a sample to."""
        found = self._pending.get(sample_index)
        if found is None:
            found = self._pending[sample_index] = Piece(sample_index=sample_index, seed=seed)
            self._ready.set()
        return found

    def fail(self, error: CorunError) -> None:
        """Ends the request; the first failure counts."""
        self._error = self._error or error
        self._ready.set()

    async def take(self) -> Sequence[Piece]:
        """Waits for output and takes all there is. Raises what `fail` was given."""
        await self._ready.wait()  # Ends: each sample ends, by its own deadline at the latest.
        if self._error is not None:
            raise self._error
        self._ready.clear()
        pending, self._pending = self._pending, {}
        return tuple(pending.values())


class SampleOutput:
    """The output of one sample over all its runs."""

    def __init__(
        self, *, sample_index: int, seed: int, params: SamplingParams, detokenizer: Detokenizer, outbox: Outbox
    ) -> None:
        self.position = 0
        """Tokens of the current run."""
        self.mismatch: DataLossError | None = None
        """Set when a later run's bits differed from an earlier one's."""
        self._sample_index = sample_index
        self._seed = seed
        self._min_tokens = params.min_tokens
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._detokenizer = detokenizer
        self._stops = StopMatcher(tuple(params.stop))
        self._outbox = outbox
        self._records = bytearray()  # Of every token that was delivered, 8 bytes each.
        self._digest = OutputDigest()

    @property
    def num_tokens(self) -> int:
        """Tokens delivered."""
        return self._digest.num_tokens

    def restart(self) -> None:
        """A new run begins at the first token; what was delivered must come again, bit by bit."""
        self.position = 0

    def take(self, token_id: int, logprob: float) -> bool:
        """Takes the run's next token; True ends the sample."""
        record = _RECORD.pack(token_id, logprob)
        at = self.position * _RECORD.size
        self.position += 1
        if at < len(self._records):
            return self._is_different(at, record)
        self._records += record
        self._digest.update(token_id, logprob)
        piece = self._outbox.piece(self._sample_index, self._seed)
        piece.token_ids.append(token_id)
        piece.logprobs.append(logprob)
        # As in vLLM: a stop token is part of the ids and not of the text, a stop string may end after min_tokens.
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        piece.text += self._stops.push(text, armed=self._is_armed)
        return self._stops.matched

    def end(self, reason: FinishReason) -> FinishReason:
        """The run is over: delivers the text that was held back. The result differs from `reason` if that completes a
        stop string. Raises DataLossError if the run was not a repetition of an earlier one."""
        if self.mismatch is None and self.position < self.num_tokens:
            self.mismatch = DataLossError(f"a repeated run ended after {self.position} of {self.num_tokens} tokens")
        if self.mismatch is not None:
            raise self.mismatch
        if self._stops.matched:
            return FinishReason.STOP
        text = self._stops.push(self._detokenizer.flush(), armed=self._is_armed)
        self._outbox.piece(self._sample_index, self._seed).text += text + self._stops.flush()
        return FinishReason.STOP if self._stops.matched else reason

    def deliver(self, receipt: Receipt) -> None:
        """Ends the sample's output."""
        self._outbox.piece(self._sample_index, self._seed).receipt = receipt

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    @property
    def _is_armed(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _is_different(self, at: int, record: bytes) -> bool:
        if self._records[at : at + _RECORD.size] == record:
            return False
        self.mismatch = DataLossError(f"a repeated run differs at token {at // _RECORD.size}")
        return True
