"""Requests: checked before anything is reserved, expanded into samples, run, and streamed as one.

Owns: what the router checks of a request, seeds, the life of a request's samples. Whoever started a request closes it,
and nothing of it runs on after that. This module must not know gRPC messages or nodes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from corun.errors import (
    ContractMismatchError,
    CorunError,
    InternalError,
    InvalidArgumentError,
    PermissionDeniedError,
    Shown,
)
from corun.observe.tracing import OFF, Span
from corun.params import (
    SamplingParams,
    check_lengths,
    check_request_id,
    check_seed,
    check_token_ids,
    check_vocabulary,
)
from corun.receipt import Receipt, prompt_digest
from corun.rpc.auth import ANYONE, Caller
from corun.seeds import derive_seed, sample_seed
from corun.types import Priority, ResumePoint
from router.admission import AdmissionQueue
from router.failover import Sample, SampleRunner
from router.lanes import Ticket
from router.nodes.registry import Registry
from router.output import Outbox, Piece, SampleOutput
from router.prompts import Model, PromptEncoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asks for, as it came."""

    prompt: str | Sequence[int]
    """Text or token ids: nothing has been done for each of them yet."""
    params: SamplingParams
    request_id: str = ""
    """Empty: the router draws one."""
    seed: int | None = None
    """None: derived from the request id."""
    resume: tuple[ResumePoint, ...] = ()
    """What an earlier call delivered."""
    fingerprint: str = ""
    """Of the contract that the earlier call ran under; empty: any."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    span: Span = OFF
    token_texts: bool = False
    """Whether the text of each token is wanted."""


class Generation:
    """The running samples of one request. Close it, whatever happens."""

    def __init__(self, tickets: Sequence[Ticket], tasks: Sequence[asyncio.Task[None]], outbox: Outbox) -> None:
        self.tickets = tickets
        self._tasks = tasks
        self._outbox = outbox

    @property
    def num_samples(self) -> int:
        return len(self._tasks)

    def take(self) -> Awaitable[Sequence[Piece]]:
        """The output that has come since the last time, at least some; each sample's last piece has its receipt.

        Raises what ended the request.
        """
        return self._outbox.take()

    @property
    def outbox(self) -> Outbox:
        """Where its output waits."""
        return self._outbox

    async def to_end(self) -> tuple[str, Receipt]:
        """Runs a request of one sample to its end: its text and its receipt."""
        texts: list[str] = []
        while True:
            for piece in await self._outbox.take():
                texts.append(piece.text)
                if piece.receipt is not None:
                    return "".join(texts), piece.receipt

    def cancel(self) -> None:
        """Tells what still runs to end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends what still runs."""
        self.cancel()
        await asyncio.wait(self._tasks)  # A cancelled sample does not wait for anything.


class Generator:
    """Makes samples of requests and runs them."""

    def __init__(
        self,
        registry: Registry,
        queue: AdmissionQueue,
        runner: SampleRunner,
        *,
        seed_key: bytes,
        node_wait_s: float,
        max_unsent_tokens: int,
        share_kv: bool,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._runner = runner
        self._seed_key = seed_key
        self._node_wait_s = node_wait_s
        self._max_unsent_tokens = max_unsent_tokens
        self._share_kv = share_kv
        self._texts = PromptEncoder()

    def close(self) -> None:
        """Ends its threads, when no request is accepted any more."""
        self._texts.close()

    async def accept(self, request: Request, deadline: float) -> list[Sample]:
        """The samples of a request that are to run; nothing is reserved for them yet.

        Raises:
            InvalidArgumentError: the request cannot be run; names field, value and limit.
            ContractMismatchError: it began under another contract or seed key, so its rest would be other bits.
            OverloadedError: there is no room, or not in time; found out before the prompt is looked at.
            PermissionDeniedError: the caller may not ask for such a priority.
            UnavailableError: nodes are missing, and were until `deadline` or for `node_wait_s`.
        """
        check_priority(request.priority, request.caller)
        tokens = 1 if isinstance(request.prompt, str) else len(request.prompt)  # Of text, as many as are known.
        with self._queue.arriving(request.params.n, tokens, deadline, caller=request.caller, priority=request.priority):
            return await self._accept(request, deadline)

    async def _accept(self, request: Request, deadline: float) -> list[Sample]:
        arrived = asyncio.get_running_loop().time()
        if not request.prompt:
            raise InvalidArgumentError("prompt", Shown("nothing"), "must be text or token ids, at least one")
        request_id = check_request_id(request.request_id) or secrets.token_hex(16)
        seed = derive_seed(self._seed_key, request_id) if request.seed is None else check_seed(request.seed)
        received = _received(request, seed)
        model = await self.model(deadline)
        self._check_fingerprint(request.fingerprint)
        prompt = await self._token_ids(request.prompt, model, deadline, request.caller)
        self.check(prompt, request.params, model)
        digest = prompt_digest(prompt)
        return [
            Sample(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt,
                prompt_digest=digest,
                params=request.params,
                seed=sample_seed(seed, index),
                deadline=deadline,
                received=received.get(index),
                caller=request.caller,
                priority=request.priority,
                arrived=arrived,
                # What is resumed is compared with what the client has: it must not inherit what was wrong with that.
                share_scope=f"client {request.caller.name}" if self._share_kv and index not in received else "",
                span=request.span,
                token_texts=request.token_texts,
            )
            for index in range(request.params.n)
            if index not in received or not received[index].done
        ]

    async def model(self, deadline: float) -> Model:
        """The cluster's model, once nodes are ready."""
        return await self._registry.wait_ready(min(deadline, asyncio.get_running_loop().time() + self._node_wait_s))

    def check(self, prompt: tuple[int, ...], params: SamplingParams, model: Model) -> None:
        """Raises InvalidArgumentError for what this model, or every node in use, cannot run."""
        check_lengths(len(prompt), params.max_tokens, model.max_model_len)
        check_token_ids(prompt, model.vocab_size)
        check_vocabulary(params, model.vocab_size)
        total = len(prompt) + params.max_tokens
        if not self._registry.missing() and not self._registry.could_hold(total):
            limit = f"must leave prompt and output, {total} tokens, room in the KV of a decode node"
            raise InvalidArgumentError("sampling_params.max_tokens", params.max_tokens, limit)

    async def is_text_of(
        self, text: str, prompt: tuple[int, ...], model: Model, deadline: float, caller: Caller
    ) -> bool:
        """Whether a request with this text would be computed from these token ids."""
        return await self._texts.encode(text, model, deadline, caller.name) == prompt

    def start(self, samples: Sequence[Sample]) -> Generation:
        """Queues the samples of one request, in order, and runs them. Raises OverloadedError if the queue is full."""
        assert self._registry.model is not None  # There are samples, so there was one to check them against.
        first = samples[0]
        needs = [sample.need for sample in samples]
        tickets = self._queue.enter(needs, caller=first.caller, priority=first.priority)
        outbox = Outbox(self._max_unsent_tokens)
        tasks = [
            asyncio.ensure_future(self._run(sample, ticket, outbox, self._registry.model))
            for sample, ticket in zip(samples, tickets, strict=True)
        ]
        for task, ticket in zip(tasks, tickets, strict=True):
            # Also if the task is cancelled before its first step.
            task.add_done_callback(lambda _, ticket=ticket: self._queue.leave(ticket))  # type: ignore[misc]
        generation = Generation(tickets, tasks, outbox)
        outbox.overflowed = generation.cancel  # Its reader may be stuck where it cannot see the error yet.
        return generation

    async def _run(self, sample: Sample, ticket: Ticket, outbox: Outbox, model: Model) -> None:
        output = SampleOutput(
            sample_index=sample.index,
            seed=sample.seed,
            params=sample.params,
            detokenizer=model.tokenizer.detokenizer(),
            outbox=outbox,
            received=sample.received,
            with_token_texts=sample.token_texts,
        )
        try:
            await self._runner.run(sample, ticket, output)
        except CorunError as error:
            outbox.fail(error)
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("internal error %s in %s", error_id, sample)
            outbox.fail(InternalError(f"internal error, id {error_id}"))

    def _check_fingerprint(self, expected: str) -> None:
        found = self._registry.contract.fingerprint
        if expected and expected != found:
            differences = {"fingerprint": (expected, found)}
            raise ContractMismatchError("the request began under another contract", differences)

    async def _token_ids(
        self, prompt: str | Sequence[int], model: Model, deadline: float, caller: Caller
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self._texts.encode(prompt, model, deadline, caller.name)
        check_lengths(len(prompt), 1, model.max_model_len)
        return tuple(prompt)


def check_priority(priority: Priority, caller: Caller) -> None:
    """Raises PermissionDeniedError if the caller may not ask for it."""
    order = list(Priority)
    if order.index(priority) < order.index(caller.max_priority):
        limit = f"must be {caller.max_priority.value} or lower for client {caller.name}"
        raise PermissionDeniedError("priority", priority.value, limit)


def _received(request: Request, seed: int) -> dict[int, ResumePoint]:
    """What the client has, by sample index. Raises InvalidArgumentError if that cannot be, and ContractMismatchError if
    it was drawn from other seeds than these."""
    if request.resume and not request.request_id:
        raise InvalidArgumentError("request_id", request.request_id, "must be set to resume a request")
    found: dict[int, ResumePoint] = {}
    for number, point in enumerate(request.resume):
        _check_point(f"resume[{number}]", point, request.params)
        if point.sample_index in found:
            raise InvalidArgumentError(f"resume[{number}].sample_index", point.sample_index, "must be given once")
        found[point.sample_index] = point
        own = sample_seed(seed, point.sample_index)
        if point.seed != own:  # Routers of one cluster have one seed key; this one has another.
            differences = {f"resume[{number}].seed": (str(point.seed), str(own))}
            raise ContractMismatchError("the request began with another seed than this router gives it", differences)
    if len(found) == request.params.n and all(point.done for point in found.values()):
        raise InvalidArgumentError("resume", Shown("all samples done"), "must leave a sample to run")
    return found


def _check_point(field: str, point: ResumePoint, params: SamplingParams) -> None:
    if point.sample_index >= params.n:
        raise InvalidArgumentError(f"{field}.sample_index", point.sample_index, f"must be below n, {params.n}")
    if point.num_tokens > params.max_tokens:
        limit = f"must be at most max_tokens, {params.max_tokens}"
        raise InvalidArgumentError(f"{field}.num_tokens", point.num_tokens, limit)
