"""Turn text into tokens and back: the tokenizer of the cluster's model, detokenizers and the stop-string matcher.

Everything here is a pure function of the token ids seen so far, so a sample that runs again gives the same text at the
same tokens. This module must not know requests, nodes or gRPC.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from corun.errors import InvalidArgumentError, Shown, UnavailableError

VERSION: str = tokenizers.__version__
"""The version of the tokenizers library. Another version may turn a text into other tokens."""
TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PIECE = 64 * 1024
"""The number of characters of a text that are tokenized at once, to see how many tokens the text has."""
_LONGEST_CHARACTER = 4
"""The UTF-8 bytes of the longest character."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""The spelling of a token that a ByteFallback decoder turns into a byte. It decodes a whole run of such tokens at
once."""


class Tokenizer:
    """The tokenizer of one model. It turns prompts into token ids, and token ids into text without special tokens."""

    def __init__(self, data: bytes) -> None:
        self.digest = hashlib.sha256(data).hexdigest()
        self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()  # Files may contain truncation and padding settings from training.
        self._tokenizer.no_padding()
        decoder = json.loads(data).get("decoder") or {}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        # Tokens of ByteFallback have a text as a run, which any other token ends: nothing behind it is undecided.
        falls_back = any(each.get("type") == "ByteFallback" for each in (decoder, *decoder.get("decoders", ())))
        self._num_undecided = 0 if falls_back else _LONGEST_CHARACTER - 1
        self.max_token_bytes = self._max_token_bytes()
        """The most UTF-8 bytes of a prompt that one token may stand for."""
        self._token_bytes: dict[int, bytes] = {}
        self._texts_alone: dict[int, str] = {}
        self._whole_texts: dict[int, str] = {}

    @classmethod
    def load(cls, model_dir: str) -> Tokenizer:
        """Read the model's tokenizer.json. Raises UnavailableError if it cannot be read or used."""
        path = Path(model_dir) / TOKENIZER_FILE
        try:
            return cls(path.read_bytes())
        except OSError as error:
            raise UnavailableError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
        except Exception as error:  # The tokenizers library raises bare Exception for a malformed file.
            raise UnavailableError(f"the tokenizer {path} cannot be used: {error}") from error

    def encode(self, text: str, max_tokens: int | None = None, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer's own post-processor adds.
        special: False adds none.

        Other threads can run meanwhile. Raises InvalidArgumentError if the text has more than `max_tokens` tokens. A
        longer text does not make this refusal take more time or memory. max_tokens: None allows any number.
        """
        if max_tokens is not None and self._is_far_longer(text, max_tokens):
            raise _too_long(f"more than {2 * max_tokens}", max_tokens)
        encoding = self._encode(text, special=special)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise _too_long(str(len(encoding)), max_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of a whole output. Ids that the tokenizer does not have give no text, nor do special tokens
        unless `special` is true. Other threads can run meanwhile, which `Tokenizer.decode` would not let them."""
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=not special)[0]

    def spellings(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return each token as the vocabulary spells it; empty for ids that the tokenizer does not have."""
        return tuple(self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text that each token completes, often nothing. A special token's text is its spelling."""
        found: list[str] = []
        detokenizer = self.detokenizer()
        for token_id in token_ids:
            special = self._tokenizer.id_to_token(token_id) if token_id in self._special else None
            found.append(special or detokenizer.push(token_id))
        if found:
            found[-1] += detokenizer.flush()
        return tuple(found)

    def texts_alone(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text that each token has alone. It is found once for each token. Other threads can run between any
        two tokens: one call for many short lists holds the GIL while it reads them."""
        texts = self._texts_alone
        for each in token_ids:
            if each not in texts:
                texts[each] = self._tokenizer.decode([each], skip_special_tokens=False)
        return tuple(map(texts.__getitem__, token_ids))

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one sample, which turns its tokens into text as they come. Together the pieces
        are the decoded text of all tokens."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, self._whole_texts)
        return WindowDetokenizer(self.decode, self.token, self._num_undecided)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for special and unknown tokens, which have no text."""
        return None if token_id in self._special else self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own UTF-8 bytes under a byte-level decoder; empty for tokens without text."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = _bytes_of(self.token(token_id) or "")
        return found

    def _encode(self, text: str, *, special: bool = True) -> tokenizers.Encoding:
        # `encode` would give the same ids, but also compute offsets, which nothing needs, and hold the GIL to its end.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]

    def _is_far_longer(self, text: str, max_tokens: int) -> bool:
        """Return whether a text has more than twice `max_tokens` tokens when it is cut into pieces. Then the whole text
        has more than `max_tokens` tokens, because a cut adds at most a few tokens to the hundreds or more of a piece.
        """
        count = 0
        for start in range(0, len(text) if len(text) > PIECE else 0, PIECE):
            count += len(self._encode(text[start : start + PIECE], special=False))
            if count > 2 * max_tokens:
                return True
        return False

    def _max_token_bytes(self) -> int:
        """Return the most UTF-8 bytes of a prompt that one token may stand for.

        A token stands for no more bytes than its spelling has: the spellings of bytes (Ġ, <0x0A>), of spaces (▁) and of
        parts of words (##) are longer than what they stand for. A token for unknown text stands for one character. A
        normalizer may make a character shorter, or merge several characters into one: NFC shortens a text up to three
        times (Hangul, the Kelvin sign), NFKC up to four times.

        Some text has no token of its own, because the tokenizer drops it: long white space, or runs of unknown
        characters that become one token. If a text is longer than this bound only because of these, it is refused all
        the same.
        """
        longest = max((len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True)), default=0)
        shrinks = _LONGEST_CHARACTER if self._tokenizer.normalizer is not None else 1
        return shrinks * max(longest, _LONGEST_CHARACTER)


class ByteLevelDetokenizer:
    """A detokenizer for byte-level decoders, where a token is a fixed run of bytes. The work per token is constant.

    whole_texts: the texts of tokens that begin and end between two characters, as nearly all do. All samples may share
    it, because such a token has the same text wherever it stands between characters.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], whole_texts: dict[int, str]) -> None:
        self._token_bytes = token_bytes
        self._whole_texts = whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # Whether the text so far ends within a character.

    def push(self, token_id: int) -> str:
        """Return the text that this token completes. It is never half a character, and often empty."""
        if self._is_within:
            return self._decode(token_id)
        text = self._whole_texts.get(token_id)
        if text is None:
            text = self._decode(token_id)
            if not self._is_within:
                self._whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        """Return the rest of the text when no more tokens come. An unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _decode(self, token_id: int) -> str:
        text = self._utf8.decode(self._token_bytes(token_id))
        self._is_within = bool(self._utf8.getstate()[0])
        return text


class WindowDetokenizer:
    """A detokenizer for all other decoders. It decodes a short window of tokens again and emits the new text.

    The window starts at the tokens of the last emitted piece, because a decoder may treat the first token in a special
    way (for example drop its leading space).

    num_undecided: the last tokens of which a character may be unfinished. Only these are held back, so the window stays
    short, whatever is drawn.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token: Callable[[int], str | None], num_undecided: int
    ) -> None:
        self._decode = decode
        self._token = token
        self._num_undecided = num_undecided
        self._window: list[int] = []
        self._emitted_ids = 0  # The number of leading tokens of the window whose text was emitted.
        self._emitted = ""  # The text of these leading tokens.

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):  # The text of a run of byte tokens is known only when the run is over.
            return ""
        return self._emit(whole=False)

    def flush(self) -> str:
        return self._emit(whole=True)

    def _emit(self, *, whole: bool) -> str:
        text, end = self._decode(self._window), len(self._window)
        if text.endswith(REPLACEMENT) and not whole:
            end -= self._num_undecided
            decided = self._decode(self._window[: max(0, end)])
            if not text.startswith(decided):  # It ends within a character that the last tokens have finished.
                return ""
            text = decided
        if not (new := text[len(self._emitted) :]):
            return ""
        self._window, self._emitted_ids = self._window[self._emitted_ids :], end - self._emitted_ids
        self._emitted = self._decode(self._window[: self._emitted_ids])
        return new


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer


class StopMatcher:
    """Cuts text at the earliest stop string, and holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str, *, armed: bool = True) -> str:
        """Return the text that is safe to show. Set `matched` if a stop string ends in `text` while `armed` is true."""
        if not self._stops:
            return text
        seen, self._held = len(self._held), self._held + text
        if armed and (start := self._find(seen)) >= 0:
            self.matched = True
            return self._take(start, drop_rest=True)
        return self._take(self._first_open())

    def flush(self) -> str:
        """Return the text that was held back, when no more text comes."""
        return self._take(len(self._held))

    def _find(self, seen: int) -> int:
        """Return the start of the earliest stop string that ends after the first `seen` held characters; -1 if none."""
        starts = [self._held.find(stop, max(0, seen - len(stop) + 1)) for stop in self._stops]
        return min((start for start in starts if start >= 0), default=-1)

    def _first_open(self) -> int:
        """Return the earliest possible start of an unfinished stop string; the text's length if there is none."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            tail = self._held[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(self._held)

    def _take(self, length: int, *, drop_rest: bool = False) -> str:
        taken, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        return taken


def _too_long(found: str, max_tokens: int) -> InvalidArgumentError:
    limit = f"must be at most {max_tokens} tokens, the model's length {max_tokens + 1} less one for output"
    return InvalidArgumentError("prompt.text", Shown(f"{found} tokens"), limit)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for. This is GPT-2's table, in which printable
    bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    # A token with any other character is added text and stands for itself (tokenizers' ByteLevel decoder).
    found = [BYTE_ALPHABET.get(char) for char in token]
    return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
