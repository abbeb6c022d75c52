"""Equal prompts are computed once, while their KV is there: who waits for it, and for whom it is kept.

Isolated prefill gives a prompt the same KV whenever it computes it, so KV that is read twice moves no bit, and eight
samples of a prompt cost one prefill. Only prompts of one scope share, which is one client's: else the time that a
prompt takes would tell whether somebody else has just sent it. Must not know: vLLM, gRPC, what a scope is.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from corun.cluster import KvHandle, NodeRef
from corun.errors import CorunError
from corun.receipt import prompt_digest

log = logging.getLogger(__name__)
Key = tuple[str, NodeRef, str]


class Engine(Protocol):
    """What computes and keeps KV."""

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle: ...

    async def share(self, request_id: str, readers: int) -> bool:
        """Keeps KV for so many readers more. False: it is not there any more."""

    async def release(self, request_id: str) -> None:
        """One reader fewer; after the last one the KV is dropped."""

    def holds(self, request_id: str) -> bool:
        """Whether KV waits for a reader, as far as is known without asking."""


class _Computation:
    """Of one prompt's KV, for all who ask for it until it is done; it ends when none of them wants it any more."""

    def __init__(
        self, engine: Engine, name: str, prompt: Sequence[int], reader: NodeRef, drop: Callable[[], None]
    ) -> None:
        self.name = name
        """The engine's id of it: that of the first request."""
        self.waiting: set[str] = set()
        self.claims: set[str] = set()
        """The requests that it has kept KV for."""
        self.is_gone = False
        """There will be no KV, or no more of it."""
        self._engine = engine
        self._drop = drop
        self.task = asyncio.ensure_future(self._compute(prompt, reader))
        self.task.add_done_callback(_heard)

    async def wait(self, request_id: str) -> KvHandle | None:
        """The KV, once it is there; None if this request came too late for it."""
        if self.task.done():
            return await self._join(request_id)
        self.waiting.add(request_id)
        try:
            handle = await asyncio.shield(self.task)
        finally:
            self.waiting.discard(request_id)
            if not self.waiting and not self.task.done():
                self.is_gone = True  # From now on: nobody may join what is being ended.
                self.task.cancel()
        # Who came between the count of readers and the end has to be counted as well.
        return handle if request_id in self.claims else await self._join(request_id)

    async def _compute(self, prompt: Sequence[int], reader: NodeRef) -> KvHandle:
        try:
            handle = await self._engine.prefill(self.name, prompt, reader)
            # Before any of them hears of it: the first could have read it, and it be gone, before the next is counted.
            readers = sorted(self.waiting, key=lambda name: name != self.name)
            if len(readers) > 1 and not await self._engine.share(self.name, len(readers) - 1):
                del readers[1:]
        except asyncio.CancelledError:
            self._drop()  # It may be there already, and nobody will hear of it.
            raise
        self.claims.update(readers)
        return handle

    async def _join(self, request_id: str) -> KvHandle | None:
        if self.has_failed:
            return None
        self.claims.add(request_id)  # First: a request that is given up meanwhile has a reader to take back.
        if await self._engine.share(self.name, 1):
            return self.task.result()
        self.claims.discard(request_id)
        self.is_gone = True
        return None

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Sharing:
    """Prefills of one node. Every request that gets a handle is one reader, until it has read or is released."""

    def __init__(self, engine: Engine) -> None:
        self.shared = 0
        """Prompts that got KV which another one's prefill has computed."""
        self._engine = engine
        self._computations: dict[Key, _Computation] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def has(self, scope: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> bool:
        """Whether such a prompt is being computed, or its KV waits for a reader."""
        found = self._computations.get((scope, reader, prompt_digest(prompt_token_ids))) if scope else None
        return found is not None and not found.is_gone and self._is_there(found)

    async def prefill(
        self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef, scope: str = ""
    ) -> KvHandle:
        """The KV of a prompt, for one reader. Without a scope it is computed for this request alone.

        Cancelling the call keeps nothing once `release` has been called as well. Raises what the engine raises.
        """
        if not scope:
            return await self._engine.prefill(request_id, prompt_token_ids, reader)
        key = scope, reader, prompt_digest(prompt_token_ids)
        while True:
            found = self._computations.get(key)
            if found is None or found.is_gone:
                self._prune()
                drop = functools.partial(self._release_soon, request_id)
                found = _Computation(self._engine, request_id, prompt_token_ids, reader, drop)
                self._computations[key] = found
            try:
                if (handle := await found.wait(request_id)) is not None:
                    self.shared += request_id != found.name
                    return handle
            finally:
                if (found.is_gone or found.has_failed) and self._computations.get(key) is found:
                    del self._computations[key]

    async def release(self, request_id: str) -> None:
        """A request's reader will not read: one fewer. Ids that nobody shares are the engine's business."""
        for made in self._computations.values():
            if request_id in made.claims:
                made.claims.discard(request_id)
                await self._engine.release(made.name)
                return
            if request_id == made.name:
                return  # It was given up before it was counted; the KV is the others'.
        await self._engine.release(request_id)

    def _release_soon(self, request_id: str) -> None:
        task = asyncio.ensure_future(self._release(request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, request_id: str) -> None:
        try:
            await self._engine.release(request_id)
        except CorunError as error:  # A stuck engine does it when it goes on.
            log.warning("KV of %s was not released yet: %s", request_id, error)

    def _prune(self) -> None:
        """Drops those whose KV is gone."""
        for key, made in list(self._computations.items()):
            if not self._is_there(made):
                del self._computations[key]

    def _is_there(self, made: _Computation) -> bool:
        return not made.task.done() or self._engine.holds(made.name)


def _heard(task: asyncio.Task[KvHandle]) -> None:
    """An error is everybody's who waits; if nobody does any more, it is no news."""
    if not task.cancelled():
        task.exception()
