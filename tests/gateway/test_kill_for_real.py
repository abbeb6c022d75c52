"""`corun up` over real Ray, router, gateway and processes: a client has the node killed that runs its stream. Only the
engines are fake."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corun.testing.model import write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

TOML = """
[pools.main]
model = "model"
[pools.main.router]
port = 0
share_kv = false  # The fakes keep KV as a file, which has one reader.
audit_fraction = 0
[pools.main.decode]
replicas = 2
slots = 8
[pools.main.gateway]
port = 0
allow_kills = true
"""
UP = """
import sys
from corun.config.cluster_file import read
from corun.launch import run
from corun.launch.members import MODULES
fakes = dict.fromkeys(("prefill", "decode"), "tests.fleet.nodes")
sys.exit(run(read("cluster.toml"), log_dir="logs", modules={**MODULES, **fakes}))
"""
WATCHED = {"prompt": "Once upon a time", "max_tokens": 400, "seed": 1, "logprobs": 0, "stream": True}


class Up:
    """A `corun up` and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    async def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in what it has said so far or says next."""
        assert self.process.stdout is not None
        while (found := re.search(pattern, self.said, re.MULTILINE)) is None:
            line = await asyncio.wait_for(self.process.stdout.readline(), 120)
            assert line, self.said
            self.said += line.decode()
        return found


@asynccontextmanager
async def up(directory: Path) -> AsyncIterator[Up]:
    (directory / "model").mkdir()
    write_tokenizer(directory / "model")
    (directory / "model" / "config.json").write_text("{}")
    (directory / "cluster.toml").write_text(TOML)
    pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", UP, cwd=directory, **pipes)
    try:
        yield Up(process)
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), 120)


async def streamed(session: aiohttp.ClientSession, drawn: asyncio.Event, **fields: Any) -> tuple[list[Any], Any]:
    """Return the token ids with their log probabilities, and the receipt. Set `drawn` after a few tokens."""
    found: list[Any] = []
    async with session.post("/v1/completions", json={**WATCHED, "return_token_ids": True, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                (choice,) = event["choices"]
                found += zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
                receipt = choice.get("corun", {}).get("receipt")
                if len(found) > 8:
                    drawn.set()
    return found, receipt


async def refused(session: aiohttp.ClientSession) -> str:
    async with session.get("/playground/kill") as answer:
        return str((await answer.json())["refused"])


async def test_a_killed_node_is_started_again_and_its_stream_has_the_same_bits(tmp_path: Path) -> None:
    async with up(tmp_path) as running:
        url = (await running.wait_for(r"^http: (\S+)/v1$"))[1]
        async with aiohttp.ClientSession(url) as session:
            assert await refused(session) == ""
            alone, receipt = await streamed(session, asyncio.Event())
            drawn = asyncio.Event()
            stream = asyncio.ensure_future(streamed(session, drawn, request_id="mine"))
            await asyncio.wait_for(drawn.wait(), 60)
            async with session.post("/playground/kill", json={"request_id": "mine"}) as answer:
                killed = (await answer.json())["killed"]
            assert re.search("is not in use yet|was killed a moment ago", await refused(session))
            tokens, other = await stream
            assert (tokens, other["output_digest"]) == (alone, receipt["output_digest"])
            assert other["decode_node"]["node_id"] != killed
            await running.wait_for(rf"killing {killed}: a client of the gateway asked for it$")
            await running.wait_for(rf"{killed}: waiting: killed on request after \d+ s")
            await running.wait_for(rf"{killed}: process \d+, start 2$")
