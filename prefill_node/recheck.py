"""Computes a share of the prompts a second time, in the contract's own form, and compares the bits of their KV.

A certificate is evidence from the node's start. This is the evidence of its service: prompts that were computed in any
other way than the contract's, with the step's company and the cached blocks that they really had. They are computed
again when the node has had nothing else to do for a while, and are given up at once for a client's prompt.

Owns: which computations wait, when one runs, and the finding if two differ, in words. Must not know: vLLM, gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from prefill_node.metrics import PrefillMetrics

MAX_WAITING = 8
"""The number of computations that wait. A node that is never idle forgets the oldest."""
IDLE_S = 1.0
"""How long a node must have been idle. Else each pause between two prompts would begin what the next one ends."""
Digests = Sequence[Sequence[int]]
"""The digests of a prompt's whole KV blocks, in order, one sequence for each tensor-parallel rank."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One prompt whose KV was computed with freedoms, and the bits that came out."""

    prompt_token_ids: tuple[int, ...]
    digests: Digests
    freedoms: Collection[str]
    """The names of the freedoms that it might use."""
    cached_tokens: int
    """Its tokens from the prefix cache."""
    steps: Sequence[Sequence[int]]
    """Its own tokens, the prompts, the tokens of all of them, and the samples beside them, in each of its steps."""

    @property
    def how(self) -> str:
        """How it was computed, in words."""
        ran = "; ".join(
            f"{own} of the {total} tokens of {prompts} prompts" + (f" beside {samples} samples" if samples else "")
            for own, prompts, total, samples in self.steps
        )
        freedoms = ", ".join(sorted(self.freedoms))
        return f"it may use {freedoms}, took {self.cached_tokens} tokens from the cache, and ran as {ran}"


class Recheck:
    """The computations that wait for their second run. `pause` and `resume` have to be called as prompts come and go.

    recompute: computes a prompt in the contract's own form, keeps nothing, and returns its digests.
    on_difference: called with the finding, in words; after that nothing is compared any more.
    """

    def __init__(
        self,
        recompute: Callable[[Sequence[int]], Awaitable[Digests]],
        metrics: PrefillMetrics,
        on_difference: Callable[[str], None],
    ) -> None:
        self._recompute = recompute
        self._metrics = metrics
        self._on_difference = on_difference
        self._waiting: deque[Computation] = deque(maxlen=MAX_WAITING)
        self._begins: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_differed = False

    def add(self, computation: Computation) -> None:
        """Let a computation wait for its second run."""
        self._waiting.append(computation)

    def pause(self) -> None:
        """Give up the running computation, because a client's prompt came or the node takes no work any more."""
        if self._begins is not None:
            self._begins.cancel()
        if self._task is not None:
            self._task.cancel()
        self._begins = self._task = None

    def resume(self) -> None:
        """Compute what waits, one after the other, if the node stays idle for `IDLE_S`."""
        if self._begins is None and self._task is None and self._waiting and not self._has_differed:
            self._begins = asyncio.get_running_loop().call_later(IDLE_S, self._begin)

    def _begin(self) -> None:
        self._begins, self._task = None, asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting and not self._has_differed:
                first = self._waiting.popleft()
                self._judge(first, await self._recompute(first.prompt_token_ids))
        except Exception:  # vLLM's errors share no base. The watch over the engine decides whether the node can go on.
            log.exception("a prompt could not be computed again")
        if self._task is asyncio.current_task():  # Else it was given up, and another one may run.
            self._task = None

    def _judge(self, first: Computation, again: Digests) -> None:
        place = difference(first.digests, again)
        self._metrics.rechecked_prompts.labels("different" if place else "equal").inc()
        if not place:
            return
        self._has_differed = True
        tokens = len(first.prompt_token_ids)
        self._on_difference(f"a prompt of {tokens} tokens has other KV when it runs alone: {place}; {first.how}")


def difference(one: Digests, other: Digests) -> str:
    """Return in words where the bits of two computations of a prompt first differ; empty if they are equal."""
    for rank, (a, b) in enumerate(zip(one, other, strict=True)):
        for block, (left, right) in enumerate(zip(a, b, strict=True)):
            if left != right:
                return f"first in KV block {block} of {len(a)} (rank {rank})"
    return ""
