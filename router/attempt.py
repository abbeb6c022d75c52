"""One attempt to run a sample on one pair of nodes: the calls, and all that it holds there.

Owns: what a sample is, the order of the calls to both nodes, their deadlines, and which errors are a node's fault. An
attempt ends with its tokens, with an error, or with a node fault; `Attempt.close` gives back its lease, KV and claims
in every case. This module must not know queues, or what follows from a fault.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from corun.config.fields import RouterConfig
from corun.errors import (
    CancelledByPeerError,
    CorunError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    StaleGenerationError,
    UnavailableError,
)
from corun.observe.tracing import OFF, Span, Value
from corun.params import SamplingParams
from corun.receipt import Receipt, certificates_digest
from corun.rpc.auth import ANYONE, Caller
from corun.types import FinishReason, Priority, ResumePoint
from router.clock import loop_time
from router.nodes.node import Node, Placement, PrefillNode
from router.nodes.node_client import Handle, RemoteLease
from router.output import Output
from router.placement import Need

LOOK_S = 0.5
"""The seconds between two looks at the nodes of a sample that has no token yet: whether the one that holds its KV is
still there, and whether the one that decodes has a slot."""
_OF_CLIENTS = ("prompt.", "sampling_params", "seed", "continuations")
"""The prefixes of the fields that come from a client's request. All other fields of a call to a node come from the
router or a prefill node."""
_OF_PREFILL = "handle."
"""The prefix of the fields of a call to a decode node that come from a prefill node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTask:
    """One sample of a checked request: what is to be computed, and for whom."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    prompt_digest: str
    """The digest of the prompt's token ids (`corun.receipt.prompt_digest`)."""
    params: SamplingParams
    params_digest: str
    """Their digest. It is made once for all samples of a request: with the longest list of biases it takes 1 ms."""
    seed: int
    deadline: float
    """The time by which the sample must have ended, on the loop's clock."""
    received: ResumePoint | None = None
    """The output of this sample that the client has from an earlier call."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    arrived: float | None = None
    """When the sample's request came, on the loop's clock; None if no client's request came for it."""
    share_scope: str = ""
    """The scope in which equal prompts may share KV, such as one client; empty if the sample shares none."""
    beginnings: tuple[bytes, ...] = ()
    """The prompt's beginnings in this scope (`router.placement.beginnings_of`)."""
    isolated: bool = False
    """Whether the prompt is computed as the contract says and in no other way, because another run is compared with
    this one. Such a sample has no share scope."""
    span: Span = field(default=OFF, repr=False, compare=False)
    """The span of the sample's request."""
    token_texts: bool = False
    """Whether the client wants the text of each token."""

    @property
    def need(self) -> Need:
        """The need of the sample's first attempt."""
        kv_key = self.share_scope and f"{self.prompt_digest} {self.share_scope}"
        return Need(
            num_prompt=len(self.prompt_token_ids),
            max_tokens=self.params.max_tokens,
            kv_key=kv_key,
            beginnings=self.beginnings if self.share_scope else (),
        )

    @property
    def facts(self) -> dict[str, Value]:
        """The attributes of the span of each attempt. They contain nothing of the prompt's text."""
        return {
            "corun.sample_index": self.index,
            "gen_ai.request.seed": self.seed,
            "gen_ai.usage.input_tokens": len(self.prompt_token_ids),
        }

    def __str__(self) -> str:
        return f"sample {self.index} of request {self.request_id!r}"


class NodeFaultError(Exception):
    """A node failed this attempt. Another attempt may succeed."""

    def __init__(self, node: Node[Any], error: CorunError) -> None:
        super().__init__(f"{node.info.ref}: {error}")
        self.node = node
        self.error = error

    @property
    def is_loss(self) -> bool:
        """Whether the node went away in the attempt. Otherwise it answered with an error of its own."""
        gone = isinstance(self.error, (UnavailableError, StaleGenerationError, CancelledByPeerError))
        return gone or self.node.is_gone

    @property
    def is_planned(self) -> bool:
        """Whether the node was told to end. Its refusal may say so before its heartbeat does: a node that refuses for
        another reason names no time for another try."""
        refuses = isinstance(self.error, UnavailableError) and self.error.retry_after_s is not None
        return refuses or self.node.is_leaving

    def doubts_kv(self, num_tokens: int) -> bool:
        """Return whether the KV may have been wrong. This is so if the decode node answered with an error, or not in
        time, and drew no token from the KV. A node that went away tells nothing about its KV. num_tokens: the tokens of
        the attempt."""
        return not (isinstance(self.node, PrefillNode) or self.is_loss or num_tokens)


