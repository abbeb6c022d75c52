"""How a colocated node's settings and KV blocks are shared out between its two sides.

Owns: the keys under which the engine's processes find their shares, and the sizes. Must not know: vLLM, gRPC.
"""

from __future__ import annotations

SLOTS, BUDGET, PLACES, BUCKETS = "slots", "prompt_budget", "prompt_places", "prompt_buckets"
"""The keys in the connector's extra configuration, where our schedulers and workers read their settings: the decode
slots, the most prompt tokens of a step, the most prompts that run, and the lengths of steps that have a graph."""
PROMPTS_SHARE = 8
"""The part of all KV blocks that is the prompts' own, as its denominator.

A prompt holds its blocks from its first step until they are copied to its sample, which takes a few steps, and a sample
holds its own for hundreds. Prompts may not use the samples' blocks: a lease promises these before the prompt runs."""


def prompt_blocks(kv_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return how many of `kv_blocks` are for prompts: an eighth, at least those of the longest one, at most a half."""
    longest = -(-max_model_len // block_size)
    return min(max(kv_blocks // PROMPTS_SHARE, longest), kv_blocks // 2)
