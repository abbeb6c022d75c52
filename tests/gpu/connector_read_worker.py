"""The nodes' own workers, whose KV blocks can be filled, digested and read outside of any request.

Owns: one read as vLLM's connector makes it, timed inside the worker. Must not know: which reads are of interest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from corun.node.vllm.selftest import Stepper
from decode_node.worker import FixedShapeWorker
from prefill_node.worker import PrefillWorker


class _Blocks:
    """Access to the contents of KV blocks."""

    def num_kv_blocks(self) -> int:
        return Stepper(self).num_blocks

    def fill_kv(self, blocks: Sequence[int], seed: int) -> None:
        """Random bits, others in every rank."""
        with torch.inference_mode():
            Stepper(self).scramble(blocks, 1000 * seed + self.rank)  # type: ignore[attr-defined]

    def digest_kv(self, blocks: Sequence[int]) -> list[int]:
        """One digest for each block; waits for the device."""
        with torch.inference_mode():
            return [int(digest) for digest in get_kv_transfer_group()._digests(blocks)]


class FilledPrefillWorker(_Blocks, PrefillWorker):
    pass


class ReadingDecodeWorker(_Blocks, FixedShapeWorker):
    def read_kv(
        self, engine_id: str, theirs: Sequence[int], ours: Sequence[int], repeats: int, pause_s: float, limit_s: float
    ) -> dict[str, Any]:
        """Reads a connected peer's blocks once and then `repeats` times, fewer if `limit_s` is over before.

        Before each read it waits for `pause_s`: handoffs come one by one, not back to back.

        Returns:
            Bytes and descriptors of a read, and the seconds of each: to post it, and from there to its end.
        """
        read = PreparedRead(get_kv_transfer_group().connector_worker, engine_id, theirs, ours)
        deadline = time.monotonic() + limit_s
        times = [read.run(deadline)]
        while len(times) <= repeats and time.monotonic() < deadline:
            time.sleep(pause_s)
            times.append(read.run(deadline))
        return {**read.size, "post_s": [post for post, _ in times], "wait_s": [wait for _, wait in times]}


class PreparedRead:
    """A read through the connector's own descriptor lists, as nixl/pull_worker.py makes it (`_read_blocks`)."""

    def __init__(self, worker: Any, engine_id: str, theirs: Sequence[int], ours: Sequence[int]) -> None:
        info = worker.transfer_topo.get_engine_info(engine_id)
        splits = worker._physical_blocks_per_logical_kv_block, info.remote_physical_blocks_per_logical
        self._agent = worker.nixl_wrapper
        self._local = worker.src_xfer_handles_by_block_size[info.remote_block_size]
        self._remote = worker.dst_xfer_side_handles[engine_id][worker.tp_rank]
        self._ours = _descriptors(worker, worker.engine_id, ours, splits[0])
        self._theirs = _descriptors(worker, engine_id, theirs, splits[1])
        self.size: dict[str, int] = {"descriptors": len(self._ours)}
        """With the bytes, and the descriptors that NIXL made of ours, after the first read."""

    def run(self, deadline: float) -> tuple[float, float]:
        """Seconds to post the read, and from there to its end: polled without a pause.

        Raises:
            TimeoutError: it did not end before the deadline (monotonic).
            RuntimeError: the transfer failed.
        """
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", self._local, self._ours, self._remote, self._theirs)
        try:
            state = self._agent.transfer(handle)
            posted = time.perf_counter()
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a read of {len(self._ours)} descriptors did not end in time")
                state = self._agent.check_xfer_state(handle)
            ended = time.perf_counter()
            if state != "DONE":
                raise RuntimeError(f"a read ended as {state}")
            seen = self._agent.get_xfer_telemetry(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        self.size |= {"bytes": int(seen.totalBytes), "merged_descriptors": int(seen.descCount)}
        return posted - began, ended - posted


def _descriptors(worker: Any, engine_id: str, blocks: Sequence[int], split: int) -> Any:
    """Numbers of the blocks' descriptors in an engine's list; split: blocks of the kernel in one of vLLM's."""
    (kernel_blocks,) = worker._logical_to_kernel_block_ids((list(blocks),), split)
    return worker._compute_desc_ids((kernel_blocks,), worker.dst_num_blocks[engine_id], None, split)
