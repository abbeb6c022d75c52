"""`corun generate`: run one prompt and print its text as it comes, then its seeds and receipts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from corun.cli.options import OptionalInt, PriorityName, RouterOptions, SamplingOptions
from corun.completion import Assembler, Chunk, Generation, Prompt
from corun.errors import InvalidArgumentError
from corun.records.rows import result_row, short_fp32, to_line
from corun.types import Alternatives


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Stream one prompt's text, then its seed and receipt.

    examples:
      corun generate "Once upon a time" --temperature 0.6 --max-tokens 64 --seed 42
      corun generate --token-ids 1 2 3 --n 4 --logprobs --json
    """

    prompt: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PROMPT]")]] = ()
    """The prompt, as text."""
    token_ids: tuple[int, ...] = ()
    """The prompt, as token ids."""
    seed: OptionalInt = None
    """Seed in [0, 2^63); without one, the router derives a seed and reports it."""
    request_id: str = ""
    """Your name for the request, at most 128 characters; without one the router draws it."""
    priority: PriorityName = "normal"
    """Which of the waiting requests come first; your token may limit it."""
    json: bool = False
    """Print one JSON object instead, once finished: all samples with token ids and receipts."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions] = field(default_factory=SamplingOptions)

    def run(self) -> int:
        text = " ".join(self.prompt)
        if len(self.prompt) > 1:
            raise InvalidArgumentError("prompt", text, "must be in quotes, since it has several words")
        if bool(text) == bool(self.token_ids):
            raise InvalidArgumentError("prompt", text, "must be given, as text or as --token-ids, not both")
        prompt: Prompt = text or self.token_ids
        params = self.sampling.params()
        assembler = Assembler(params.n, () if isinstance(prompt, str) else prompt)
        with self.cluster.client() as client, SampleWriter(params.n) as writer:
            for chunk in client.stream(
                prompt, params, seed=self.seed, request_id=self.request_id, priority=self.priority
            ):
                assembler.add(chunk)
                if not self.json:
                    writer.write(chunk)
        done = assembler.finish()
        print(to_line(result_row(done.request_id, prompt, params, done)) if self.json else receipts(done))
        return 0


class SampleWriter:
    """Writes text sample by sample. The current sample is written as its text comes; each later sample waits until the
    samples before it have ended."""

    def __init__(self, n: int) -> None:
        self._texts = [""] * n  # The text that was not written yet.
        self._ended = [False] * n
        self._current = 0
        self._in_line = False

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line, so that the next output, which may be an error, starts on its own line."""
        if self._in_line:
            sys.stdout.write("\n")

    def write(self, chunk: Chunk) -> None:
        self._texts[chunk.sample_index] += chunk.text
        self._ended[chunk.sample_index] |= chunk.finish_reason is not None
        while True:
            text, self._texts[self._current] = self._texts[self._current], ""
            sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
            self._in_line = True
            if not self._ended[self._current] or self._current + 1 == len(self._ended):
                break
            self._current += 1
            sys.stdout.write("\n\n")
        sys.stdout.flush()


def for_terminal(text: str) -> str:
    """Return `text` with all characters escaped that could control a terminal. A model may output anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def receipts(done: Generation) -> str:
    """Return the seed and the receipt of each sample, to be printed after the text."""
    parts = []
    for index, sample in enumerate(done.samples):
        receipt = sample.receipt
        lines = {
            "sample": str(index) if len(done.samples) > 1 else "",
            "seed": str(sample.seed),
            "finish reason": f"{sample.finish_reason.value}, {len(sample.token_ids)} tokens",
            "logprobs": " ".join(map(str, map(short_fp32, sample.logprobs))),
            "top logprobs": "; ".join(map(_shown, sample.top_logprobs)),
            "request id": receipt.request_id,
            "fingerprint": receipt.fingerprint,
            "prompt digest": receipt.prompt_digest,
            "output digest": receipt.output_digest,
            "nodes": f"{receipt.prefill_node} -> {receipt.decode_node}",
        }
        parts.append("\n".join(f"{name:<14} {value}" for name, value in lines.items() if value))
    return "\n\n".join(parts)


def _shown(tops: Alternatives) -> str:
    """Return the alternatives of one token: ids with their log probabilities."""
    pairs = zip(tops.token_ids, map(short_fp32, tops.logprobs), strict=True)
    return ", ".join(f"{token_id} {logprob}" for token_id, logprob in pairs)
