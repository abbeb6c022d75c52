"""Runs prompts on stock vLLM, alone and all at once, and prints how many agree bit by bit.

`python -m tests.e2e.stock MODEL [--cases FILE]`. This is the control of the determinism tests: nothing of ours, and on
a CPU two threads with split-KV on. It must differ; if it did not, those tests would prove nothing on this machine.
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


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Prompts that share a seed and parameters."""

    prompts: list[list[int]]
    seed: int = 42
    temperature: float = 0.6
    max_tokens: int = OUTPUT_TOKENS

    @classmethod
    def read(cls, path: Path) -> Cases:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def built_in(cls) -> Cases:
        draw = random.Random(1)
        return cls(prompts=[[draw.randrange(3, 500) for _ in range(draw.randrange(400, 1200))] for _ in range(PROMPTS)])


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Stock vLLM on prompts alone and all at once."""

    model: tyro.conf.Positional[str]
    cases: Path | None = None
    """Prompts, seed, temperature and max_tokens as JSON; without it, 12 prompts for the tiny model."""
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    max_model_len: int = 8192


def outputs(llm: Any, prompts: list[list[int]], params: Any) -> list[bytes]:
    """Each prompt's token ids and sampled logprobs, as bytes; half of them are tokens."""
    found = []
    for done in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
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
    cases = Cases.built_in() if options.cases is None else Cases.read(options.cases)
    began = time.monotonic()
    llm = engine(options)
    ready_s = time.monotonic() - began
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=cases.temperature,
        seed=cases.seed,
        max_tokens=cases.max_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    alone = [outputs(llm, [prompt], params)[0] for prompt in cases.prompts]
    crowd = outputs(llm, cases.prompts, params)
    pairs = list(zip(alone, crowd, strict=True))
    result = {
        "prompts": len(pairs),
        "equal": sum(a == b for a, b in pairs),
        "tokens_equal": sum(a[: len(a) // 2] == b[: len(b) // 2] for a, b in pairs),
        "start_s": round(ready_s, 1),
    }
    print(json.dumps(result), flush=True)


def result_of(output: str) -> dict[str, Any]:
    """The result among vLLM's own output. Raises ValueError if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"prompts"'):
            found: dict[str, Any] = json.loads(line)
            return found
    raise ValueError("stock vLLM printed no result")


if __name__ == "__main__":
    main(tyro.cli(Stock))
