"""What a client receives: chunks as they stream, the samples that they add up to, and scores.

This module owns the assembly of a response stream. It must not know how chunks are received and checked
(`corun.client.request`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corun.receipt import Receipt
from corun.types import Alternatives, FinishReason, NodeRef

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
    top_logprobs: tuple[Alternatives, ...] = ()
    """The likeliest tokens at the place of each token. Empty unless `SamplingParams.top_logprobs` asks for some."""


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
    top_logprobs: tuple[Alternatives, ...] = ()
    """The likeliest tokens at the place of each token. Empty unless `SamplingParams.top_logprobs` asks for some."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The log probabilities of one continuation. Each column has an entry for each token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The fp32 log probability of each token after the prompt and the tokens before it, under the raw logits. That is
    what `Sample.logprobs` are, too."""
    top_token_ids: tuple[int, ...]
    """The likeliest token at each place."""
    top_logprobs: tuple[float, ...]
    """The fp32 log probability of the likeliest token."""
    output_digest: str
    """The digest over token ids and log probabilities, made as that of a receipt; 64 hex digits."""
    equals_generation: bool
    """Whether certificates show that the log probabilities have the bits of those that are reported when the cluster
    draws these tokens. Otherwise they are the same each time that they are scored, but may differ from the drawn ones.
    """
    prefill_node: NodeRef
    """The node that computed the score. No bit depends on it."""
    cached_tokens: int
    """The number of tokens whose KV was in the node's prefix cache. No bit depends on it."""
    token_texts: tuple[str, ...] = ()
    """The text that each token completes, special tokens included. Empty unless texts were asked for."""
    top_token_texts: tuple[str, ...] = ()
    """The text of each likeliest token alone. Empty unless texts were asked for."""

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one at its place."""
        return self.token_ids == self.top_token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The scores of all continuations of one prompt."""

    request_id: str
    fingerprint: str
    """The fingerprint of the cluster's contract."""
    prompt_token_ids: tuple[int, ...]
    scores: tuple[Score, ...]
    """One score for each continuation, in their order."""
    prompt_token_texts: tuple[str, ...] = ()
    """The text that each of the prompt's tokens completes. Empty unless texts were asked for."""


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
        top_logprobs=tuple(tops for chunk in chunks for tops in chunk.top_logprobs),
    )


def _with_rest(token_texts: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the texts of a sample's tokens, the last one's with the rest of the text.

    The rest is what came after the last token, to finish a character that this token left unfinished.
    """
    if not token_texts:
        return ()
    return (*token_texts[:-1], token_texts[-1] + text[sum(map(len, token_texts)) :])
