"""How a colocated node's KV blocks and places are shared out between its two sides.

Owns: the prompts' part of the blocks, and the keys in the connector's extra configuration, where the engine's processes
find what vLLM's own settings do not tell. All other shares follow from the slots. Must not know: vLLM, gRPC.
"""

from __future__ import annotations

SLOTS, BUCKETS = "slots", "prompt_buckets"
"""The keys of the number of decode slots, and of the lengths of prefill steps that have a graph."""
PROMPTS_SHARE = 8
"""The part of all KV blocks that is the prompts' own, as its denominator.

A prompt holds its blocks from its first step until they are copied to its sample, which takes a few steps, and a sample
holds its own for hundreds. Prompts may not use the samples' blocks: a lease promises these before the prompt runs."""


def prompt_blocks(kv_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return how many of `kv_blocks` are for prompts: an eighth, at least those of the longest one, at most a half."""
    longest = -(-max_model_len // block_size)
    return min(max(kv_blocks // PROMPTS_SHARE, longest), kv_blocks // 2)
