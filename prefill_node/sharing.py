"""Equal prompts are computed once, while their KV is there: who waits for it, and for whom it is kept.

Isolated prefill gives a prompt the same KV whenever it computes it, so KV that is read twice moves no bit, and eight
samples of a prompt cost one prefill. Only prompts of one scope share, which is one client's: else the time that a
prompt takes would tell whether somebody else has just sent it. Must not know: vLLM, gRPC, what a scope is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from corun.cluster import KvHandle, NodeRef
from corun.errors import CorunError
from corun.handle import bound
from corun.receipt import prompt_digest

log = logging.getLogger(__name__)
Key = tuple[str, str]


class Engine(Protocol):
    """What computes and keeps KV."""

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        """Computes the prompt's KV and keeps it until it is read, released or its lease ends; its handle is `reader`'s.

        Cancelling the call stops the work and keeps nothing.
        """

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        """Keeps the KV of a finished prefill for these readers, too. False: it is not there any more.

        Readers have the names of the calls that got its handle; the first one has the prefill's own.
        """

    async def release(self, request_id: str, reader: str) -> None:
        """Takes a reader that has not read yet from a finished prefill, whose KV is dropped after the last one; unknown
        ids are ignored."""

    def holds(self, request_id: str) -> bool:
        """Whether a finished prefill's KV waits for a reader, as far as is known without asking."""


class _Computation:
    """Of one prompt's KV, for all who ask for it until it is done; it ends when none of them wants it any more."""

    def __init__(
        self, engine: Engine, name: str, prompt: Sequence[int], reader: NodeRef, drop: Callable[[str, set[str]], None]
    ) -> None:
        self.name = name
        """The engine's id of it: that of the first request."""
        self.waiting: set[str] = set()
        self.claims: set[str] = set()
        """The requests that its KV is kept for, or was until they had read it."""
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
            await self._count()
        except BaseException as error:
            self.is_gone = True
            if self.claims or isinstance(error, asyncio.CancelledError):
                self._drop(self.name, {self.name, *self.claims})  # It may be there, and nobody will hear of it.
            raise
        return handle

    async def _count(self) -> None:
        """Tells the engine who waits. Before any of them hears of the KV: the first could have read it, and it be gone,
        before the second is counted."""
        readers = set(self.waiting)
        self.claims |= readers  # First: who gives up meanwhile has something to give back.
        others = sorted(readers - {self.name})
        if others and not await self._engine.share(self.name, others):
            self.claims -= set(others)
        elif self.name not in readers:
            await self._engine.release(self.name, self.name)

    async def _join(self, request_id: str) -> KvHandle | None:
        if self.is_gone:
            return None
        self.claims.add(request_id)
        if await self._engine.share(self.name, (request_id,)):
            return self.task.result()
        self.claims.discard(request_id)
        self.is_gone = True
        return None


class Sharing:
    """Prefills of one node. Every request that gets a handle is one reader, until it has read or is released."""

    def __init__(self, engine: Engine) -> None:
        self.shared = 0
        """Prompts that got KV which another one's prefill has computed."""
        self._engine = engine
        self._computations: dict[Key, _Computation] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef, scope: str = ""
    ) -> KvHandle:
        """The KV of a prompt, for one reader. Without a scope it is computed for this request alone.

        Cancelling the call keeps nothing once `release` has been called as well. Raises what the engine raises.
        """
        if not scope:
            return await self._engine.prefill(request_id, prompt_token_ids, reader)
        key = scope, prompt_digest(prompt_token_ids)
        while True:
            found = self._computations.get(key)
            if found is None or found.is_gone:
                self._prune()
                found = _Computation(self._engine, request_id, prompt_token_ids, reader, self._release_soon)
                self._computations[key] = found
            try:
                if (handle := await found.wait(request_id)) is not None:
                    self.shared += request_id != found.name
                    return bound(replace(handle, reader=reader, claim=request_id))
            finally:
                if found.is_gone and self._computations.get(key) is found:
                    del self._computations[key]

    async def release(self, request_id: str) -> None:
        """A request's reader will not read, if it has not read yet. Unknown ids are the engine's business."""
        for made in self._computations.values():
            if request_id in made.claims:
                await self._engine.release(made.name, request_id)
                return
            if request_id == made.name:
                return  # It was given up before it was counted; the KV is the others'.
        await self._engine.release(request_id, request_id)

    def release_soon(self, request_id: str) -> None:
        """`release`, in the background."""
        self._spawn(self.release(request_id))

    def _release_soon(self, name: str, readers: set[str]) -> None:
        for reader in readers:
            self._spawn(self._engine.release(name, reader))

    def _spawn(self, release: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(_patient(release))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _prune(self) -> None:
        """Drops those whose KV is gone."""
        for key, made in list(self._computations.items()):
            if not self._is_there(made):
                del self._computations[key]

    def _is_there(self, made: _Computation) -> bool:
        return not made.task.done() or self._engine.holds(made.name)


async def _patient(release: Coroutine[Any, Any, None]) -> None:
    try:
        await release
    except CorunError as error:  # A stuck engine does it when it goes on.
        log.warning("KV was not released yet: %s", error)


def _heard(task: asyncio.Task[KvHandle]) -> None:
    """An error is everybody's who waits; if nobody does any more, it is no news."""
    if not task.cancelled():
        task.exception()
