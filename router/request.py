"""Requests: they are checked before anything is reserved, expanded into samples, run, and streamed as one output.

Owns: the router's checks of a request, seeds, and the life of a request's samples. The caller that starts a request
closes it, and nothing of the request runs after that. This module must not know gRPC messages or nodes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from corun.errors import (
    ContractMismatchError,
    CorunError,
    InvalidArgumentError,
    PermissionDeniedError,
    Shown,
    internal_error,
)
from corun.observe.tracing import OFF, Span
from corun.params import (
    SamplingParams,
    check_lengths,
    check_prompt,
    check_request_id,
    check_seed,
    check_token_ids,
    check_vocabulary,
    derive_seed,
    sample_seed,
)
from corun.receipt import Receipt, prompt_digest
from corun.rpc.auth import ANYONE, Caller
from corun.types import Alternatives, Priority, ResumePoint, Tokens
from router.attempt import SampleTask
from router.clock import loop_time
from router.output import Outbox, SampleOutput
from router.placement import beginnings_of
from router.prompts import Model, PromptEncoder
from router.queue import QueueEntry
from router.sample import RunContext, SampleRun
from router.text import Tokenizer

T = TypeVar("T")
SEED_KEY_BYTES = 32
"""The length of the key that a router draws if it is given none."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A client's request, as it came."""

    prompt: str | Sequence[int]
    """The prompt as text or token ids. No work per token has been done for it yet."""
    params: SamplingParams
    request_id: str = ""
    """The request's id. If it is empty, the router draws one."""
    seed: int | None = None
    """The request's seed. If it is None, the router derives one from the request id."""
    resume: tuple[ResumePoint, ...] = ()
    """The output of each sample that an earlier call delivered."""
    fingerprint: str = ""
    """The fingerprint of the contract that the earlier call ran under; empty allows any contract."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    span: Span = OFF
    token_texts: bool = False
    """Whether the client wants the text of each token."""


class RunningRequest:
    """The running samples of one request. The caller must close it in every case."""

    def __init__(self, tasks: Sequence[asyncio.Task[None]], outbox: Outbox, tokenizer: Tokenizer) -> None:
        self._tasks = tasks
        self.outbox = outbox
        self.tokenizer = tokenizer
        """The tokenizer of the model that runs."""

    @property
    def num_samples(self) -> int:
        return len(self._tasks)

    async def to_end(self) -> tuple[str, list[Alternatives], Receipt]:
        """Wait for the end of a request with one sample, and close it. Return its text, the alternatives of its tokens
        with their texts, and its receipt."""
        text, tops, arrived = "", list[Alternatives](), asyncio.Event()
        self.outbox.ready = arrived.set
        try:
            while True:
                arrived.clear()
                for piece in self.outbox.take():
                    text += piece.text
                    tops += [
                        each._replace(texts=self.tokenizer.texts_alone(each.token_ids)) for each in piece.tops or ()
                    ]
                    if piece.receipt is not None:
                        return text, tops, piece.receipt
                await arrived.wait()  # This ends, because each sample ends by its own deadline at the latest.
        finally:
            await self.close()

    def cancel(self) -> None:
        """Cancel the samples that still run, without waiting for their end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel the samples that still run, and wait for their end."""
        self.cancel()
        if running := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(running)  # This is short: a cancelled sample does not wait for anything.
        self.outbox.overflowed = None  # A cycle would keep all that the samples were, for a garbage collection to find.


class RequestRunner:
    """Expands requests into samples and runs them."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._registry, self._queue, self._config = context.registry, context.queue, context.config
        self._seed_key = context.config.seed_key_bytes or secrets.token_bytes(SEED_KEY_BYTES)
        self._texts = PromptEncoder()

    def close(self) -> None:
        """End the tokenizer threads. Call it when no request is accepted any more."""
        self._texts.close()

    async def accept(self, request: Request, deadline: float) -> list[SampleTask]:
        """Check a request and return its samples that must run. Nothing is reserved for them yet.

        Raises:
            InvalidArgumentError: the request cannot be run; the error names field, value and limit.
            ContractMismatchError: it began under another contract or seed key, so its rest would have other bits.
            OverloadedError: there is no room, or not in time. This is checked before the prompt is processed.
            PermissionDeniedError: the caller may not ask for this priority.
            UnavailableError: nodes were missing until `deadline` or for `node_wait_s`.
        """
        check_priority(request.priority, request.caller)
        tokens = 1 if isinstance(request.prompt, str) else len(request.prompt)  # A text has at least one token.
        with self._queue.arriving(request.params.n, tokens, deadline, caller=request.caller, priority=request.priority):
            return await self._accept(request, deadline)

    async def _accept(self, request: Request, deadline: float) -> list[SampleTask]:
        arrived, name = loop_time(), request.caller.name
        if not request.prompt:
            raise InvalidArgumentError("prompt", Shown("nothing"), "must be text or token ids, at least one")
        request_id = check_request_id(request.request_id) or secrets.token_hex(16)
        seed = derive_seed(self._seed_key, request_id) if request.seed is None else check_seed(request.seed)
        received = _received(request, seed)
        model = await self.model(deadline)
        fingerprint = self._registry.contract.fingerprint
        if request.fingerprint not in ("", fingerprint):
            differences = {"fingerprint": (request.fingerprint, fingerprint)}
            raise ContractMismatchError("the request began under another contract", differences)
        if isinstance(request.prompt, str):
            prompt = await self._texts.encode(request.prompt, model, deadline, name)
        else:
            check_lengths(len(request.prompt), 1, model.max_model_len)
            prompt = tuple(request.prompt[:])  # A slice of a message's list takes less time than asking for each id.
        self.check(prompt, request.params, model)
        digest, params_digest = prompt_digest(prompt), request.params.digest()
        scope = f"client {name}" if self._config.share_kv else ""
        beginnings = beginnings_of(prompt, scope)
        return [
            SampleTask(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt,
                prompt_digest=digest,
                params=request.params,
                params_digest=params_digest,
                seed=sample_seed(seed, index),
                deadline=deadline,
                received=received.get(index),
                caller=request.caller,
                priority=request.priority,
                arrived=arrived,
                # A resumed sample is compared with what the client has, so it must not read KV that may have been wrong
                # in the earlier call.
                share_scope="" if index in received else scope,
                beginnings=beginnings,
                span=request.span,
                token_texts=request.token_texts,
            )
            for index in range(request.params.n)
            if index not in received or not received[index].done
        ]

    async def model(self, deadline: float) -> Model:
        """Wait until nodes are ready, and return the cluster's model."""
        return await self._registry.wait_ready(min(deadline, loop_time() + self._config.node_wait_s))

    def check(self, prompt: tuple[int, ...], params: SamplingParams, model: Model) -> None:
        """Raise InvalidArgumentError if this model cannot run the request, or if no node has KV room for it."""
        check_prompt(prompt, params.max_tokens, model.max_model_len, model.vocab_size)
        check_vocabulary(params, model.vocab_size)
        if params.constraint is not None and not self._registry.contract.computes_with("llguidance"):
            limit = "must be unset: these decode nodes do not follow constraints, by their contract"
            raise InvalidArgumentError("sampling_params.structured_outputs", Shown(params.constraint[0]), limit)
        total = len(prompt) + params.max_tokens
        if not self._registry.missing() and not self._registry.could_hold(total):
            limit = f"must leave prompt and output, {total} tokens, room in the KV of a decode node"
            raise InvalidArgumentError("sampling_params.max_tokens", params.max_tokens, limit)

    async def tokenize(self, text: str, deadline: float, caller: Caller, *, special: bool, spelled: bool) -> Tokens:
        """Return the tokens that a text prompt becomes; without those that the tokenizer adds unless `special`."""
        model = await self.model(deadline)
        ids = await self._texts.encode(text, model, deadline, caller.name, special=special)
        if not spelled:
            return Tokens(token_ids=ids, tokens=())
        # A long prompt's spellings take a tenth of a second.
        spellings = partial(model.tokenizer.spellings, ids)
        return Tokens(token_ids=ids, tokens=await self.read(spellings, len(ids), deadline, caller))

    async def detokenize(self, token_ids: Sequence[int], deadline: float, caller: Caller) -> str:
        """Return the text of token ids. There may be as many as the model's length."""
        model = await self.model(deadline)
        if len(token_ids) > model.max_model_len:
            limit = f"must be at most the model's length, {model.max_model_len}"
            raise InvalidArgumentError("token_ids", Shown(f"{len(token_ids)} tokens"), limit)
        ids = check_token_ids(token_ids, model.vocab_size, "token_ids")
        return await self.read(partial(model.tokenizer.decode, ids, special=True), len(ids), deadline, caller)

    async def read(
        self, work: Callable[[], T], num_tokens: int, deadline: float, caller: Caller, *, is_due: bool = False
    ) -> T:
        """Return what `work` makes of so many tokens with a tokenizer, in one of few threads, where callers take turns.
        is_due: as in `PromptEncoder.read`.

        Raises OverloadedError if too much waits there, DeadlineError.
        """
        return await self._texts.read(work, num_tokens, deadline, caller.name, is_due=is_due)

    async def is_text_of(
        self, text: str, prompt: tuple[int, ...], model: Model, deadline: float, caller: Caller
    ) -> bool:
        """Return whether a request with this text would be computed from these token ids."""
        return await self._texts.encode(text, model, deadline, caller.name) == prompt

    def start(self, samples: Sequence[SampleTask]) -> RunningRequest:
        """Queue the samples of one request, in order, and run them. Raises OverloadedError if the queue is full."""
        model = self._registry.model
        assert model is not None  # The samples were checked against it.
        first = samples[0]
        needs = [sample.need for sample in samples]
        entries = self._queue.enter(needs, caller=first.caller, priority=first.priority)
        outbox = Outbox(self._config.max_unsent_tokens)
        tasks = [
            self._queue.run(entry, self._run(sample, entry, outbox, model))
            for sample, entry in zip(samples, entries, strict=True)
        ]
        running = RunningRequest(tasks, outbox, model.tokenizer)
        outbox.overflowed = running.cancel  # The reader may be blocked where it cannot see the error yet.
        return running

    async def _run(self, sample: SampleTask, entry: QueueEntry, outbox: Outbox, model: Model) -> None:
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
            await SampleRun(self._context, sample, entry, output).run()
        except CorunError as error:
            outbox.fail(error)
        except Exception as error:
            outbox.fail(internal_error(error, str(sample), log))


