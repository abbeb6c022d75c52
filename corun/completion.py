"""What a client receives: chunks as they stream, and the samples that they add up to.

Owns the assembly of a response stream and the checks that need nothing but the response itself. This module must not
know channels, deadlines or how responses are encoded (`corun.rpc.codec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corun.errors import DataLossError
from corun.receipt import Receipt, output_digest, prompt_digest, tokens_digest
from corun.types import FinishReason

Prompt = str | Sequence[int]
"""Text, or the token ids of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New output of one sample. The sample's last chunk, and no other, carries `finish_reason` and `receipt`."""

    request_id: str
    sample_index: int
    seed: int
    """The sample's own."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """fp32 values, one per token id; empty unless asked for."""
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    prompt_token_ids: tuple[int, ...] = ()
    """What the prompt became; in the request's first chunk, if the prompt was text."""
    fingerprint: str = ""
    """Of the contract; in the request's first chunk."""
    token_texts: tuple[str, ...] = ()
    """The text that each token completes, often nothing; empty unless log probabilities were asked for. It comes with
    its token, while `text` may wait for what follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One finished output of a prompt."""

    index: int
    seed: int
    """The sample's own: with it, n=1 gives this sample again."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """fp32 values, one per token id; empty unless asked for."""
    finish_reason: FinishReason
    receipt: Receipt
    token_texts: tuple[str, ...] = ()
    """The text that each token completes; empty unless log probabilities were asked for. Together they are `text`, and
    after it what a stop string cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """All samples of one prompt; the properties are those of sample 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    """In order of their index; never empty."""

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
    """Adds the interleaved chunks of one request up to its generation.

    Every finished sample is checked against its receipt; a difference raises DataLossError.
    """

    def __init__(self, n: int, prompt_token_ids: Sequence[int] | None = None) -> None:
        self._prompt_token_ids = tuple(prompt_token_ids or ())
        self._chunks: list[list[Chunk]] = [[] for _ in range(n)]

    def add(self, chunk: Chunk) -> None:
        if chunk.sample_index >= len(self._chunks):
            raise DataLossError(f"the router sent sample {chunk.sample_index} of {len(self._chunks)}")
        self._chunks[chunk.sample_index].append(chunk)
        self._prompt_token_ids = self._prompt_token_ids or chunk.prompt_token_ids

    def finish(self) -> Generation:
        """The generation. Raises DataLossError if a sample is not whole, or not what its receipt says."""
        samples = tuple(_join(index, chunks) for index, chunks in enumerate(self._chunks))
        sent = prompt_digest(self._prompt_token_ids)
        for sample in samples:
            check_receipt(sample)
            if sample.receipt.prompt_digest != sent:
                raise DataLossError(f"sample {sample.index} was computed from another prompt than the one sent")
        return Generation(
            request_id=samples[0].receipt.request_id, prompt_token_ids=self._prompt_token_ids, samples=samples
        )


def check_receipt(sample: Sample) -> None:
    """Raises DataLossError if a sample is not what its receipt says. Its output digest needs logprobs to check."""
    receipt = sample.receipt
    facts: dict[str, tuple[object, object]] = {
        "seed": (sample.seed, receipt.seed),
        "finish reason": (sample.finish_reason, receipt.finish_reason),
        "number of tokens": (len(sample.token_ids), receipt.num_output_tokens),
    }
    if receipt.tokens_digest:  # A router of an earlier version gives none.
        facts["tokens digest"] = (tokens_digest(sample.token_ids), receipt.tokens_digest)
    if len(sample.logprobs) == len(sample.token_ids):
        facts["output digest"] = (output_digest(sample.token_ids, sample.logprobs), receipt.output_digest)
    check_facts(sample.index, facts)


def check_facts(sample_index: int, facts: Mapping[str, tuple[object, object]]) -> None:
    """Raises DataLossError for the first fact, found and stated, on which a sample and its receipt differ."""
    for name, (found, stated) in facts.items():
        if found != stated:
            raise DataLossError(f"sample {sample_index}: its {name} is {found}, its receipt says {stated}")


def _join(index: int, chunks: Sequence[Chunk]) -> Sample:
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None or last.receipt is None:
        raise DataLossError(f"the stream ended before sample {index} did")
    text = "".join(chunk.text for chunk in chunks)
    return Sample(
        index=index,
        seed=last.seed,
        text=text,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=last.finish_reason,
        receipt=last.receipt,
        token_texts=with_rest([piece for chunk in chunks for piece in chunk.token_texts], text),
    )


def with_rest(token_texts: Sequence[str], text: str) -> tuple[str, ...]:
    """The texts of a sample's last tokens, given its text since the first of them. What that has more is of a character
    that the last token left unfinished, and came after it."""
    *others, last = token_texts or ("",)
    rest = text[sum(map(len, token_texts)) :]
    return (*others, last + rest) if token_texts else ()
