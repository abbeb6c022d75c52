"""Runs prompts on stock vLLM, alone and all at once, and prints how many agree bit by bit.

`python -m tests.e2e.stock MODEL [--cases FILE]` prints a JSON line for each set of cases. This is the control of the
determinism tests: nothing of ours, and on a CPU two threads with split-KV on. It must differ; if it did not, those
tests would prove nothing on this machine.
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from corun.node.vllm.start import vllm_distribution

PROMPTS = 12
OUTPUT_TOKENS = 24
BATCH = 32
FOR_ALL: dict[str, Any] = {"ignore_eos": True, "logprobs": 0, "detokenize": False}
"""What vLLM's `SamplingParams` is given for every case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, its seed, and what vLLM's `SamplingParams` is given for it."""

    prompt: list[int]
    seed: int
    params: dict[str, Any]


Sets = dict[str, list[Case]]
"""Cases that run together, by what they show."""


def read(path: Path) -> Sets:
    return {name: [_read(**case) for case in cases] for name, cases in json.loads(path.read_text()).items()}


def _read(prompt: list[int], seed: int, params: dict[str, Any]) -> Case:
    """Return a case as it was before JSON, whose keys are strings."""
    if biases := params.get("logit_bias"):
        params = {**params, "logit_bias": {int(token): bias for token, bias in biases.items()}}
    return Case(prompt=prompt, seed=seed, params=params)


def built_in() -> Sets:
    draw, params = random.Random(1), {"temperature": 0.6, "max_tokens": OUTPUT_TOKENS}
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(400, 1200))] for _ in range(PROMPTS)]
    return {f"{PROMPTS} prompts": [Case(prompt=prompt, seed=42, params=params) for prompt in prompts]}


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Stock vLLM on prompts alone and all at once."""

    model: tyro.conf.Positional[str]
    cases: Path | None = None
    """Sets of cases as JSON; without it, 12 prompts for the tiny model."""
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    max_model_len: int = 8192


def outputs(llm: Any, cases: list[Case]) -> list[bytes]:
    """Each case's token ids and sampled logprobs, as bytes; half of them are tokens."""
    from vllm import SamplingParams

    params = [SamplingParams(**case.params, **FOR_ALL, seed=case.seed) for case in cases]
    found = []
    for done in llm.generate([{"prompt_token_ids": case.prompt} for case in cases], params, use_tqdm=False):
        tokens = done.outputs[0].token_ids
        logprobs = [entry[token].logprob for entry, token in zip(done.outputs[0].logprobs, tokens, strict=True)]
        found.append(struct.pack(f"<{len(tokens)}I{len(logprobs)}f", *tokens, *logprobs))
    return found


def on_a_cpu() -> dict[str, str]:
    """The environment of stock vLLM on a CPU."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1"}
    return {**runner, "VLLM_CPU_ATTN_SPLIT_KV": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}


def engine(options: Stock) -> Any:
    """vLLM as it comes, but for prefix caching: a hit would make the second run reuse what the first computed."""
    settings: dict[str, Any] = {"model": options.model, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    if vllm_distribution().startswith("vllm-cpu"):
        os.environ |= on_a_cpu()
        settings |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**30, "max_num_seqs": BATCH}
        settings["max_num_batched_tokens"] = 2**15  # chunked prefill of a seeded request crashes on a CPU
    else:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # the runner that vLLM would choose
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        settings |= {"gpu_memory_utilization": options.gpu_memory_utilization, "max_model_len": options.max_model_len}
        settings["tensor_parallel_size"] = options.tensor_parallel_size
    from vllm import LLM

    return LLM(**settings)


def main(options: Stock) -> None:
    sets = built_in() if options.cases is None else read(options.cases)
    began = time.monotonic()
    llm = engine(options)
    print(json.dumps({"start_s": round(time.monotonic() - began, 1)}), flush=True)
    for name, cases in sets.items():
        began = time.monotonic()
        alone = [outputs(llm, [case])[0] for case in cases]
        pairs = list(zip(alone, outputs(llm, cases), strict=True))
        result = {
            "set": name,
            "prompts": len(pairs),
            "equal": sum(a == b for a, b in pairs),
            "tokens_equal": sum(a[: len(a) // 2] == b[: len(b) // 2] for a, b in pairs),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(result), flush=True)


def results_of(output: str) -> dict[str, dict[str, Any]]:
    """Return the result of each set, by its name, among vLLM's own output."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"set"')]
    return {result.pop("set"): result for result in found}


if __name__ == "__main__":
    main(tyro.cli(Stock))
