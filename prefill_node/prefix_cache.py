"""Which KV of earlier prompts a prompt may take from vLLM's prefix cache, and which of its own it leaves there.

Owns: the length of a hit, which ends where logits are needed, and who may read and fill the cache. Must not know:
stamps, connectors, gRPC, and vLLM's classes (it is given a `KVCacheManager` and requests).

A prompt gets the KV that it would have computed itself. For whole chunks this follows from the contract: the chunks of
a prompt depend on its own length alone, so all longer prompts that begin alike compute the same whole chunks. The rest
of a prompt is a shorter chunk of its own, and its blocks are for others only where a certificate says that a prompt may
be cut anywhere. The salt of a prompt (`prefill_node.engine`) names its scope and what it may make use of. So nothing
that was computed with a freedom is found by a prompt without it, and no client learns from the time of an answer what
another client has asked.
"""

from __future__ import annotations

import math
from typing import Any

from corun.node.kv.handle import CACHED, FREEDOMS_PARAM, TARGETS_PARAM
from corun.types import Freedom


class PrefixCache:
    """Stands before a `KVCacheManager` (v1/core/kv_cache_manager.py), and decides what each prompt may read and fill.

    chunk_size: the length of the contract's chunks, in tokens; block_size: that of a KV block.
    """

    def __init__(self, manager: Any, *, chunk_size: int, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._whole_chunks = math.lcm(chunk_size, block_size)
        self._find, self._keep = manager.get_computed_blocks, manager.coordinator.cache_blocks
        manager.get_computed_blocks, manager.coordinator.cache_blocks = self.get_computed_blocks, self.cache_blocks

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """Return the cached blocks that a prompt takes, their number of tokens, and vLLM's own third value."""
        if not (unit := self._unit(request)):
            return self._manager.empty_kv_cache_blocks, 0, 0
        found, num_found, boundary = self._find(request)
        num_taken = min(num_found, request.num_prompt_tokens - _last_computed(request)) // unit * unit
        taken = tuple(list(group[: num_taken // self._block_size]) for group in found.blocks)
        return self._manager.create_kv_cache_blocks(taken), num_taken, boundary

    def may_find(self, request: Any) -> bool:
        """Return whether the prompt is long enough to take cached KV, if there is any for it."""
        unit = self._unit(request)
        return bool(0 < unit <= request.num_prompt_tokens - _last_computed(request))

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Make the blocks findable that later prompts may take, and never one that holds a drawn token."""
        if unit := self._unit(request):
            self._keep(request, min(num_computed_tokens, request.num_prompt_tokens // unit * unit))

    def _unit(self, request: Any) -> int:
        """Return the number of tokens of which a hit, and what is left for later hits, are multiples; 0 if the prompt
        may not use the cache."""
        freedoms = (request.kv_transfer_params or {}).get(FREEDOMS_PARAM, ())
        if CACHED not in freedoms or not request.cache_salt:
            return 0
        return self._block_size if Freedom.CHUNKS in freedoms else self._whole_chunks


def _last_computed(request: Any) -> int:
    """Return how many of a prompt's last tokens are always computed: those whose logits score a token, and at least
    one, since its step draws a token and ends the prefill."""
    return len((request.kv_transfer_params or {}).get(TARGETS_PARAM, ())) or 1
