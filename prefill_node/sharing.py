"""Computes equal prompts once while their KV exists, and tracks which requests wait for it or will read it.

Isolated prefill gives a prompt the same KV every time, so requests that read the same KV get the same bits, and eight
samples of a prompt cost one prefill. If some of these samples still wait for slots, the KV is kept for them for a
while; the prefix cache would not do for them, since it may hold whole chunks only, and a prompt may be shorter. Only
prompts of one scope share KV, and a scope belongs to one client. Otherwise the latency of a prompt would reveal whether
another client has just sent it. Must not know: vLLM, gRPC, what a scope is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from corun.errors import CorunError
from corun.node.kv.handle import bound
from corun.observe.tracing import Lap
from corun.receipt import prompt_digest
from corun.types import KvHandle, NodeRef, TokenScores
from prefill_node.metrics import PrefillMetrics
from prefill_node.recheck import Computation, Digests

log = logging.getLogger(__name__)
Key = tuple[str, str]
C = TypeVar("C", KvHandle, TokenScores)
StartSample = Callable[[str], Awaitable[bool]]
"""Starts a sample of a prompt in the engine that computes the prompt under this id. Returns whether it was started."""

KEPT_S = 2.0
"""How long KV is kept for requests that wait for room, counted from the latest request, while its lease lasts."""
KEEPER = "/kept"
"""The name of the reader that stands for these waiting requests; no request has such an id."""
KEPT_PART = 0.25
"""The largest part of the KV room that may be kept so. The rest is for running prefills and KV about to be read. Kept
prompts count whole, although prompts that begin alike may hold the same blocks."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to compute for one request, which reads its KV on one decode node."""

    request_id: str
    token_ids: Sequence[int]
    reader: NodeRef
    scope: str = ""
    """The prompts that share KV: those of one scope that are equal or begin alike. Empty: it shares none."""
    isolated: bool = False
    """Whether it is computed as the contract says, and in no other way that gives the same bits. Such a prompt has no
    scope."""


class PrefillEngine(Protocol):
    """The engine that computes and keeps KV."""

    async def prefill(self, prompt: PromptRequest) -> tuple[KvHandle, float]:
        """Compute the prompt's KV and keep it until it is read, it is released or its lease ends.

        Cancelling the call stops the work and keeps nothing.

        Returns:
            the handle, for the prompt's reader, and when the computation began, on the loop's clock.
        """

    on_checked: Callable[[Computation], None]
    """Called with each prompt that is checked and was not computed as the contract says."""

    async def score(
        self, request_id: str, token_ids: Sequence[int], num_scored: int, scope: str = ""
    ) -> tuple[TokenScores, float]:
        """Compute the log probabilities of the last `num_scored` tokens, and keep no KV for a reader.

        scope: see `PromptRequest`. A log probability is NaN if the logits are not finite. Cancelling the call stops the
        work.

        Returns:
            the scores, and when the computation began, on the loop's clock.
        """

    async def recompute(self, prompt_token_ids: Sequence[int]) -> Digests:
        """Compute a prompt as the contract says, keep nothing, and return the digests of its whole KV blocks."""

    def withdraw(self, finding: str) -> None:
        """Compute all prompts as the contract says from now on, refuse all freedoms in the certificate, and take the
        node out: it computed other bits."""

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        """Keep the KV of a finished prefill for these readers, too. Return False if the KV no longer exists.

        A reader is named by the id of the request that got its handle, or it is `KEEPER`. The first reader has the
        prefill's own id.
        """

    async def release(self, request_id: str, reader: str) -> None:
        """Remove a reader that has not read yet from a finished prefill. The KV is dropped after the last reader.
        Unknown ids are ignored."""

    def holds(self, request_id: str) -> bool:
        """Return whether a finished prefill's KV waits for a reader, as far as is known without asking the worker."""

    async def held_kv_blocks(self) -> int:
        """Return the number of KV blocks of finished prefills that are not yet read, released or expired."""


