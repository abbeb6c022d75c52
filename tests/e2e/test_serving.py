"""What a user sees of the real cluster: streams, stops, parameters that matter, and slots that come back."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from corun import DeadlineError, FinishReason, SamplingParams
from corun.gateway.app import Gateway
from corun.gateway.config import GatewayConfig
from corun.processes import descendants
from corun.types import NodeRole
from tests.e2e.conftest import SLOTS, Cluster, ready
from tests.e2e.test_faults import stopped
from tests.machine import command_line, wait_for

pytestmark = pytest.mark.e2e

FREE_S = 60.0
"""Twice vLLM's lease of KV, which ends what nobody has read."""


def test_streams_and_stops(cluster: Cluster) -> None:
    """A stream comes in pieces that add up; a stop string ends the text before it; a stop token ends it and is kept."""
    params = SamplingParams(max_tokens=200, temperature=1.0, logprobs=True, ignore_eos=True)
    with cluster.client() as client:
        chunks = list(client.stream("Once upon a time", params, seed=1))
        whole = client.generate("Once upon a time", params, seed=1)
        free = client.generate("The girl", replace(params, max_tokens=40), seed=5)
        stop, token = free.text[10:14], free.token_ids[7]
        before = client.generate("The girl", replace(params, max_tokens=40, stop=stop), seed=5)
        until = client.generate("The girl", replace(params, max_tokens=40, stop_token_ids=[token]), seed=5)
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    assert len(whole.logprobs) == 200
    assert before.text == free.text[: free.text.index(stop)]
    assert until.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert (before.finish_reason, until.finish_reason) == (FinishReason.STOP, FinishReason.STOP)


async def test_streamed_chats_have_the_same_bits_alone_and_in_a_crowd(cluster: Cluster) -> None:
    openai = pytest.importorskip("openai")
    gateway = Gateway(GatewayConfig(port=0, router=cluster.address))
    await gateway.start()

    async def chat(client: Any, seed: int) -> tuple[str, list[tuple[str, str]]]:
        asked = {"messages": [{"role": "user", "content": "Tell me of the old clock."}], "max_completion_tokens": 40}
        stream = await client.chat.completions.create(model=name, seed=seed, stream=True, logprobs=True, **asked)
        choices = [event.choices[0] async for event in stream]
        assert choices[0].delta.role == "assistant"
        found = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in choices)
        return text, [(entry.token, entry.logprob.hex()) for entry in found]

    try:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0) as client:
            name = (await client.models.list()).data[0].id
            alone = [await chat(client, seed) for seed in range(4)]
            crowd = await asyncio.gather(*(chat(client, seed) for seed in range(2 * SLOTS)))
    finally:
        await gateway.stop()
    assert crowd[:4] == alone
    assert len({text for text, _ in crowd}) > SLOTS, "another seed gives another text"
    assert all(logprobs for _, logprobs in crowd)


def test_biases_and_penalties_move_what_is_drawn(cluster: Cluster) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with cluster.client() as client:
        plain = client.generate([70] * 20, greedy)
        banned = client.generate([70] * 20, replace(greedy, logit_bias={plain.token_ids[0]: -100.0}))
        forced = client.generate([70] * 20, replace(greedy, logit_bias={77: 100.0}))
        varied = client.generate([70] * 20, replace(greedy, repetition_penalty=2.0))
    assert plain.token_ids[0] not in banned.token_ids
    assert forced.token_ids == (77,) * 60
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))


CORNERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.01, 2),
    "top_p": (1e-9, 1),
    "top_k": (1, 2**31 - 1),
    "min_p": (0, 1),
    "min_tokens": (0, 6),
    "stop_token_ids": ((), range(64)),
    "ignore_eos": (False, True),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
    "logit_bias": ({0: -100, 5: 100, 511: 100}, dict.fromkeys(range(512), 100), dict.fromkeys(range(512), -100)),
}
"""Every parameter of which there can be too much, at both of its limits."""


def corners(count: int) -> list[SamplingParams]:
    """Each corner with the defaults, then mixed; always the same ones."""
    chosen: list[dict[str, Any]] = [{name: value} for name, values in CORNERS.items() for value in values]
    draw = random.Random(0)
    chosen += [{name: draw.choice(values) for name, values in CORNERS.items()} for _ in range(count)]
    return [SamplingParams(max_tokens=6, logprobs=True, **fields) for fields in chosen]