class Attempt:
    """One attempt of one sample on one pair of nodes, with the lease and the KV that it holds there."""

    def __init__(
        self,
        task: SampleTask,
        placement: Placement,
        output: Output,
        config: RouterConfig,
        span: Span = OFF,
        *,
        more_follow: bool = False,
    ) -> None:
        """Create the attempt. more_follow: whether other samples that may get the same KV wait in the queue."""
        self.task = task
        self.placement = placement
        self.output = output
        self.span = span
        self._more_follow = more_follow
        self._config = config
        after_rows = placement.need.tokens_before_ending, placement.note_ending
        self._lease = RemoteLease(output.take, task.params.max_tokens, (task, output), after_rows)
        self._is_started = False
        """Whether the sample was started with its prompt."""
        self._prefill_id = ""  # It is set while the prefill node may hold KV for this attempt.

    @property
    def first_token_at(self) -> float | None:
        """When the attempt's first token came, on the loop's clock; None if there was none."""
        return self._lease.first_row_at

    @property
    def _comes_with_prompt(self) -> bool:
        """Whether the sample goes to one engine together with its prompt."""
        # The node tries constraints at a start, and the prompt must not wait for that.
        return self.placement.is_one_engine and self.task.params.constraint is None

    async def reserve(self) -> None:
        """Lease KV room and a place in line for a slot. Raises OverloadedError if the node has no room now.

        The lease of a sample that comes with its prompt is reserved by the prefill call.
        """
        if self._comes_with_prompt:
            return
        with faults_of(self.placement.decode, passing=OverloadedError), self.span.child("reserve"):
            await self.placement.decode.client.reserve(
                self._lease,
                num_prompt_tokens=len(self.task.prompt_token_ids),
                max_tokens=self.task.params.max_tokens,
                share_key=self.placement.need.kv_key,  # The claim counts shared blocks once by it, as the lease will.
                timeout_s=self._time(self._config.reserve_timeout_s),
            )

    async def prefill(self) -> Handle:
        """Compute the prompt's KV and return its handle. If one engine does both, this reserves the lease, as `reserve`
        does otherwise, and starts the sample with its prompt."""
        self._prefill_id = secrets.token_hex(12)
        decode, share_key, sample = self.placement.decode.client, self.placement.need.kv_key, None
        if self._comes_with_prompt:
            given: dict[str, Any] = {"params": self.task.params, "seed": self.task.seed, "share_key": share_key}
            sample = decode.with_prompt(self._lease, self._prefill_id, **given)
        refused: type[CorunError] | tuple[()] = () if sample is None else OverloadedError
        try:
            with faults_of(self.placement.prefill, passing=refused), self.span.child("prefill") as span:
                computed = await self.placement.prefill.client.prefill(
                    self._prefill_id,
                    self.task.prompt_token_ids,
                    self.placement.decode.info.ref,
                    self._time(),
                    span.metadata,
                    idle_s=self._config.prefill_timeout_s,
                    share_scope=self.task.share_scope if share_key else "",
                    more_follow=self._more_follow,
                    isolated=self.task.isolated,
                    sample=sample,
                )
        except OverloadedError as error:
            if self._lease.lease_id is not None:  # The sample may have begun, so this attempt counts.
                broken = InternalError(f"it refused a sample whose room it had leased: {error}")
                raise NodeFaultError(self.placement.prefill, broken) from error
            decode.note_refused(self._prefill_id)
            self._prefill_id = ""  # It has no KV.
            raise
        if sample is not None and self._lease.lease_id is None:
            decode.note_granted(self._prefill_id, computed.lease_id)
        self._is_started = computed.started
        self.placement.cached_tokens = computed.handle.cached_tokens
        self.placement.leave(is_computed=True)
        return computed.handle

    async def decode(self, handle: Handle) -> FinishReason:
        """Decode all tokens from the prompt's KV. They go to the output as they come."""
        lease, node, source = self._lease, self.placement.decode, self.placement.prefill
        with self.span.child("decode") as span, faults_of(node):
            try:
                await self.start(handle)
                while not lease.ended.done():
                    if lease.has_kv and node.is_full and not self.output.position:
                        node.client.excuse(lease)  # Waiting in line for a slot is no silence.
                    left = self._config.step_timeout_s - node.client.silent_s(lease)
                    if left <= 0:
                        missing = "no token" if lease.has_kv else "the KV was not read"
                        raise DeadlineError(f"{missing} for {self._config.step_timeout_s:g} s")
                    if not lease.has_kv and (reason := source.no_source):
                        raise NodeFaultError(source, UnavailableError(f"{source.node_id}: {reason}"))
                    if not self.output.position:
                        left = min(left, LOOK_S)
                    await asyncio.wait((lease.ended,), timeout=self._time(left))
                return lease.ended.result()
            finally:
                if self.first_token_at is not None:
                    span.event("first_token", self.first_token_at)

    async def start(self, handle: Handle) -> None:
        """Hand the KV over to the decode node. A handle that it refuses to read is a fault of the prefill node."""
        if self._is_started:
            self.placement.decode.client.excuse(self._lease)
            return
        try:
            await self.placement.decode.client.start(
                self._lease,
                handle,
                prompt_token_ids=self.task.prompt_token_ids,
                params=self.task.params,
                seed=self.task.seed,
                timeout_s=self._time(self._config.step_timeout_s),
                metadata=self.span.metadata,
            )
        except InvalidArgumentError as error:
            if error.field.startswith(_OF_PREFILL):
                raise NodeFaultError(self.placement.prefill, error) from error
            raise

    def close(self) -> None:
        """Give back all that the attempt holds. This never waits: calls to nodes run in the background."""
        self.placement.leave()
        with ExitStack() as unread:
            self.leave_kv(unread)
        self.placement.decode.client.release(self._lease, self.placement.free)

    def leave_kv(self, kept: ExitStack) -> None:
        """Leave KV that was not read on the prefill node for another attempt, until `kept` is closed. Call this before
        `close`."""
        name, self._prefill_id = self._prefill_id, ""
        if name and not self._lease.has_kv:
            kept.callback(self.placement.prefill.client.release_kv, name)

    def _time(self, longest_s: float = math.inf) -> float:
        """Return the seconds until the sample's deadline, at most `longest_s`. Raises DeadlineError if none is left."""
        left = self.task.deadline - loop_time()
        if left <= 0:
            raise DeadlineError(f"the deadline passed in an attempt of {self.task}")
        return min(left, longest_s)


