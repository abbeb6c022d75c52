"""The requests to a cluster under chaos, with their right answers: streams, HTTP and verifications. Tests only.

Owns the cases, and how each way of asking gives the bits of an answer. Must not know faults or what is judged.
"""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from corun import AsyncClient, Chunk, OverloadedError, Priority, SamplingParams, UnavailableError
from corun.receipt import output_digest
from corun.records.verification import VerifyCase

STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {7: 2.0, 300: -100.0}},
)
TEXTS = ("The old clock said ", "Every morning the girl heard the wind. " * 8, "é\U0001f600 \u9fa5\u9fa5 " * 5)
PRIORITIES = (Priority.NORMAL, Priority.NORMAL, Priority.LOW, Priority.HIGH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A request and its right answer: per sample, token ids and log probability bits."""

    number: int
    prompt: list[int] | str
    params: SamplingParams
    seed: int
    priority: Priority = Priority.NORMAL
    token_ids: tuple[int, ...] = ()
    """The token ids of the prompt."""
    bits: tuple[bytes, ...] = ()
    digests: tuple[str, ...] = ()
    """The digest of each sample's output, as receipts have it."""

    def verification(self) -> VerifyCase:
        """Return its first sample as a case that the router runs again."""
        return VerifyCase(
            prompt_token_ids=self.token_ids,
            sampling_params=replace(self.params, n=1),
            seed=self.seed,
            output_digest=self.digests[0],
        )


def make_cases(count: int) -> list[Case]:
    """Return `count` cases, always the same ones.

    Their prompts are texts, or tokens from one to a few chunks. Some are greedy, some have several samples.
    """
    draw = random.Random(4)
    cases = []
    for number in range(count):
        ids = [draw.randrange(3, 500) for _ in range(draw.choice((1, 17, 127, 128, 129, 300)))]
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 2, 4)),
            max_tokens=draw.randrange(20, 200),
            ignore_eos=draw.random() < 0.8,
            logprobs=True,
            **STYLES[number % len(STYLES)],
        )
        prompt = draw.choice(TEXTS) if number % 4 == 3 else ids
        seed, priority = draw.randrange(2**63), draw.choice(PRIORITIES)
        cases.append(Case(number=number, prompt=prompt, params=params, seed=seed, priority=priority))
    return cases


def with_answer(case: Case, token_ids: Sequence[int], samples: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Case:
    """Return a case with its answer: its prompt's tokens, and the tokens and log probabilities of each sample."""
    bits, digests = tuple(pack(*sample) for sample in samples), tuple(output_digest(*sample) for sample in samples)
    return replace(case, token_ids=tuple(token_ids), bits=bits, digests=digests)


async def answered(client: AsyncClient, case: Case) -> Case:
    """Compute the right answer of a case now, and return the case with it."""
    done = await client.generate(case.prompt, case.params, seed=case.seed)
    return with_answer(case, done.prompt_token_ids, [(sample.token_ids, sample.logprobs) for sample in done.samples])


async def streamed(client: AsyncClient, case: Case, samples: Sequence[bytearray]) -> AsyncGenerator[Chunk, None]:
    """Stream a case into `samples`, which start empty, and yield every chunk."""
    async for chunk in client.stream(case.prompt, case.params, seed=case.seed, priority=case.priority):
        samples[chunk.sample_index].extend(pack(chunk.token_ids, chunk.logprobs))
        yield chunk


async def over_http(session: aiohttp.ClientSession, url: str, case: Case) -> tuple[str, ...]:
    """Return the digests of a case's samples, as the gateway's receipts have them.

    Raises OverloadedError if the gateway answers 429, and UnavailableError for any other error or if the gateway is
    not there.
    """
    params = case.params
    fields: dict[str, Any] = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "n")}
    fields |= {name: getattr(params, name) for name in ("presence_penalty", "repetition_penalty", "max_tokens")}
    bias = {str(token_id): value for token_id, value in params.logit_bias_map.items()}
    body = {**fields, "logit_bias": bias, "prompt": case.prompt, "seed": case.seed, "ignore_eos": params.ignore_eos}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
    except aiohttp.ClientError as error:
        raise UnavailableError(f"the gateway: {error}") from error
    if response.status == 429:
        raise OverloadedError(str(answer), retry_after_s=1.0)
    if response.status != 200:
        raise UnavailableError(f"the gateway: {response.status} {answer}")
    return tuple(choice["corun"]["receipt"]["output_digest"] for choice in answer["choices"])


def pack(token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Return tokens and the bits of their log probabilities as bytes to compare."""
    return b"".join(struct.pack("<If", *pair) for pair in zip(token_ids, logprobs, strict=True))