def test_no_legal_parameter_ends_an_engine_or_moves_a_bit_beside_it(cluster: Cluster) -> None:
    """Nor is anything else than finite numbers drawn."""
    beside = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True, logprobs=True)
    asked = corners(10)
    cores = [engine_core(cluster, name) for name in ("decode", "prefill")]
    with cluster.client() as client, ThreadPoolExecutor(SLOTS) as threads:
        alone = client.generate("Once upon a time", beside, seed=1)
        stream = threads.submit(client.generate, "Once upon a time", beside, seed=1)
        done = list(threads.map(lambda params: client.generate([5, 6, 7, 5], params, seed=2), asked))
        crowded = stream.result(60)
    assert (crowded.token_ids, crowded.logprobs) == (alone.token_ids, alone.logprobs)
    assert all(1 <= len(each.token_ids) <= 6 for each in done)
    assert all(math.isfinite(logprob) for each in done for logprob in each.logprobs)
    assert [engine_core(cluster, name) for name in ("decode", "prefill")] == cores


def test_clients_that_go_away_and_deadlines_free_slots_and_kv(cluster: Cluster) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)

    def leave_early(seed: int) -> None:
        with cluster.client() as client:
            stream = client.stream([5] * 200, params, seed=seed)
            next(stream)
            stream.close()

    clients = [threading.Thread(target=leave_early, args=(seed,)) for seed in range(2 * SLOTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    began = time.monotonic()
    with cluster.client() as late, pytest.raises(DeadlineError):
        late.generate("Once", replace(params, max_tokens=8000), timeout_s=1.0)
    assert time.monotonic() - began < 30  # Without the deadline it takes a minute or more.
    wait_for(lambda: idle(cluster), "all slots and KV are free again", FREE_S)
    with cluster.client() as again:  # And they work.
        assert len(again.generate("Once", replace(params, max_tokens=3)).token_ids) == 3


def idle(cluster: Cluster) -> bool:
    status = cluster.status()
    loads = {node.node.role: node.load for node in status.nodes}
    decode, prefill = loads[NodeRole.DECODE], loads[NodeRole.PREFILL]
    held = decode.leases + decode.used_kv_blocks + prefill.used_kv_blocks + prefill.queued_prompt_tokens
    return held + status.queued_samples == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_stopped_engine_is_noticed_in_seconds_and_comes_back(cluster: Cluster, name: str) -> None:
    """The core of an engine is stopped; its node goes on to answer, and says so. The sample ends with the same bits."""
    params = SamplingParams(max_tokens=900, temperature=1.0, ignore_eos=True, logprobs=True)
    prompt = [5] * 200
    with cluster.client() as client:
        whole = client.generate(prompt, params, seed=7)
        stream = client.stream(prompt, params, seed=7)
        tokens = [*next(stream).token_ids]
        stopped_at = time.monotonic()
        with stopped(engine_core(cluster, name)):
            wait_for(lambda: "its engine is stuck" in detail(cluster, name), "the stuck engine is known", 60)
            noticed_s = time.monotonic() - stopped_at
        wait_for(lambda: ready(cluster.status), "the engine is used again")
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(tokens) == whole.token_ids
    again_s = time.monotonic() - stopped_at - noticed_s
    print(f"{name}: noticed after {noticed_s:.1f} s, used again and done {again_s:.1f} s later")
    assert 5 <= noticed_s < 20  # 5 s, a second until the next question, and what a busy machine takes.
    wait_for(lambda: idle(cluster), "all slots and KV are free again", FREE_S)


def engine_core(cluster: Cluster, name: str) -> int:
    """The process of a node's engine core: vLLM names it so."""
    pids = descendants(cluster.processes.running[name].pid)
    (core,) = [pid for pid in pids if "EngineCore" in command_line(pid)]
    return core


def detail(cluster: Cluster, role: str) -> str:
    (status,) = [status for status in cluster.status().nodes if status.node.role.value == role]
    return status.detail
