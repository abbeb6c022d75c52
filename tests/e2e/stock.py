"""Runs prompts on stock vLLM, alone and all at once, and prints how many agree bit by bit.

`python -m tests.e2e.stock MODEL`. This is the control of the determinism tests: two threads, split-KV on, nothing of
ours. It must differ; if it did not, those tests would prove nothing on this machine.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
from typing import Any

PROMPTS = 12
OUTPUT_TOKENS = 24


def outputs(llm: Any, prompts: list[list[int]], params: Any) -> list[bytes]:
    """Each prompt's token ids and sampled logprobs, as bytes."""
    found = []
    for done in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        tokens = done.outputs[0].token_ids
        logprobs = [entry[token].logprob for entry, token in zip(done.outputs[0].logprobs, tokens, strict=True)]
        found.append(struct.pack(f"<{len(tokens)}I{len(logprobs)}f", *tokens, *logprobs))
    return found


def main(model: str) -> None:
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_ATTN_SPLIT_KV": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=2**30, max_num_seqs=32)
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(400, 1200))] for _ in range(PROMPTS)]
    params = SamplingParams(
        temperature=0.6, seed=42, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    alone = [outputs(llm, [prompt], params)[0] for prompt in prompts]
    crowd = outputs(llm, prompts, params)
    equal = sum(a == b for a, b in zip(alone, crowd, strict=True))
    print(json.dumps({"prompts": PROMPTS, "equal": equal}))


if __name__ == "__main__":
    main(sys.argv[1])