def receipt_of(
    task: SampleTask, fingerprint: str, output: Output, placement: Placement, reason: FinishReason
) -> Receipt:
    """Return the receipt of an attempt that has ended."""
    prefill, decode = placement.prefill.info, placement.decode.info
    return Receipt(
        fingerprint=fingerprint,
        request_id=task.request_id,
        sample_index=task.index,
        seed=task.seed,
        prompt_digest=task.prompt_digest,
        params_digest=task.params_digest,
        output_digest=output.hexdigest(),
        num_prompt_tokens=len(task.prompt_token_ids),
        num_output_tokens=output.num_tokens,
        finish_reason=reason,
        prefill_node=prefill.ref,
        decode_node=decode.ref,
        tokens_digest=output.tokens_hexdigest(),
        cached_tokens=placement.cached_tokens,
        certificates=certificates_digest(prefill.certificate, decode.certificate),
    )


@contextmanager
def faults_of(node: Node[Any], passing: type[CorunError] | tuple[()] = ()) -> Iterator[None]:
    """Turn the errors of calls to a node into faults of that node, except `passing` and errors in the client's own
    fields."""
    try:
        yield
    except passing:
        raise
    except CorunError as error:
        if isinstance(error, InvalidArgumentError) and error.field.startswith(_OF_CLIENTS):
            raise  # The engine refuses the request, and another attempt would not change that.
        raise NodeFaultError(node, error) from error
