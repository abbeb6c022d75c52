"""The room of a decode node: how many samples it takes, and how many KV blocks they need.

The node grants room by these rules, and routers estimate it by the same ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


def places(slots: int) -> int:
    """Return the most leases of a decode node with `slots` slots: one for each slot, and a line of a quarter as many.

    A sample takes a slot when its KV has arrived. The line holds the samples whose prompts are computed and read while
    the slots work. With a quarter, 64 and more slots hardly ever stand idle in the simulation of
    `tests/decode_node/test_line.py`; with an eighth they do. The line is also the most samples of lower priority that
    one of high priority finds ahead of it on its node, so it is short.
    """
    return slots + slots // 4


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of KV blocks, of `block_size` tokens each, that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def shared_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Return the number of a prompt's blocks that its samples can share: the whole blocks before the last position,
    whose KV decode computes again."""
    return (num_prompt_tokens - 1) // block_size


@dataclass(frozen=True, slots=True)
class SampleBlocks:
    """The KV blocks of one sample, prompt and output."""

    own: int
    """The number of blocks of this sample alone."""
    shared: int = 0
    """The number of blocks that it shares with the other samples of its prompt."""
    share_key: str = ""
    """The key of the samples with which it shares blocks; empty if it shares none."""

    @classmethod
    def of(cls, num_prompt_tokens: int, max_tokens: int, block_size: int, share_key: str = "") -> SampleBlocks:
        """Return the blocks of a sample."""
        shared = shared_blocks(num_prompt_tokens, block_size) if share_key else 0
        return cls(blocks_needed(num_prompt_tokens + max_tokens, block_size) - shared, shared, share_key)

    @property
    def group(self) -> tuple[str, int]:
        """The key under which the shared blocks are counted."""
        return self.share_key, self.shared


class UsedBlocks:
    """The KV blocks of all samples on a node. Shared blocks count once, while any of their samples is there."""

    def __init__(self) -> None:
        self._groups: Counter[tuple[str, int]] = Counter()  # The number of samples.

    def needed(self, blocks: SampleBlocks) -> int:
        """Return by how many blocks one more sample would raise the number of used blocks."""
        return blocks.own + (0 if blocks.group in self._groups else blocks.shared)

    def add(self, blocks: SampleBlocks) -> int:
        """Add a sample. Return by how many blocks it raises the number of used blocks."""
        needed = self.needed(blocks)
        self._groups[blocks.group] += 1
        return needed

    def remove(self, blocks: SampleBlocks) -> int:
        """Remove a sample. Return how many blocks become free."""
        self._groups[blocks.group] -= 1
        if not self._groups[blocks.group]:
            del self._groups[blocks.group]
        return self.needed(blocks)
