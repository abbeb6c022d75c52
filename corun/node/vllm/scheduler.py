"""The base of both schedulers: it reserves KV for whole sequences, has blocks zeroed, can show the stock scheduler a
part of the queue, and ends with the node. Must not know: prefill, decode, connectors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from corun.node.vllm.gpu_lock import lock_file
from corun.node.watchdog import end_with_parent
from corun.node.workarounds import busy_wait

SWITCH_S = 0.0001
"""How long a thread of the engine's process may keep Python's interpreter while another waits for it, in seconds.

A step gives the interpreter away a few dozen times. While the engine takes in samples of long prompts in a thread,
30 such times took 156 ms with Python's 5 ms, and 12 ms with this, for a seventh of the speed of taking in.
"""


class ZeroedKVCacheConfig(KVCacheConfig):  # type: ignore[misc]
    """The config of a cache whose blocks are zeroed each time a request gets them, except blocks read from a peer.

    vLLM itself does this only for the neighbours of Mamba layers. Its CPU attention always needs it: it multiplies the
    values behind a sequence's end in the last block by 0, and a NaN that an overflowing model left there stays NaN. KV
    from a peer comes in whole blocks, which were zeroed where the prompt was computed. FlashAttention loads no value
    behind a sequence's end.
    """

    needs_kv_cache_zeroing = True


class ReservingScheduler(AsyncScheduler):  # type: ignore[misc]
    """A vLLM scheduler that counts prompt + max_tokens of every admitted request as used KV.

    It subclasses `AsyncScheduler`, because vLLM turns async scheduling off for any other custom scheduler
    (`config/vllm.py`).
    """

    scheduler_config: Any
    waiting: Any  # a vLLM RequestQueue
    running: list[Request]

    def __init__(self, *args: Any, kv_cache_config: Any, **kwargs: Any) -> None:
        if current_platform.is_cpu():
            kv_cache_config = ZeroedKVCacheConfig(**vars(kv_cache_config))
            busy_wait.nap_instead()
        super().__init__(*args, kv_cache_config=kv_cache_config, **kwargs)
        self.refused: list[Request] = []
        """The requests that have ended with an error since the last output, because they came."""
        # The scheduler is the only code of ours that always runs in the engine's first process.
        end_with_parent()
        sys.setswitchinterval(SWITCH_S)

    def add_request(self, request: Request) -> None:
        """Add a request. End one whose id is still known with an error: vLLM's assertion would end the engine."""
        if request.request_id in self.requests:
            self.refused.append(request)
        else:
            super().add_request(request)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Tell of requests that were refused, too."""
        made: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        for request in self.refused:
            ended = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            made.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        self.refused.clear()
        return made

    def gpu_lock(self) -> Path | None:
        """Return the file with which the engines on this GPU take turns; None if there is no GPU to share."""
        if not current_platform.is_cuda() or self.vllm_config.kv_transfer_config is None:
            return None
        return lock_file(current_platform.get_device_uuid(0))

    def free_blocks(self, admitted: Iterable[Request]) -> int:
        """Return the number of free KV blocks that are not reserved for the `admitted` requests' remaining tokens."""
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free - sum(map(self.reserved_for, admitted))

    def blocks_of(self, request: Request) -> int:
        """Return the number of KV blocks of the whole sequence, over all KV cache groups."""
        tokens: int = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return -(-tokens // int(self.block_size)) * len(self.kv_cache_config.kv_cache_groups)

    def reserved_for(self, request: Request) -> int:
        """Return the number of KV blocks that a request may still take."""
        held = sum(map(len, self.kv_cache_manager.get_blocks(request.request_id).blocks))
        return max(0, self.blocks_of(request) - held)

    @contextmanager
    def showing_waiting(self, shown: Iterable[Request]) -> Iterator[None]:
        """Hide all waiting requests except `shown` from the stock scheduler; the order of the queue is kept."""
        waiting = self.waiting
        self.waiting = create_request_queue(self.policy)
        for request in shown:
            waiting.remove_request(request)
            self.waiting.add_request(request)
        try:
            yield
        finally:
            for request in reversed(list(self.waiting)):
                waiting.prepend_request(request)
            self.waiting = waiting
