"""What comes out of a sample: tokens checked against an earlier run, text, stop strings, the digest; and the way out.

Owns: everything between a token that arrives and a message that may be sent, less what a client that came back has
already. All of it is called in the decode stream's own loop, once per token, and wakes one task per request. This
module must not know nodes, queues or gRPC.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

from corun.config.fields import MAX_UNSENT_TOKENS
from corun.errors import CorunError, DataLossError, OverloadedError
from corun.params import SamplingParams
from corun.receipt import Receipt, records_digest, records_tokens_digest
from corun.types import FinishReason, ResumePoint
from router.text import Detokenizer, StopMatcher

RECORD = struct.Struct("<If")
"""A token id and the bits of its log probability, as in `corun.receipt.OutputDigest`."""
_pack = RECORD.pack
_RECORD_SIZE = RECORD.size


class Piece:
    """New output of one sample; pieces that wait to be sent grow together. Plain: there is one for most tokens."""

    __slots__ = ("logprobs", "receipt", "sample_index", "seed", "text", "token_ids", "token_texts")

    def __init__(self, sample_index: int, seed: int) -> None:
        self.sample_index = sample_index
        self.seed = seed
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.receipt: Receipt | None = None
        """Set in the sample's last piece."""
        self.token_texts: list[str] | None = None
        """One per token id, if they are wanted."""


