"""Scores: the log probabilities of given tokens, which a prefill node computes alone.

A continuation is placed and computed like a prompt, together with the prompt before it. It takes no slot, and its KV is
read by nobody. Owns: the checks of a request, and the attempts of its continuations: a node fault leads to another one,
on another node. This module must not know gRPC messages or how nodes are found.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from corun.completion import Prompt, Score, Scores
from corun.errors import DeadlineError, InvalidArgumentError, Shown, UnavailableError, renaming
from corun.observe.tracing import OFF, Span
from corun.params import check_continuations, check_request_id, check_scored_lengths, check_token_ids
from corun.receipt import output_digest
from corun.rpc.auth import ANYONE, Caller
from corun.types import Priority, TokenScores
from router.attempt import NodeFaultError, faults_of
from router.clock import loop_time
from router.faults import Faults
from router.nodes.node import PrefillNode
from router.nodes.node_client import NotFiniteError
from router.placement import Need, beginnings_of
from router.prompts import Model
from router.queue import QueueEntry
from router.request import RequestRunner, check_priority
from router.sample import RunContext
from router.text import Tokenizer

TOKENS_BEFORE = 16
"""How many of a prompt's last tokens the text of its continuation may depend on: it may begin within a character."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """A client's request, as it came."""

    prompt: Prompt
    continuations: Sequence[Prompt]
    request_id: str = ""
    """The request's id. If it is empty, the router draws one."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    span: Span = OFF
    token_texts: bool = False
    """Whether the client wants the texts of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTask:
    """One continuation of a checked request."""

    name: str
    """What logs and errors call it."""
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    deadline: float
    """The time by which it must have been scored, on the loop's clock."""
    share_scope: str
    """The scope in which prompts that begin alike may share KV; empty if it shares none."""
    span: Span

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.continuation)


