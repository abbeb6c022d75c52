"""Requests to the real router over fake engines, and what their outputs must be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from corun.params import SamplingParams, sample_seed
from corun.receipt import certificates_digest, output_digest, prompt_digest, tokens_digest
from corun.testing.engines import certificate, expected
from corun.types import NodeRole
from router.text import Tokenizer
from tests.clusters import FakeCluster, Output, generate

PARAMS = SamplingParams(max_tokens=12, logprobs=True)
LONG = SamplingParams(max_tokens=60, logprobs=True)
PROMPT = (5, 6, 7)
CERTIFICATES = certificates_digest(*(certificate(role).digest for role in NodeRole))
"""What receipts say of the certificates of a pair of fake nodes."""


MEMBER = "m" * 16
"""The token of the cluster in `with_tokens`."""


def token_of(client: str) -> str:
    return f"{client:-<16}"


def with_tokens(directory: Path, *clients: str) -> dict[str, Any]:
    """Return the settings of a cluster with tokens. clients: the name of each, and after it what its token allows."""
    lines = [f"{name}: {token_of(name)} {limits}\n" for name, _, limits in (each.partition(" ") for each in clients)]
    (directory / "clients").write_text("".join(lines))
    (directory / "cluster").write_text(MEMBER)
    return {"client_tokens_file": str(directory / "clients"), "cluster_token_file": str(directory / "cluster")}


def right(output: Output, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> bool:
    """Return whether an output is what these tokens, parameters and seed always give, to the last bit."""
    return (output.token_ids, output.logprobs) == expected(prompt, params, seed)[:2]


def check(output: Output, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> None:
    """The output is what these tokens, parameters and seed always give, and the receipt says so."""
    ids, logprobs, reason = expected(prompt, params, seed)
    assert (output.token_ids, output.seed) == (ids, seed)
    assert output.logprobs == (logprobs if params.logprobs else [])
    receipt = output.receipt
    assert receipt.output_digest == output_digest(ids, logprobs)
    assert receipt.tokens_digest == tokens_digest(ids)
    assert (receipt.prompt_digest, receipt.params_digest) == (prompt_digest(prompt), params.digest())
    assert (receipt.seed, receipt.finish_reason) == (seed, reason)
    assert (receipt.num_prompt_tokens, receipt.num_output_tokens) == (len(prompt), len(ids))
    assert receipt.certificates == CERTIFICATES


def check_all(outputs: list[Output], prompt: tuple[int, ...] = PROMPT, seed: int = 9) -> None:
    """The samples of a request, each with its own seed."""
    for index, output in enumerate(outputs):
        check(output, prompt, PARAMS, sample_seed(seed, index))
        assert output.receipt.sample_index == index


def started(
    fake: FakeCluster, prompt: Any = PROMPT, params: SamplingParams = PARAMS, *, seed: int = 9, **options: Any
) -> asyncio.Task[list[Output]]:
    """Send a request as `generate` does, and go on meanwhile."""
    return asyncio.ensure_future(generate(fake, prompt, params, seed=seed, **options))


def tokenizer_of(fake: FakeCluster) -> Tokenizer:
    assert fake.router.registry.model is not None
    return fake.router.registry.model.tokenizer
