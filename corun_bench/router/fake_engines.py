"""Engines that compute nothing, for measuring a router. Must not know services or the network.

A fake decode engine emits steps at a fixed rate, with a row for every running request, and records the time of each
step. The log probability of a row says which step of which node it is, so that a client can tell how long its token was
on the way. The tokens mean nothing.
"""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Callable, Sequence

from corun.node.kv.handle import bound
from corun.receipt import prompt_digest
from corun.types import FinishReason, KvHandle, NixlEndpoint, NodeRef
from decode_node.service import DecodeRequest, StepRow

MAX_NODES = 16
"""The most decode nodes that log probabilities can tell apart."""
BLOCK_SIZE = 16
FIRST_TOKEN, NUM_TOKENS = 256, 128
"""The first of the token ids that are drawn, and their number: they are words of the built-in tiny model."""


class FakePrefillEngine:
    """A prefill engine that claims at once to hold the KV of a prompt."""

    def __init__(self, ref: NodeRef) -> None:
        self._ref = ref
        self.endpoint = NixlEndpoint(
            engine_id=f"fake-{ref.generation}", host="127.0.0.1", port=1, tp_size=1, stamp_addresses=(4096,)
        )

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        handle = KvHandle(
            prefill_node=self._ref,
            engine_id=self.endpoint.engine_id,
            request_id=request_id,
            block_ids=(tuple(range(-(-len(prompt_token_ids) // BLOCK_SIZE))),),
            host=self.endpoint.host,
            port=self.endpoint.port,
            tp_size=self.endpoint.tp_size,
            num_tokens=len(prompt_token_ids),
            prompt_digest=prompt_digest(prompt_token_ids),
            reader=reader,
        )
        return bound(handle)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        return False

    def holds(self, request_id: str) -> bool:
        return False

    async def release(self, request_id: str, reader: str) -> None:
        """Do nothing: there is no KV to drop."""

    async def held_kv_blocks(self) -> int:
        return 0


class FakeDecodeEngine:
    """A decode engine that emits a row for every running request each `step_s`, whatever was asked for."""

    def __init__(self, index: int, step_s: float) -> None:
        self.times = array.array("d")
        """The time at which each step was emitted, on the monotonic clock."""
        self.on_step: Callable[[Sequence[StepRow]], None] = lambda _: None
        self._index = index
        self._step_s = step_s
        self._left: dict[str, int] = {}  # Tokens to come, by request id.

    async def start(self, request: DecodeRequest) -> None:
        self.add(request.request_id, request.params.max_tokens)

    def add(self, request_id: str, num_tokens: int) -> None:
        self._left[request_id] = num_tokens

    async def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    async def connect(self, peer: NixlEndpoint) -> None:
        """Do nothing: there is nothing to connect."""

    async def tick(self) -> None:
        """Emit steps until cancelled. A late step does not delay the steps after it."""
        began, number = time.monotonic(), 0
        while True:
            number += 1
            await asyncio.sleep(max(0.0, began + number * self._step_s - time.monotonic()))
            self.step()

    def step(self) -> None:
        """Emit one step now."""
        step = len(self.times)
        token_id, logprob = FIRST_TOKEN + step % NUM_TOKENS, step_code(self._index, step)
        rows, left = [], self._left
        for request_id, num_left in list(left.items()):
            if num_left == 1:
                del left[request_id]
                rows.append(StepRow(request_id, token_id, logprob, FinishReason.LENGTH))
            else:
                left[request_id] = num_left - 1
                rows.append(StepRow(request_id, token_id, logprob))
        self.times.append(time.monotonic())
        self.on_step(rows)


def step_code(index: int, step: int) -> float:
    """Return the log probability of all tokens of one step of one node, exact in fp32 for a million steps."""
    return -float(step * MAX_NODES + index)


def read_code(logprob: float) -> tuple[int, int]:
    """Return the node's index and the step."""
    step, index = divmod(int(-logprob), MAX_NODES)
    return index, step