class ScoreRunner:
    """Checks requests and runs their continuations."""

    def __init__(self, context: RunContext, requests: RequestRunner) -> None:
        self._context = context
        self._registry, self._queue = context.registry, context.queue
        self._requests = requests

    async def score(self, request: ScoreRequest, deadline: float) -> Scores:
        """Return the scores of all continuations.

        Raises:
            InvalidArgumentError: the request cannot be run; the error names field, value and limit.
            OverloadedError: there is no room, or not in time. This is checked before any text is tokenized.
            PermissionDeniedError: the caller may not ask for this priority.
            DeadlineError: the deadline has passed.
            UnavailableError: nodes are missing, or failed `max_attempts` attempts.
        """
        check_priority(request.priority, request.caller)
        check_continuations(request.continuations)
        request_id = check_request_id(request.request_id) or secrets.token_hex(16)
        tokens = _least_tokens(request.prompt) + min(map(_least_tokens, request.continuations))
        arriving = self._queue.arriving(
            len(request.continuations), tokens, deadline, caller=request.caller, priority=request.priority
        )
        with arriving:
            prompt, continuations = await self._tokens(request, deadline)
        name = request.caller.name
        scope = f"client {name}" if self._context.config.share_kv else ""
        beginnings = beginnings_of(prompt, scope)
        needs = [
            Need(num_prompt=len(prompt) + len(each), max_tokens=0, beginnings=beginnings, is_score=True)
            for each in continuations
        ]
        entries = self._queue.enter(needs, caller=request.caller, priority=request.priority)
        tasks = [
            ScoreTask(
                name=f"score {i} of request {request_id!r}",
                prompt=prompt,
                continuation=each,
                deadline=deadline,
                share_scope=scope,
                span=request.span,
            )
            for i, each in enumerate(continuations)
        ]
        found = Scores(
            request_id=request_id,
            fingerprint=self._registry.contract.fingerprint,
            prompt_token_ids=prompt,
            scores=tuple(await self._all(tasks, entries)),
        )
        model = self._registry.model
        assert model is not None  # The tokens were checked against it.
        if not request.token_texts:
            return found
        count = len(prompt) + 2 * sum(map(len, continuations))
        texts = partial(_with_texts, found, model.tokenizer)
        return await self._requests.read(texts, count, deadline, request.caller, is_due=True)

    async def _all(self, tasks: Sequence[ScoreTask], entries: Sequence[QueueEntry]) -> list[Score]:
        """Run all continuations. The first error ends the others, and so does the end of the call."""
        runs = [
            self._queue.run(entry, ScoreRun(self._context, task, entry).run())
            for task, entry in zip(tasks, entries, strict=True)
        ]
        try:
            return await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.wait(runs)  # This is short: a cancelled run does not wait for anything.

    async def _tokens(self, request: ScoreRequest, deadline: float) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the checked token ids of the prompt and of each continuation."""
        model = await self._requests.model(deadline)
        least = [_least_tokens(each) for each in request.continuations]  # Token ids are copied if there may be so many.
        check_scored_lengths(_least_tokens(request.prompt), least, model.max_model_len)
        prompt = await self._ids("prompt", request.prompt, model, deadline, request.caller)
        found = [
            await self._ids(f"continuations[{i}]", each, model, deadline, request.caller, special=False)
            for i, each in enumerate(request.continuations)
        ]
        check_scored_lengths(len(prompt), [len(each) for each in found], model.max_model_len)
        longest = len(prompt) + max(map(len, found))
        if not self._registry.missing() and not self._registry.could_hold(longest):
            limit = f"must leave prompt and continuation, {longest} tokens, room in the KV of a node"
            raise InvalidArgumentError("continuations", Shown(f"{longest} tokens"), limit)
        return prompt, found

    async def _ids(
        self, field: str, value: Prompt, model: Model, deadline: float, caller: Caller, *, special: bool = True
    ) -> tuple[int, ...]:
        if not isinstance(value, str):
            return check_token_ids(value, model.vocab_size, f"{field}.token_ids")
        with renaming(lambda _: f"{field}.text"):
            return (await self._requests.tokenize(value, deadline, caller, special=special, spelled=False)).token_ids


class ScoreRun:
    """The attempts to score one continuation."""

    def __init__(self, context: RunContext, task: ScoreTask, entry: QueueEntry) -> None:
        self._context = context
        self._task = task
        self._entry = entry
        self._faults = Faults(task.name, task.deadline, context.registry, context.config, context.metrics)

    async def run(self) -> Score:
        """Return the score. Raises the errors of `ScoreRunner.score`."""
        context = self._context
        while True:
            began = loop_time()
            placement = await context.queue.place(self._entry, self._task.deadline)
            context.metrics.queue_seconds.observe(loop_time() - began)
            still_before = context.registry.clock.still_s
            node = placement.prefill
            try:
                found = await self._attempt(node)
                placement.leave(is_computed=True)
                return self._finish(node, found)
            except NodeFaultError as fault:
                self._note_fault(fault, context.registry.clock.still_s - still_before)
            finally:
                placement.close()
            context.queue.again(self._entry, ran=True)

    async def _attempt(self, node: PrefillNode) -> TokenScores:
        """Have a node score the tokens once. Raises NodeFaultError if it fails, or has logits that are not finite."""
        left = self._task.deadline - loop_time()
        if left <= 0:
            raise DeadlineError(f"the deadline passed before {self._task.name} was computed")
        with self._task.span.child("score") as span, faults_of(node):
            found = await node.client.score(
                secrets.token_hex(12),
                # The sequence is made here, so that continuations that wait hold no copy of their prompt.
                self._task.prompt + self._task.continuation,
                len(self._task.continuation),
                left,
                span.metadata,
                idle_s=self._context.config.prefill_timeout_s,
                share_scope="" if self._faults.nodes or self._faults.not_finite else self._task.share_scope,
            )
        if not all(map(math.isfinite, (*found.logprobs, *found.top_logprobs))):
            raise NodeFaultError(node, NotFiniteError("the logits are not finite"))
        return found

    def _note_fault(self, fault: NodeFaultError, still_s: float) -> None:
        """Take a node fault into account (`Faults.note`), and prepare the next attempt. Raises the error that ends the
        score if there is no next attempt."""
        self._faults.note(fault, (fault.node.info.ref,), still_s)
        nodes, max_attempts, name = self._faults, self._context.config.max_attempts, self._task.name
        if nodes.lack_finite_logits:
            found = Shown(f"{self._task.num_tokens} tokens")
            raise InvalidArgumentError("continuations", found, f"has logits that are not finite ({nodes})") from fault
        if len(nodes.nodes) >= max_attempts:
            raise UnavailableError(f"nodes failed {len(nodes.nodes)} runs of {name} ({nodes})") from fault
        self._entry.need = self._entry.need.again(fault.node.node_id)

    def _finish(self, node: PrefillNode, found: TokenScores) -> Score:
        context = self._context
        self._faults.contradict((node.info.ref,))
        context.metrics.scored_tokens.inc(len(found.logprobs))
        return Score(
            token_ids=self._task.continuation,
            logprobs=found.logprobs,
            top_token_ids=found.top_token_ids,
            top_logprobs=found.top_logprobs,
            output_digest=output_digest(self._task.continuation, found.logprobs),
            equals_generation=context.registry.scores_equal_generation(node),
            prefill_node=node.info.ref,
            cached_tokens=found.cached_tokens,
        )


def _with_texts(scores: Scores, tokenizer: Tokenizer) -> Scores:
    """Return scores with the texts of their tokens. A continuation's texts go on from the last few of the prompt."""
    prompt = scores.prompt_token_ids
    before = prompt[-TOKENS_BEFORE:]
    found = []
    for score in scores.scores:
        texts = tokenizer.token_texts((*before, *score.token_ids))[len(before) :]
        found.append(replace(score, token_texts=texts, top_token_texts=tokenizer.texts_alone(score.top_token_ids)))
    return replace(scores, scores=tuple(found), prompt_token_texts=tokenizer.token_texts(prompt))


def _least_tokens(prompt: Prompt) -> int:
    return 1 if isinstance(prompt, str) else len(prompt)