class _Computation:
    """One computation of a prompt's KV, for all requests that ask for it. It is cancelled if no request is left."""

    def __init__(self, sharing: Sharing, prompt: PromptRequest, start_sample: StartSample | None) -> None:
        self.name = prompt.request_id
        """The engine's id of this prefill, which is the id of the first request."""
        self.num_tokens = len(prompt.token_ids)
        self.is_kept = False
        """Whether the KV, once it exists, is kept for requests that will ask for it when they have slots."""
        self.waiting: set[str] = set()
        self.claims: set[str] = set()
        """The readers that the KV is kept for; a reader stays in the set after it has read the KV."""
        self.started: set[str] = set()
        """The requests whose samples were started. The engine keeps the KV for these itself, until they have begun."""
        self.is_gone = False
        """Whether the KV no longer exists or will never exist."""
        self._sharing = sharing
        self._engine = sharing.engine
        self._letting_go: asyncio.TimerHandle | None = None
        self._is_counted = False
        """Whether the KV may go from now on, since its readers have been counted."""
        self._starting = asyncio.Lock()
        self.task = asyncio.ensure_future(self._compute(prompt, start_sample))
        # Each waiting request raises the task's error, and without one it needs no warning.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def wait(self, request_id: str, start_sample: StartSample | None) -> KvHandle | None:
        """Start the request's sample, unless it is too late for that. Wait for the KV and return its handle; None if
        the KV was already gone when this request joined."""
        if self.task.done():
            return await self._join(request_id)
        self.waiting.add(request_id)
        try:
            if request_id != self.name:  # The first sample is started before the prompt is sent.
                await self._start(request_id, start_sample)
            handle = await asyncio.shield(self.task)
        finally:
            self.waiting.discard(request_id)
            if not self.waiting and not self.task.done():
                self.is_gone = True  # From now on no request may join this computation, because it is being cancelled.
                self.task.cancel()
        # A request that came after the readers were counted, but before the task ended, must be counted, too.
        return handle if request_id in self.claims else await self._join(request_id)

    def let_go(self) -> None:
        """Keep the KV no longer than the requests that have already asked for it need it."""
        self.is_kept = False
        if self._letting_go is not None:
            self._letting_go.cancel()
        if KEEPER in self.claims:
            self.claims.discard(KEEPER)
            self._sharing.drop(self.name, {KEEPER})

    async def _start(self, request_id: str, start_sample: StartSample | None) -> None:
        """Start a request's sample, so that the engine has it before it hears that the KV may go; later, do nothing."""
        if start_sample is not None:
            async with self._starting:
                if not (self._is_counted or self.is_gone) and await start_sample(self.name):
                    self.started.add(request_id)

    async def _compute(self, prompt: PromptRequest, start_sample: StartSample | None) -> KvHandle:
        try:
            await self._start(prompt.request_id, start_sample)  # A short prompt could be done before its sample comes.
            handle = await self._sharing.compute(prompt)
            await self._count()
        except BaseException as error:
            self.is_gone = True
            if self.claims or isinstance(error, asyncio.CancelledError):
                # The KV may exist, but no request gets its handle.
                self._sharing.drop(self.name, {self.name, *self.claims})
            raise
        return handle

    async def _count(self) -> None:
        """Tell the engine which requests wait for the KV, before any of them gets the handle. Otherwise the first
        request could read the KV, and the engine free it, before the second one is counted."""
        async with self._starting:
            self._is_counted = True
        readers = self._claim(self.waiting) - self.started
        others = sorted(readers - {self.name})
        if others and not await self._engine.share(self.name, others):
            self.claims -= set(others)
        if self.name not in readers:
            self._sharing.drop(self.name, {self.name})

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
        """Record these requests as readers and return the readers that the engine must be told of.

        They are recorded before the engine is told, so that a request that gives up in the meantime can be released.
        """
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
    """The prefills of one node. Every request that gets a handle is one reader until it has read or is released.

    kv_tokens: the number of tokens that there is KV room for.
    """

    def __init__(self, engine: PrefillEngine, kv_tokens: int, metrics: PrefillMetrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self.computing: dict[str, int] = {}  # id of the prefill -> prompt tokens
        self.laps: dict[str, list[Lap]] = {}  # request id -> the request's laps, for the requests that record them
        self._max_kept = int(KEPT_PART * kv_tokens)
        self._room_beside = kv_tokens - self._max_kept
        self._computations: dict[Key, _Computation] = {}
        self._ending: list[_Computation] = []  # No request may join these, but some readers may not have read yet.
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(
        self, prompt: PromptRequest, start_sample: StartSample | None = None, *, more_follow: bool = False
    ) -> KvHandle:
        """Return the handle of a prompt's KV for one reader. Without a scope the KV is computed for this request alone.

        start_sample: starts the request's sample. It is called only if the KV is not there yet, and before the prompt
        is computed for the first request.
        more_follow: whether more requests with this prompt and scope wait for slots.

        A caller that cancels the call must also call `release`; then nothing is kept. Raises what the engine raises.
        """
        if len(prompt.token_ids) > self._room_beside:
            self.let_go()
        if not prompt.scope:
            is_started = start_sample is not None and await start_sample(prompt.request_id)
            computed = await self.compute(prompt)
            if is_started:
                self.drop(prompt.request_id, {prompt.request_id})
            return computed
        request_id, key = prompt.request_id, (prompt.scope, prompt_digest(prompt.token_ids))
        while True:
            found = self._computations.get(key)
            if found is None or found.is_gone:
                self._prune()
                found = _Computation(self, prompt, start_sample)
            self._computations.pop(key, None)
            self._computations[key] = found  # The dict is in the order of the last request for each computation.
            found.is_kept = found.is_kept or (more_follow and self._makes_room(found))
            try:
                if (handle := await found.wait(request_id, start_sample)) is not None:
                    self.metrics.shared_prompts.inc(request_id != found.name)
                    return bound(replace(handle, reader=prompt.reader, claim=request_id))
            finally:
                if found.is_gone and self._computations.get(key) is found:
                    self._ending.append(self._computations.pop(key))

    def has(self, request_id: str) -> bool:
        """Return whether a prompt is computed under this id, or its KV waits for a reader."""
        return request_id in self.computing or self.engine.holds(request_id)

    async def compute(self, prompt: PromptRequest) -> KvHandle:
        """Have the engine compute a prompt. A prefill that several requests share is counted once."""
        return await self._counted(prompt.request_id, len(prompt.token_ids), self.engine.prefill(prompt))

    async def score(self, request_id: str, token_ids: Sequence[int], num_scored: int, scope: str = "") -> TokenScores:
        """Have the engine score tokens. Equal ones are computed each time: only the prefix cache is shared."""
        if len(token_ids) > self._room_beside:
            self.let_go()
        work = self.engine.score(request_id, token_ids, num_scored, scope)
        return await self._counted(request_id, len(token_ids), work)

    async def _counted(self, request_id: str, num_tokens: int, work: Coroutine[Any, Any, tuple[C, float]]) -> C:
        """Do the engine's work on a prompt, and count it."""
        now = asyncio.get_running_loop().time
        arrived = now()
        self.computing[request_id] = num_tokens
        try:
            found, began = await work
        finally:
            del self.computing[request_id]
        done = now()
        self.metrics.note_prompt(num_tokens, found.cached_tokens, arrived, began, done)
        if request_id in self.laps:
            self.laps[request_id] += [("queue", arrived, began), ("compute", began, done)]
        return found

    def let_go(self) -> None:
        """Keep KV only for requests that have already asked for it, because no more requests will come."""
        for made in self._computations.values():
            made.let_go()

    def _makes_room(self, made: _Computation) -> bool:
        """Return whether this KV may be kept. If room is needed, stop keeping the KV requested least recently."""
        others = [other for other in self._computations.values() if other.is_kept and other is not made]
        left = self._max_kept - made.num_tokens - sum(other.num_tokens for other in others)
        for other in others if made.num_tokens <= self._max_kept else ():
            if left >= 0:
                break
            other.let_go()
            left += other.num_tokens
        return made.num_tokens <= self._max_kept

    async def release(self, request_id: str) -> None:
        """Release the KV for a request whose reader will not read it. Unknown ids are passed to the engine."""
        for made in (*self._computations.values(), *self._ending):
            if request_id in made.claims:
                await self.engine.release(made.name, request_id)
                return
            if request_id == made.name:
                return  # This request gave up before it was counted; the KV belongs to the other readers.
        await self.engine.release(request_id, request_id)

    def release_soon(self, request_id: str) -> None:
        """Call `release` in the background."""
        self._spawn(self.release(request_id))

    def drop(self, name: str, readers: set[str]) -> None:
        """Remove readers from a prefill in the background."""
        for reader in readers:
            self._spawn(self.engine.release(name, reader))

    def _spawn(self, release: Coroutine[Any, Any, None]) -> None:
        async def patiently() -> None:
            try:
                await release
            except CorunError as error:  # A stuck engine releases the KV when it continues.
                log.warning("KV was not released yet: %s", error)

        task = asyncio.ensure_future(patiently())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _prune(self) -> None:
        """Forget the computations whose KV no longer exists."""

        def is_there(made: _Computation) -> bool:
            return not made.task.done() or self.engine.holds(made.name)

        self._computations = {key: made for key, made in self._computations.items() if is_there(made)}
        self._ending = [made for made in self._ending if is_there(made)]
