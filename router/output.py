"""The output of a sample: checking tokens against an earlier run, text, stop strings, the digest, and delivery.

Owns: everything between a token that arrives and a message that may be sent. Output that a resuming client already has
is left out. All of it runs in the loop that reads the decode stream, once per token, and wakes one task per request.
This module must not know nodes, queues or gRPC.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from corun.config.fields import MAX_UNSENT_TOKENS
from corun.errors import CorunError, DataLossError, OverloadedError
from corun.params import SamplingParams
from corun.receipt import Receipt, records_digest, records_tokens_digest
from corun.types import NO_ALTERNATIVES, Alternatives, FinishReason, ResumePoint
from router.text import Detokenizer, StopMatcher

RECORD = struct.Struct("<If")
"""The binary record of a token: its id and the bits of its log probability, as in `corun.receipt.OutputDigest`."""
TOPS_OF_A_TOKEN = 4
"""How many alternatives take as much room in an outbox as a token."""
_pack = RECORD.pack
_RECORD_SIZE = RECORD.size


def tokens_of(tops: Alternatives) -> int:
    """Return as how many tokens the alternatives of one token count."""
    return -(-len(tops.token_ids) // TOPS_OF_A_TOKEN)


class Piece:
    """New output of one sample. Output that arrives while a piece waits to be sent is added to that piece. The class is
    plain because most tokens get a piece of their own."""

    __slots__ = ("logprobs", "receipt", "sample_index", "seed", "text", "token_ids", "token_texts", "tops")

    def __init__(self, sample_index: int, seed: int) -> None:
        self.sample_index = sample_index
        self.seed = seed
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.receipt: Receipt | None = None
        """The sample's receipt; set only in its last piece."""
        self.token_texts: list[str] | None = None
        """The text of each token, one per token id, if the client wants them; otherwise None."""
        self.tops: list[Alternatives] | None = None
        """The alternatives of each token, one per token id, if the client wants them; otherwise None."""


class Outbox:
    """The output of one request's samples that waits to be sent to the client. It holds at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int = MAX_UNSENT_TOKENS) -> None:
        self.overflowed: Callable[[], None] | None = None
        """Called when the client reads so slowly that there is no room for more."""
        self.ready: Callable[[], None] | None = None
        """Called when there is output or an error."""
        self.error: CorunError | None = None
        """The error that ended the request; None if there was none."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pending: dict[int, Piece] = {}  # By sample index, oldest first.

    def piece(self, sample_index: int, seed: int) -> Piece:
        """Return the piece to which new output of a sample is added. The caller must call `notify` afterwards."""
        found = self._pending.get(sample_index)
        if found is None:
            found = self._pending[sample_index] = Piece(sample_index, seed)
        return found

    def add(
        self,
        sample_index: int,
        seed: int,
        token_id: int,
        logprob: float,
        text: str = "",
        token_text: str | None = None,
        tops: Alternatives = NO_ALTERNATIVES,
    ) -> None:
        """Add a token and new text of a sample. token_text: the token's own text, if the client wants it. tops: the
        token's alternatives, if the client wants them. Four of them count as one more token that waits."""
        piece = self._pending.get(sample_index)
        if piece is None:
            piece = self._pending[sample_index] = Piece(sample_index, seed)
        piece.token_ids.append(token_id)
        piece.logprobs.append(logprob)
        if token_text is not None:
            piece.token_texts = piece.token_texts or []
            piece.token_texts.append(token_text)
        if text:
            piece.text += text
        if tops.token_ids:
            piece.tops = piece.tops or []
            piece.tops.append(tops)
            self._num_tokens += tokens_of(tops)
        self._num_tokens += 1
        if self._num_tokens > self._max_tokens and self.error is None:
            waiting = f"{self._max_tokens} tokens wait for the client, as many as may"
            self.fail(OverloadedError(f"the client reads more slowly than its output is drawn: {waiting}"))
            self._pending.clear()
            if self.overflowed is not None:
                self.overflowed()
        elif self.ready is not None:
            self.ready()

    def fail(self, error: CorunError) -> None:
        """End the request with an error. If it fails several times, the first error counts."""
        self.error = self.error or error
        self.notify()

    def take(self) -> Iterable[Piece]:
        """Take all output that is there now. Raises the error passed to `fail`."""
        if self.error is not None:
            raise self.error
        if not self._pending:
            return ()
        self._num_tokens = 0
        pending, self._pending = self._pending, {}
        return pending.values()

    def notify(self) -> None:
        """Tell the reader that there is output or an error."""
        if self.ready is not None:
            self.ready()


