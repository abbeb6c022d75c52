"""Digests of the contents of KV blocks, computed on the device that holds them and equal on both sides of a transfer.

Owns: the digest's definition. Must not know: vLLM, NIXL, what a digest is compared with.

A block's bytes are read as int32 words, over all memory regions (layers). Each word is multiplied by an odd weight that
depends on its place, and the products are added in int64 with wraparound. The order of summation cannot change the sum.
Every flipped bit changes it, and so do words, layers or blocks that changed places. It finds accidents, not forgeries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

MAX_WORDS = 4 * 1024 * 1024
"""The most KV words to take digests of at a time. So temporary tensors stay below 100 MB for any prompt."""
MAX_COPIED_WORDS = 16 * 1024 * 1024
"""The most KV words to copy at a time, for the same reason. Each part costs the engine's thread four calls
into torch: prompts of 2048 tokens took it 0.9 ms each in parts of a quarter, and other threads may take its turn."""


class KvDigest:
    """Computes digests over `regions`, each [blocks, words] int32: block b is row b of every region."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        self._regions = list(regions)
        self._region_weights: list[int] = weights(len(regions)).tolist()
        self._weights: dict[int, torch.Tensor] = {}  # number of words -> weights, on the regions' device

    def of(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return one digest for each block, never 0. This waits for the device."""
        ids = torch.tensor(list(blocks), dtype=torch.int64, device=self._regions[0].device)
        widest = max(region.shape[1] for region in self._regions)
        parts = [self._of(part) for part in ids.split(max(1, MAX_WORDS // widest))]
        digests = torch.cat(parts).cpu().numpy().view(np.uint64)
        return np.where(digests == 0, np.uint64(1), digests)

    def _of(self, ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        for region, weight in zip(self._regions, self._region_weights, strict=True):
            count = region.shape[1]
            if count not in self._weights:
                self._weights[count] = torch.from_numpy(weights(count)).to(region.device)
            total += (region[ids].to(torch.int64) * self._weights[count]).sum(dim=1) * weight
        return total


def weights(count: int) -> npt.NDArray[np.int64]:
    """Return `count` odd weights that look random: the bits of a uint64 each, made by splitmix64."""
    x = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.int64] = ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return found


def region_words(memory: torch.Tensor, address: int, block_bytes: int, num_blocks: int) -> torch.Tensor:
    """Return the registered region at `address` as [num_blocks, words] int32; `memory` is a tensor in the same storage.
    Raises ValueError if the region does not consist of whole words inside this storage."""
    storage = memory.untyped_storage()
    start = address - storage.data_ptr()
    if start < 0 or start % 4 or block_bytes % 4 or start + block_bytes * num_blocks > storage.nbytes():
        raise ValueError(f"{num_blocks} blocks of {block_bytes} bytes at byte {start} of {storage.nbytes()}")
    view = torch.empty(0, dtype=torch.int32, device=memory.device)
    words = block_bytes // 4
    return view.set_(storage, start // 4, (num_blocks, words), (words, 1))


def copy_blocks(regions: Sequence[torch.Tensor], source: Sequence[int], target: Sequence[int]) -> None:
    """Copy blocks inside each region, on the device's current stream. The targets must differ. What is copied from a
    block that is a target, too, is not defined."""
    device = regions[0].device
    pairs = torch.tensor([list(source), list(target)], dtype=torch.int64, pin_memory=device.type == "cuda")
    pairs = pairs.to(device, non_blocking=True)  # A copy from unpinned memory would wait for the steps in flight.
    for region in regions:
        for part in pairs.split(max(1, MAX_COPIED_WORDS // region.shape[1]), dim=1):
            region[part[1]] = region[part[0]]
