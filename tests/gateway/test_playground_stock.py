"""The playground beside real stock vLLM: the browser calls vLLM's own server, as for a user who has one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corun.models import tiny
from corun_bench.children import Processes
from tests.browser import browser, needs_chromium
from tests.e2e.stock import on_a_cpu
from tests.gateway.test_playground import click, column, ended, fill, hexes, playground
from tests.machine import free_port, wait_for
from tests.probing import probe

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 240.0
PROMPT = "Once upon a time there was a harbour"
SEED = 4
TOKENS = 24


async def answer_of(url: str) -> Any:
    """Return vLLM's own answer to the page's request, alone."""
    body = {"model": "stock", "prompt": PROMPT, "seed": SEED, "max_tokens": TOKENS, "temperature": 0.8, "logprobs": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/completions", json=body) as response:
        return await response.json()


@needs_chromium
async def test_real_stock_vllm_beside_the_cluster(model: str, tmp_path: Path) -> None:
    """Whether bits part is the processor's matter: on some, stock vLLM differs in a crowd (tests/e2e/test_control.py).
    Whatever the page shows of a run alone is what vLLM says."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    flags = ("--model", str(tiny.ensure()), "--served-model-name", "stock", "--port", str(port), "--host", "127.0.0.1")
    engine = ("--enforce-eager", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(2**30))
    environment = {**os.environ, **on_a_cpu(), "HF_HUB_OFFLINE": "1"}

    def answers() -> bool:
        processes.check()
        return probe(port, "/health") == 200

    with Processes(tmp_path) as processes:
        processes.start("stock", "vllm.entrypoints.openai.api_server", *flags, *engine, env=environment)
        await asyncio.to_thread(wait_for, answers, "stock vLLM answers", START_S)
        answer = await answer_of(url)
        async with browser() as chromium, playground(model, chromium) as (fake, _, page):
            await click(page, "[value=foreign]")
            await click(page, "[value=long]")  # Stock vLLM forgets seeds beside them, on a CPU.
            await fill(page, url=url, prompt=PROMPT, seed=SEED, max_tokens=TOKENS, temperature=0.8, size=8)
            await click(page, "#start")
            verdict = await ended(page, "crowd")
            assert verdict.startswith((f"Every bit agrees: {TOKENS} tokens", "They part at token ")), verdict
            values = answer["choices"][0]["logprobs"]["token_logprobs"]
            script = f"import('/page/experiment.js').then(made => {values}.map(value => made.bitsOf(value)))"
            alone, crowd = hexes(await column(page, "alone")), hexes(await column(page, "crowd"))
            assert alone == await page.evaluate(script)
            assert (alone == crowd) == verdict.startswith("Every bit agrees")
            assert not any(node.drawn_tokens for node in fake.nodes if node.info.slots)
