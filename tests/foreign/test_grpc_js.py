"""@grpc/grpc-js and the proto files: the example draws the Python client's bits, cancels, and reads errors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from corun import AsyncClient, SamplingParams
from corun.rpc.auth import RETRY_S
from corun.rpc.codec import generate_request
from corun.testing.cluster import WAIT_S
from tests.clusters import FakeCluster, cluster
from tests.foreign.tools import install, printed, running
from tests.secrets import Secrets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, logprobs=True)
ENV = {**os.environ, "CORUN_PROTOS": str(ROOT / "protos"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages, as its lock file has them."""
    missing = [name for name in ("node", "npm") if not shutil.which(name)]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: this test needs Node.js 20 with npm")
    found = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "corun.mjs", "generate.mjs"):
        shutil.copy(ROOT / "examples" / "node" / name, found)
    shutil.copy(Path(__file__).with_name("cancel.mjs"), found)
    install(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], found, "@grpc/grpc-js")
    return found


async def drawn(folder: Path, address: str, prompt: str, *flags: str) -> list[Any]:
    """Return the messages that the example prints for `PARAMS`."""
    words = [
        "generate.mjs",
        "--router",
        address,
        "--json",
        "--max-tokens",
        "40",
        "--temperature",
        "0.7",
        *flags,
        prompt,
    ]
    code, output, errors = await printed("node", *words, where=folder, env=ENV)
    assert code == 0, errors
    return [json.loads(line) for line in output.strip().split("\n")]


async def test_it_draws_the_bits_that_the_python_client_draws(model: str, folder: Path, tmp_path: Path) -> None:
    """Over TLS and with a token, as far from our own channel as it gets."""
    secrets = Secrets.make(tmp_path)
    seed = 2**63 - 5  # No number of JavaScript: this one and its neighbours are 2**63 there.
    async with cluster(model, client=secrets.client, **secrets.settings) as fake:
        address = fake.address.replace("127.0.0.1", "localhost")  # Node.js warns of certificates for addresses.
        messages = await drawn(folder, address, "Hello", *flags_of(secrets), "--seed", str(seed))
        other = await drawn(folder, address, "Hello", *flags_of(secrets), "--seed", str(seed - 1))
        async with AsyncClient(fake.address, tls=secrets.tls, token=secrets.token("client")) as client:
            done = await client.generate("Hello", PARAMS, seed=seed)
    assert [i for message in messages for i in message["token_ids"]] == list(done.token_ids)
    assert [x for message in messages for x in message["logprobs"]] == list(done.logprobs)
    assert "".join(message["text"] for message in messages) == done.text
    assert messages[-1]["receipt"]["output_digest"] == done.receipt.output_digest
    assert {message["seed"] for message in messages} == {str(seed)}
    assert other[-1]["receipt"]["output_digest"] != done.receipt.output_digest
    assert len(messages) > 10, "it is a stream"


@pytest.mark.parametrize("ends", [True, False], ids=["cancelled", "control"])
async def test_a_call_that_is_cancelled_gives_its_slot_back(model: str, folder: Path, ends: bool) -> None:
    async with cluster(model, slots=1) as fake:
        fake.node("d1").engine.step_ms = 100  # The whole of it would take 40 s.
        words = ("cancel.mjs", fake.address, "cancel" if ends else "go on")
        async with running("node", *words, where=folder, env=ENV) as process:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 30) == b"3 tokens\n"
            if ends:
                await fake.idle()
                assert await asyncio.wait_for(process.stdout.readline(), 30) == b"ended with 1\n"
                assert process.returncode is None, "it is still connected"
            else:
                assert fake.held()


REFUSALS = [
    (["--temperature", "9"], "INVALID_ARGUMENT", "sampling_params.temperature", "9", "[0.01, 2]"),
    (["--max-tokens", "0"], "INVALID_ARGUMENT", "sampling_params.max_tokens", "0", "[1, 4294967296)"),
    (["--seed", str(2**63)], "INVALID_ARGUMENT", "seed", str(2**63), "2^63"),
]


@pytest.mark.parametrize(("flags", "code", "field", "value", "limit"), REFUSALS)
async def test_an_error_names_field_value_and_limit(
    model: str, folder: Path, flags: list[str], code: str, field: str, value: str, limit: str
) -> None:
    async with cluster(model) as fake:
        found = await failed(folder, fake, *flags)
    assert (found["code"], found["field"]) == (code, field)
    assert value in found["value"]
    assert limit in found["limit"]
    assert field in found["message"]


async def test_an_error_says_when_to_come_back(model: str, folder: Path, tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    Path(secrets.path("clients.tokens")).write_text(f"client: {secrets.token('client')} max_requests=1\n")  # noqa: ASYNC240
    async with cluster(model, client=secrets.client, **secrets.settings) as fake, fake.stub() as stub:
        fake.node("d1").engine.step_ms = 100
        call = stub.Generate(generate_request("Hello", SamplingParams(max_tokens=400)), timeout=WAIT_S)
        await call.read()
        found = await failed(folder, fake, *flags_of(secrets))
        call.cancel()
    assert (found["code"], found["retry_after_s"]) == ("RESOURCE_EXHAUSTED", RETRY_S)


def flags_of(secrets: Secrets) -> tuple[str, ...]:
    return "--tls-ca", secrets.path("ca.pem"), "--token-file", secrets.path("client.token")


async def failed(folder: Path, fake: FakeCluster, *flags: str) -> Any:
    """Return the error that the example prints."""
    words = ("generate.mjs", "--router", fake.address.replace("127.0.0.1", "localhost"), *flags, "Hello")
    exit_code, _, errors = await printed("node", *words, where=folder, env=ENV)
    assert exit_code == 1
    return json.loads(errors)
