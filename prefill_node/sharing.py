"""Equal prompts are computed once, while their KV is there: who waits for it, and for whom it is kept.

Isolated prefill gives a prompt the same KV whenever it computes it, so KV that is read twice moves no bit, and eight
samples of a prompt cost one prefill. Where some of them still wait for slots, it is kept for them for a while. Only
prompts of one scope share, which is one client's: else the time that a prompt takes would tell whether somebody else
has just sent it. Must not know: vLLM, gRPC, what a scope is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from corun.errors import CorunError
from corun.node.kv.handle import bound
from corun.receipt import prompt_digest
from corun.types import KvHandle, NodeRef

log = logging.getLogger(__name__)
Key = tuple[str, str]

KEPT_S = 2.0
"""How long KV is kept for those who wait for slots, from the last one that came, while its lease lasts."""
KEEPER = "/kept"
"""The reader that KV is kept for meanwhile; no request has such an id."""
KEPT_PART = 0.25
"""Of the KV room: what may be kept so. The rest is for prompts that are computed, and KV that is about to be read."""


class Engine(Protocol):
    """What computes and keeps KV."""

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        """Computes the prompt's KV and keeps it until it is read, released or its lease ends; its handle is `reader`'s.

        Cancelling the call stops the work and keeps nothing.
        """

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        """Keeps the KV of a finished prefill for these readers, too. False: it is not there any more.

        Readers have the names of the calls that got its handle, or `KEEPER`'s; the first one has the prefill's own.
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
        self.num_tokens = len(prompt)
        self.is_kept = False
        """For requests that will ask for it, too, once they have slots; from when it is there."""
        self.waiting: set[str] = set()
        self.claims: set[str] = set()
        """The readers that its KV is kept for, or was until they had read it."""
        self.is_gone = False
        """There will be no KV, or no more of it."""
        self._engine = engine
        self._drop = drop
        self._letting_go: asyncio.TimerHandle | None = None
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

    def let_go(self) -> None:
        """Keeps it no longer than those who have asked need it."""
        self.is_kept = False
        if self._letting_go is not None:
            self._letting_go.cancel()
        if KEEPER in self.claims:
            self.claims.discard(KEEPER)
            self._drop(self.name, {KEEPER})

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
        readers = self._claim(self.waiting)
        others = sorted(readers - {self.name})
        if others and not await self._engine.share(self.name, others):
            self.claims -= set(others)
        if self.name not in readers:
            await self._engine.release(self.name, self.name)

    async def _join(self, request_id: str) -> KvHandle | None:
        if self.is_gone:
            return None
        readers = self._claim({request_id})
        if await self._engine.share(self.name, sorted(readers)):
            return self.task.result()
        self.claims -= readers
        self.is_gone = True
        return None

    def _claim(self, requests: set[str]) -> set[str]:
        """Whom the engine has to be told of. Before it is told: who gives up meanwhile has something to give back."""
        readers = set(requests)
        if self.is_kept:
            if self._letting_go is not None:
                self._letting_go.cancel()
            self._letting_go = asyncio.get_running_loop().call_later(KEPT_S, self.let_go)
            if KEEPER not in self.claims:
                readers.add(KEEPER)
        self.claims |= readers
        return readers


class Sharing:
    """Prefills of one node. Every request that gets a handle is one reader, until it has read or is released.

    kv_tokens: how many tokens there is KV room for.
    """

    def __init__(self, engine: Engine, kv_tokens: int) -> None:
        self.shared = 0
        """Prompts that got KV which another one's prefill has computed."""
        self._engine = engine
        self._max_kept = int(KEPT_PART * kv_tokens)
        self._room_beside = kv_tokens - self._max_kept
        self._computations: dict[Key, _Computation] = {}
        self._ending: list[_Computation] = []  # Nobody may join these any more, but some may not have read yet.
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        reader: NodeRef,
        scope: str = "",
        *,
        more_follow: bool = False,
    ) -> KvHandle:
        """The KV of a prompt, for one reader. Without a scope it is computed for this request alone.

        more_follow: requests with this prompt and scope wait for slots.

        Cancelling the call keeps nothing once `release` has been called as well. Raises what the engine raises.
        """
        if len(prompt_token_ids) > self._room_beside:
            self.let_go()
        if not scope:
            return await self._engine.prefill(request_id, prompt_token_ids, reader)
        key = scope, prompt_digest(prompt_token_ids)
        while True:
            found = self._computations.get(key)
            if found is None or found.is_gone:
                self._prune()
                found = _Computation(self._engine, request_id, prompt_token_ids, reader, self._release_soon)
            self._computations.pop(key, None)
            self._computations[key] = found  # Last: it was asked for last.
            found.is_kept = found.is_kept or (more_follow and self._makes_room(found))
            try:
                if (handle := await found.wait(request_id)) is not None:
                    self.shared += request_id != found.name
                    return bound(replace(handle, reader=reader, claim=request_id))
            finally:
                if found.is_gone and self._computations.get(key) is found:
                    self._ending.append(self._computations.pop(key))

    def let_go(self) -> None:
        """Nobody will ask any more: keeps nothing that is not to be read by somebody who has asked."""
        for made in self._computations.values():
            made.let_go()

    def _makes_room(self, made: _Computation) -> bool:
        """Whether it may be kept; those that nobody has asked for longest are not any more, if necessary."""
        others = [other for other in self._computations.values() if other.is_kept and other is not made]
        left = self._max_kept - made.num_tokens - sum(other.num_tokens for other in others)
        for other in others if made.num_tokens <= self._max_kept else ():
            if left >= 0:
                break
            other.let_go()
            left += other.num_tokens
        return made.num_tokens <= self._max_kept

    async def release(self, request_id: str) -> None:
        """A request's reader will not read, if it has not read yet. Unknown ids are the engine's business."""
        for made in (*self._computations.values(), *self._ending):
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
        self._ending = [made for made in self._ending if self._is_there(made)]

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