def check_priority(priority: Priority, caller: Caller) -> None:
    """Raise PermissionDeniedError if the caller may not ask for this priority."""
    order, most = list(Priority), caller.max_priority
    if order.index(priority) < order.index(most):
        limit = f"must be {most.value} or lower for client {caller.name}"
        raise PermissionDeniedError("priority", priority.value, limit)


def _received(request: Request, seed: int) -> dict[int, ResumePoint]:
    """Return the output that the client has, by sample index. Raises InvalidArgumentError if the resume points are not
    valid, and ContractMismatchError if they were drawn from other seeds than this router gives."""
    if request.resume and not request.request_id:
        raise InvalidArgumentError("request_id", request.request_id, "must be set to resume a request")
    params, found = request.params, dict[int, ResumePoint]()
    for number, point in enumerate(request.resume):
        name = f"resume[{number}]"
        if point.sample_index >= params.n:
            raise InvalidArgumentError(f"{name}.sample_index", point.sample_index, f"must be below n, {params.n}")
        if point.num_tokens > params.max_tokens:
            limit = f"must be at most max_tokens, {params.max_tokens}"
            raise InvalidArgumentError(f"{name}.num_tokens", point.num_tokens, limit)
        if point.sample_index in found:
            raise InvalidArgumentError(f"{name}.sample_index", point.sample_index, "must be given once")
        found[point.sample_index] = point
        own = sample_seed(seed, point.sample_index)
        if point.seed != own:  # Routers of one cluster share a seed key, so this router has another key.
            differences = {f"{name}.seed": (str(point.seed), str(own))}
            raise ContractMismatchError("the request began with another seed than this router gives it", differences)
    if len(found) == params.n and all(point.done for point in found.values()):
        raise InvalidArgumentError("resume", Shown("all samples done"), "must leave a sample to run")
    return found
