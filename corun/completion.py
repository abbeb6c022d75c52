"""What a client receives: chunks as they stream, and the samples that they add up to.

This module owns the assembly of a response stream. It must not know how chunks are received and checked
(`corun.client.request`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corun.receipt import Receipt
from corun.types import FinishReason

Prompt = str | Sequence[int]
"""A prompt: its text, or its token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New output of one sample. The sample's last chunk, and no other, carries `finish_reason` and `receipt`."""

    request_id: str
    sample_index: int
    seed: int
    """The sample's own seed, not the request's."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The fp32 log probability of each token id. Empty unless log probabilities were asked for."""
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    prompt_token_ids: tuple[int, ...] = ()
    """The token ids that a text prompt became. Only the request's first chunk has them."""
    fingerprint: str = ""
    """The fingerprint of the cluster's contract. Only the request's first chunk has it."""
    token_texts: tuple[str, ...] = ()
    """The text that each token completes, which is often empty. Empty unless log probabilities were asked for. A
    token's text comes with the token, while `text` may be held back until later tokens arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One finished output of a prompt."""

    index: int
    seed: int
    """The sample's own seed. A request with this seed and n=1 gives this sample again."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The fp32 log probability of each token id. Empty unless log probabilities were asked for."""
    finish_reason: FinishReason
    receipt: Receipt
    token_texts: tuple[str, ...] = ()
    """The text that each token completes. Empty unless log probabilities were asked for. Joined, these texts are `text`
    followed by what a stop string cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """All samples of one prompt. The properties are shortcuts to the values of sample 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    """The samples in order of their index. Never empty."""

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.samples[0].logprobs

    @property
    def token_texts(self) -> tuple[str, ...]:
        return self.samples[0].token_texts

    @property
    def seed(self) -> int:
        return self.samples[0].seed

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def receipt(self) -> Receipt:
        return self.samples[0].receipt


class Assembler:
    """Joins the interleaved chunks of one request, which the client has checked, into its generation."""

    def __init__(self, n: int, prompt_token_ids: Sequence[int] = ()) -> None:
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._chunks: list[list[Chunk]] = [[] for _ in range(n)]

    def add(self, chunk: Chunk) -> None:
        self._chunks[chunk.sample_index].append(chunk)
        self._prompt_token_ids = self._prompt_token_ids or chunk.prompt_token_ids

    def finish(self) -> Generation:
        """Return the generation. All chunks must have been added."""
        samples = tuple(_join(index, chunks) for index, chunks in enumerate(self._chunks))
        return Generation(
            request_id=samples[0].receipt.request_id, prompt_token_ids=self._prompt_token_ids, samples=samples
        )


def _join(index: int, chunks: Sequence[Chunk]) -> Sample:
    last = chunks[-1]
    assert last.finish_reason is not None  # The client raises an error for a stream that ends too early.
    assert last.receipt is not None
    text = "".join(chunk.text for chunk in chunks)
    return Sample(
        index=index,
        seed=last.seed,
        text=text,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=last.finish_reason,
        receipt=last.receipt,
        token_texts=_with_rest([piece for chunk in chunks for piece in chunk.token_texts], text),
    )


def _with_rest(token_texts: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the texts of a sample's tokens, the last one's with the rest of the text.

    The rest is what came after the last token, to finish a character that this token left unfinished.
    """
    if not token_texts:
        return ()
    return (*token_texts[:-1], token_texts[-1] + text[sum(map(len, token_texts)) :])