class Output:
    """The tokens of one run of a sample, of which there may be a receipt."""

    def __init__(self) -> None:
        self.position = 0
        """The number of tokens that the current run has given so far."""
        self.records = bytearray()
        """The records of every token of the sample so far, 8 bytes each (`RECORD`)."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the sample so far, over all its runs."""
        return len(self.records) // _RECORD_SIZE

    def take(self, token_id: int, logprob: float, tops: Alternatives = NO_ALTERNATIVES) -> bool:
        """Take the run's next token. Return True if the sample ends with it. tops: its alternatives, of which no digest
        knows."""
        self.position += 1
        self.records += _pack(token_id, logprob)
        return False

    def hexdigest(self) -> str:
        return records_digest(self.records)

    def tokens_hexdigest(self) -> str:
        return records_tokens_digest(self.records)


class SampleOutput(Output):
    """The output of one sample over all its runs, delivered to its client.

    received: the output that the client has from an earlier call. It is checked before anything else is sent, and it is
    not sent again. Text is a function of the tokens, so the missing text is the text of the whole run without the bytes
    received, no matter how much text was held back when the earlier call broke off.
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
        super().__init__()
        self.mismatch: DataLossError | None = None
        """Set when bits differ from those of an earlier run, or from those the client received."""
        self.differs_at: int | None = None
        """The index of the token, from 0, at which a run differs from an earlier one. Such a difference is the nodes'
        fault."""
        self.node_reason: FinishReason | None = None
        """Why the node ended the sample; None if a stop string ended it, because nodes do not know stop strings."""
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
        self._skip_bytes = received.text_bytes if received else 0  # Bytes of received text that have yet to come again.
        self._unsent = ""

    def restart(self) -> None:
        """Begin a new run at the first token. The tokens of earlier runs must come again, bit by bit."""
        self.position = 0

    def take(self, token_id: int, logprob: float, tops: Alternatives = NO_ALTERNATIVES) -> bool:
        record, records = _pack(token_id, logprob), self.records
        at = self.position * _RECORD_SIZE
        self.position += 1
        if at < len(records):
            # The run before may have ended with a stop string, and its attempt with a fault all the same.
            return self._is_different(at, record) or (self._stops.matched and self.position == self.num_tokens)
        records += record
        # As in vLLM, a stop token is part of the ids but not of the text, and a stop string counts only if it ends
        # after min_tokens tokens.
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        own = text if self._with_token_texts else None
        if self._has_stops:
            text = self._stops.push(text, armed=self._is_armed)
        if self._resumes:
            return self._take_resumed(token_id, logprob, text, own, tops)
        self._outbox.add(self._sample_index, self._seed, token_id, logprob, text, own, tops)
        return self._has_stops and self._stops.matched

    def _take_resumed(self, token_id: int, logprob: float, text: str, own: str | None, tops: Alternatives) -> bool:
        """Finish `take` for a resumed sample, whose first tokens or text the client already has."""
        self._unsent += text
        if self.num_tokens > self._num_received:
            self._outbox.add(self._sample_index, self._seed, token_id, logprob, self._new_text(), own, tops)
        elif self.num_tokens == self._num_received:
            self._check_received()
        return self._stops.matched or self.mismatch is not None

    def end(self, reason: FinishReason) -> FinishReason:
        """End the run and deliver the text that was held back. Return STOP if that text completes a stop string,
        otherwise `reason`. Raises DataLossError if the run did not repeat an earlier run, or did not repeat what the
        client has received."""
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
        """End the sample's output with its receipt."""
        self._outbox.piece(self._sample_index, self._seed).receipt = receipt
        self._outbox.notify()

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
        """Compare the first tokens with those the client received, once all of them have come again. Nothing new is
        sent unless they are equal."""
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
            self._outbox.notify()

    def _new_text(self) -> str:
        """Take the unsent text, without the part that the client has already received."""
        text, self._unsent = self._unsent, ""
        if not self._skip_bytes:
            return text
        data = text.encode()
        skipped = min(len(data), self._skip_bytes)
        self._skip_bytes -= skipped
        try:
            return data[skipped:].decode()
        except UnicodeDecodeError:
            self.mismatch = DataLossError("the text received ends within a character")
            return ""