class Outbox:
    """Output of one request's samples on its way to the client: at most `max_tokens` tokens of it."""

    def __init__(self, max_tokens: int = MAX_UNSENT_TOKENS) -> None:
        self.overflowed: Callable[[], None] = lambda: None
        """Called when the client reads so slowly that there is no room for more."""
        self.ready: Callable[[], None] | None = None
        """Called when there is output or an error, instead of waking who waits in `take`."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pending: dict[int, Piece] = {}  # By sample index, oldest first.
        self._error: CorunError | None = None
        self._taking: asyncio.Future[None] | None = None  # Of the one who waits for output.

    @property
    def error(self) -> CorunError | None:
        """What ended the request; None if nothing has."""
        return self._error

    def piece(self, sample_index: int, seed: int) -> Piece:
        """The piece to add new output of a sample to; `added` is to be called then."""
        found = self._pending.get(sample_index)
        if found is None:
            found = self._pending[sample_index] = Piece(sample_index, seed)
        return found

    def add(self, piece: Piece, token_id: int, logprob: float, text: str = "", token_text: str | None = None) -> None:
        """Adds a token to a piece, and new text. token_text: the token's own, if that is wanted."""
        piece.token_ids.append(token_id)
        piece.logprobs.append(logprob)
        if token_text is not None:
            piece.token_texts = piece.token_texts or []
            piece.token_texts.append(token_text)
        if text:
            piece.text += text
        self._num_tokens += 1
        if self._num_tokens > self._max_tokens and self._error is None:
            waiting = f"{self._max_tokens} tokens wait for the client, as many as may"
            self.fail(OverloadedError(f"the client reads more slowly than its output is drawn: {waiting}"))
            self._pending.clear()
            self.overflowed()
        else:
            self.added()

    def fail(self, error: CorunError) -> None:
        """Ends the request; the first failure counts."""
        self._error = self._error or error
        self.added()

    async def take(self) -> Sequence[Piece]:
        """Waits for output and takes all there is. Raises what `fail` was given. One at a time may wait."""
        if not self._pending and self._error is None:
            self._taking = asyncio.get_running_loop().create_future()
            await self._taking  # Ends: each sample ends, by its own deadline at the latest.
        return self.take_now()

    def take_now(self) -> Sequence[Piece]:
        """Takes all there is now. Raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        if not self._pending:
            return ()
        self._num_tokens = 0
        pending, self._pending = self._pending, {}
        return tuple(pending.values())

    def added(self) -> None:
        """Tells the reader that there is something."""
        if self.ready is not None:
            self.ready()
        elif self._taking is not None:
            taking, self._taking = self._taking, None
            if not taking.done():  # Who waited may have been cancelled.
                taking.set_result(None)


class SampleOutput:
    """The output of one sample over all its runs.

    received: what the client has from an earlier call. It is checked before anything else is sent, and not sent again:
    text is a function of the tokens, so the text of a whole run minus the bytes received is what is missing, whatever
    was held back where the earlier call broke off.
    """

    def __init__(
        self,
        *,
        sample_index: int,
        seed: int,
        params: SamplingParams,
        detokenizer: Detokenizer,
        outbox: Outbox,
        received: ResumePoint | None = None,
        with_token_texts: bool = False,
    ) -> None:
        self.position = 0
        """Tokens of the current run."""
        self.mismatch: DataLossError | None = None
        """Set when bits differed from an earlier run's, or from what the client received."""
        self.differs_at: int | None = None
        """The token, from 0, at which a run differed from an earlier one; that is the nodes' fault."""
        self.records = bytearray()
        """Of every token of the sample so far, 8 bytes each."""
        self.node_reason: FinishReason | None = None
        """Why the node ended the sample; None if a stop string did, which nodes know nothing of."""
        self._sample_index = sample_index
        self._seed = seed
        self._min_tokens = params.min_tokens
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._detokenizer = detokenizer
        self._stops = StopMatcher(tuple(params.stop))
        self._has_stops = bool(params.stop)
        self._outbox = outbox
        self._with_token_texts = with_token_texts
        self._resumes = received is not None
        self._num_received = received.num_tokens if received else 0
        self._received_digest = received.output_digest if received else ""
        self._skip_bytes = received.text_bytes if received else 0  # Of text, still to come again.
        self._unsent = ""

    @property
    def num_tokens(self) -> int:
        """Tokens delivered."""
        return len(self.records) // _RECORD_SIZE

    def restart(self) -> None:
        """A new run begins at the first token; what was delivered must come again, bit by bit."""
        self.position = 0

    def take(self, token_id: int, logprob: float) -> bool:
        """Takes the run's next token; True ends the sample."""
        record, records = _pack(token_id, logprob), self.records
        at = self.position * _RECORD_SIZE
        self.position += 1
        if at < len(records):
            return self._is_different(at, record)
        records += record
        # As in vLLM: a stop token is part of the ids and not of the text, a stop string may end after min_tokens.
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        own = text if self._with_token_texts else None
        if self._has_stops:
            text = self._stops.push(text, armed=self._is_armed)
        if self._resumes:
            return self._take_resumed(token_id, logprob, text, own)
        self._outbox.add(self._outbox.piece(self._sample_index, self._seed), token_id, logprob, text, own)
        return self._stops.matched

    def _take_resumed(self, token_id: int, logprob: float, text: str, own: str | None) -> bool:
        """The rest of `take` where the client has the first tokens, or text."""
        self._unsent += text
        if self.num_tokens > self._num_received:
            piece = self._outbox.piece(self._sample_index, self._seed)
            self._outbox.add(piece, token_id, logprob, self._new_text(), own)
        elif self.num_tokens == self._num_received:
            self._check_received()
        return self._stops.matched or self.mismatch is not None

    def end(self, reason: FinishReason) -> FinishReason:
        """The run is over: delivers the text that was held back. The result differs from `reason` if that completes a
        stop string. Raises DataLossError if the run was not a repetition of an earlier one, or not what the client
        has received."""
        self.node_reason = None if self._stops.matched else reason
        if self.mismatch is None and self.position < self.num_tokens:
            self.differs_at = self.position
            self.mismatch = DataLossError(f"a repeated run ended after {self.position} of {self.num_tokens} tokens")
        if self.mismatch is None and self.num_tokens < self._num_received:
            self.mismatch = DataLossError(f"{self._num_received} tokens were received of {self.num_tokens}")
        if self.mismatch is None:
            self._finish_text()
        if self.mismatch is not None:
            raise self.mismatch
        return FinishReason.STOP if self._stops.matched else reason

    def deliver(self, receipt: Receipt) -> None:
        """Ends the sample's output."""
        self._outbox.piece(self._sample_index, self._seed).receipt = receipt
        self._outbox.added()

    def hexdigest(self) -> str:
        return records_digest(self.records)

    def tokens_hexdigest(self) -> str:
        return records_tokens_digest(self.records)

    @property
    def _is_armed(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _is_different(self, at: int, record: bytes) -> bool:
        if self.records[at : at + _RECORD_SIZE] == record:
            return False
        self.differs_at = at // _RECORD_SIZE
        self.mismatch = DataLossError(f"a repeated run differs at token {self.differs_at}")
        return True

    def _check_received(self) -> None:
        """All that the client has of the tokens has come again: nothing new is sent before that was equal."""
        if self.hexdigest() == self._received_digest:
            self._send_text()
        else:
            self.mismatch = DataLossError(f"the {self._num_received} tokens received are not those of this sample")

    def _finish_text(self) -> None:
        if not self._stops.matched:
            text = self._stops.push(self._detokenizer.flush(), armed=self._is_armed)
            self._unsent += text + self._stops.flush()
        self._send_text()
        if self._skip_bytes:
            self.mismatch = DataLossError("more text was received than the output has")

    def _send_text(self) -> None:
        if text := self._new_text():
            self._outbox.piece(self._sample_index, self._seed).text += text
            self._outbox.added()

    def _new_text(self) -> str:
        """What the client has not received."""
        text, self._unsent = self._unsent, ""
        return self._without_received(text) if self._skip_bytes else text

    def _without_received(self, text: str) -> str:
        data = text.encode()
        skipped = min(len(data), self._skip_bytes)
        self._skip_bytes -= skipped
        try:
            return data[skipped:].decode()
        except UnicodeDecodeError:
            self.mismatch = DataLossError("the text received ends within a character")
            return ""
