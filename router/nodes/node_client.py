"""Clients of prefill and decode nodes, one for each generation of a node.

Owns: every call to a node and its deadline, leases, the one step stream of a decode node, and the path from a row to
its sample. A failed call ends with a typed error. A call ends at once when its node is given up. This module must not
know samples, queues or which node is used for what.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from corun.errors import (
    CancelledByPeerError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    Shown,
    UnavailableError,
    from_rpc_error,
    is_answered,
)
from corun.observe.trace_context import Metadata
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import OPEN, Access, channel
from corun.types import (
    NO_ALTERNATIVES,
    Alternatives,
    FinishReason,
    NixlEndpoint,
    NodeInfo,
    NodeRef,
    TokenScores,
)
from corun.v1 import decode_service_pb2 as decode_pb2
from corun.v1 import decode_service_pb2_grpc, prefill_service_pb2_grpc
from corun.v1 import prefill_service_pb2 as prefill_pb2
from router.clock import AwakeClock, loop_time

CLEANUP_TIMEOUT_S = 5.0
"""The longest time of a call that only gives something back. If the call fails, the node frees it later by itself."""

GRANT_TIMEOUT_S = 1.0
"""How long room counts as held after a prefill call was given up, if the node tells of no lease for it. Nobody knows
whether such a call has reached the node."""

TakeToken = Callable[[int, float, Alternatives], bool]
"""A function that takes a token id, its log probability and its alternatives. It returns True if the sample ends with
this token."""

Handle = prefill_pb2.KvHandle
"""What a prefill node says of KV, for the decode node. The router passes it on as it came."""
AfterRows = tuple[int, Callable[[], None]]
"""A number of rows, and what to call when so many have come."""
_NEVER: AfterRows = 0, lambda: None

_sessions = itertools.count(1)
"""The numbers of this process's sessions. Each is higher than the one before."""

log = logging.getLogger(__name__)


class NodeClient:
    """The common part of the clients of both roles: the channel, calls, and giving a node up.

    clock: measures the node's silences.
    """

    def __init__(self, info: NodeInfo, clock: AwakeClock, access: Access = OPEN) -> None:
        self.ref = info.ref
        self._clock = clock
        self._channel = channel(info.address, access=access)
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self.computed_at = 0.0
        """When the node was last known to have computed a prompt, on the clock that stands still with the router
        (`router.clock`)."""

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    async def open(self, timeout_s: float) -> None:
        """Connect to the node for the first time. Raises UnavailableError if that takes longer than `timeout_s`."""
        ready = asyncio.ensure_future(self._channel.channel_ready())
        try:
            await self._clock.wait((ready,), timeout_s)
        finally:
            ready.cancel()
        if not ready.done():
            raise UnavailableError(f"{self.ref.node_id} could not be reached within {timeout_s:g} s")
        ready.result()

    def drop(self, reason: str) -> None:
        """Give the node up. Every call in flight ends with UnavailableError, and no further call is made."""
        if not self._gone.done():
            self._gone.set_result(reason)

    async def close(self) -> None:
        """Wait for the calls that give something back, then drop the node and close the channel."""
        if self._background and not self.is_gone:
            await asyncio.wait(set(self._background), timeout=CLEANUP_TIMEOUT_S)
        self.drop("the router is closing")
        if self._background:
            await asyncio.wait(set(self._background), timeout=CLEANUP_TIMEOUT_S)
        await self._channel.close(None)

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        request: object,
        timeout_s: float,
        metadata: Metadata = (),
        idle_s: float | None = None,
    ) -> Any:
        """Call a method of the node. Raises the call's error as a typed one, UnavailableError if the node is given up,
        and DeadlineError after `timeout_s`, or if the node computes no prompt for `idle_s`."""
        if self._gone.done():
            raise self._gone_error()
        began = self._clock.time()
        answer = asyncio.ensure_future(_answer(method, request, timeout_s, metadata))
        try:
            while not (answer.done() or self._gone.done()):
                left = None if idle_s is None else max(began, self.computed_at) + idle_s - self._clock.time()
                if left is not None and left <= 0:
                    raise DeadlineError(f"{self.ref.node_id} has computed no prompt for {idle_s:g} s")
                await asyncio.wait((answer, self._gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.add_done_callback(_retrieve)
            answer.cancel()  # This does nothing to a finished call.
        if not answer.done():
            raise self._gone_error()
        if answer.cancelled():  # grpc.aio reports CANCELLED from the other side in this way.
            raise CancelledByPeerError(f"{self.ref.node_id} cancelled the call")
        try:
            return answer.result()
        finally:
            del answer  # An error knows this frame, and would keep itself until a garbage collection.

    def _gone_error(self) -> UnavailableError:
        return UnavailableError(f"{self.ref.node_id}: {self._gone.result()}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class PrefillClient(NodeClient):
    """The calls to one prefill node."""

    def __init__(self, info: NodeInfo, clock: AwakeClock, access: Access = OPEN) -> None:
        super().__init__(info, clock, access)
        self._stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def prefill(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        reader: NodeRef,
        timeout_s: float,
        metadata: Metadata = (),
        *,
        idle_s: float,
        share_scope: str = "",
        more_follow: bool = False,
        isolated: bool = False,
        sample: prefill_pb2.PromptSample | None = None,
    ) -> prefill_pb2.PrefillResponse:
        """Compute a prompt's KV for one decode node, `reader`. `request_id` must be unique to this attempt. Cancelling
        this call drops the work.

        share_scope: the scope in which equal prompts may get the same KV; empty if it is computed for this call alone.
        idle_s: the longest time in which the node computes no prompt while this one waits. more_follow: whether other
        samples that may get the same KV wait. isolated: compute it as the contract says, and in no other way that gives
        the same bits. sample: one that the reader, which has the same engine, may start.

        Returns:
            the handle, as the decode node is going to get it, the sample's lease, and whether the sample was started.

        Raises InternalError if the node leased no room for the sample.
        """
        request = prefill_pb2.PrefillRequest(
            request_id=request_id,
            generation=self.ref.generation,
            prompt_token_ids=prompt_token_ids,
            reader=codec.node_ref_to_proto(reader),
            share_scope=share_scope,
            more_follow=more_follow,
            isolated=isolated,
            sample=sample,
        )
        response: prefill_pb2.PrefillResponse
        response = await self._computed(self._stub.Prefill, request, timeout_s, metadata, idle_s)
        if sample is not None and not response.lease_id:
            text = "leased no room with a prompt: upgrade it together with the routers"
            raise InternalError(f"{self.ref.node_id} {text}")
        return response

    async def score(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_scored: int,
        timeout_s: float,
        metadata: Metadata = (),
        *,
        idle_s: float,
        share_scope: str = "",
    ) -> TokenScores:
        """Score the last tokens of a sequence. `request_id`, `idle_s` and `share_scope`: as in `prefill`.

        Raises InternalError if the answer is not complete.
        """
        request = prefill_pb2.ScoreTokensRequest(
            request_id=request_id,
            generation=self.ref.generation,
            token_ids=token_ids,
            num_scored=num_scored,
            share_scope=share_scope,
        )
        response = await self._computed(self._stub.ScoreTokens, request, timeout_s, metadata, idle_s)
        scores = codec.token_scores_from_proto(response)
        if {len(scores.logprobs), len(scores.top_token_ids), len(scores.top_logprobs)} != {num_scored}:
            raise InternalError(f"{self.ref.node_id} did not score all of {num_scored} tokens")
        return scores

    async def _computed(
        self,
        method: Callable[..., Awaitable[Any]],
        request: object,
        timeout_s: float,
        metadata: Metadata,
        idle_s: float,
    ) -> Any:
        """Return what the node has computed, which shows that it works."""
        response = await self._call(method, request, timeout_s, metadata, idle_s)
        self.computed_at = self._clock.time()
        return response

    def release_kv(self, request_id: str) -> None:
        """Release KV that no decode node will read, in the background."""
        if not self.is_gone:
            self._spawn(self._release_kv(request_id))

    async def _release_kv(self, request_id: str) -> None:
        request = prefill_pb2.ReleaseKvRequest(request_id=request_id, generation=self.ref.generation)
        try:
            await self._call(self._stub.ReleaseKv, request, CLEANUP_TIMEOUT_S)
        except CorunError as error:
            log.warning("KV of %s on %s ends by its lease: %s", request_id, self.ref, error)


_CONSTRAINT = "sampling_params.structured_outputs"


class NotFiniteError(InternalError):
    """A node could draw no token because the logits were not finite. Other nodes get the same logits, unless one of the
    nodes is broken."""


class RemoteLease:
    """The router's side of a lease on a decode node: reserving, held, then ended. Its rows go to
    `take_token`, at most `max_tokens` of them: a node that sends more has failed."""

    __slots__ = (
        *("_after_rows", "_max_tokens", "_num_rows", "_take_token", "_then", "ended", "first_row_at", "granted_at"),
        *("has_kv", "heard_at", "lease_id", "place", "prefill_id", "reserving", "sample"),
    )

    def __init__(
        self, take_token: TakeToken, max_tokens: int, sample: Any = None, after_rows: AfterRows = _NEVER
    ) -> None:
        """Create a lease that is not reserved yet."""
        loop = asyncio.get_running_loop()
        self.lease_id: int | None = None
        self.reserving: asyncio.Future[Any] | None = None
        """It is done when it is known whether the node has granted the lease."""
        self.prefill_id = ""
        """The id of the prefill call that reserves it; empty if a call of its own does."""
        self.ended: asyncio.Future[FinishReason] = loop.create_future()
        self.ended.add_done_callback(_retrieve)
        self.heard_at = 0.0
        """When the lease was started, its KV had been read, its last row came, or its silence was excused, on the clock
        that stands still with the router (`router.clock`)."""
        self.has_kv = False
        """Whether the node has read the sample's KV, so that the prefill node is not needed any more."""
        self.first_row_at: float | None = None
        """When the first row came, on the loop's clock; None before it."""
        self.granted_at = 0.0
        """When the node granted the lease, on the loop's clock."""
        self.sample = sample
        """The task and the output that the lease is for. Only what people are told looks at it (`router.views`)."""
        self.place: int | None = None
        """Where people are shown the sample, if anybody has looked (`router.views`)."""
        self._take_token = take_token
        self._max_tokens = max_tokens
        self._num_rows = 0
        self._after_rows, self._then = after_rows

    def note_read(self, now: float) -> None:
        self.has_kv = True
        self.heard_at = now

    def row(self, token_id: int, logprob: float, tops: Alternatives, now: float) -> None:
        if self.ended.done():
            return
        self.heard_at = now
        if self.first_row_at is None:
            self.first_row_at = loop_time()
        self._num_rows += 1
        if self._num_rows > self._max_tokens:
            self.fail(InternalError(f"the node drew more than the sample's {self._max_tokens} tokens"))
            return
        if self._num_rows == self._after_rows:
            self._then()
        try:
            if self._take_token(token_id, logprob, tops):
                self.ended.set_result(FinishReason.STOP)
        except Exception:  # One sample's bug must not break the stream of all.
            log.exception("lease %s: a token could not be taken", self.lease_id)
            self.ended.set_exception(InternalError("a token could not be taken"))

    def end(self, reason: FinishReason, detail: str, *, not_finite: bool = False, invalid: bool = False) -> None:
        if self.ended.done():
            return
        if invalid:
            self.ended.set_exception(InvalidArgumentError(_CONSTRAINT, Shown("the constraint"), detail))
        elif reason is FinishReason.ERROR:
            kind = NotFiniteError if not_finite else InternalError
            self.ended.set_exception(kind(detail or "the node ended the sample without a reason"))
        else:
            self.ended.set_result(reason)

    def fail(self, error: CorunError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class DecodeClient(NodeClient):
    """The calls, leases and step stream of one decode node.

    The stream and the leases belong to a session. When the router comes back to the same node, the stream of the later
    session ends the leases that a dropped client left there. Nothing else ends a lease while the stream is open. So a
    client that does not know which leases it holds gives its session up.

    router_id: the id of this process, which no other process has.
    """

    def __init__(
        self,
        info: NodeInfo,
        router_id: str,
        on_lost: Callable[[str], None],
        clock: AwakeClock,
        access: Access = OPEN,
    ) -> None:
        super().__init__(info, clock, access)
        self._stub: Any = decode_service_pb2_grpc.DecodeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.router_id = router_id
        self.session = next(_sessions)
        self._on_lost = on_lost
        self._leases: dict[int, RemoteLease] = {}  # The leases that the node has granted to this client, by lease id.
        self._with_prompt: dict[str, RemoteLease] = {}  # Those that prefill calls reserve, by the call's request id.
        self._reading: asyncio.Task[None] | None = None

    @property
    def leases(self) -> Collection[RemoteLease]:
        """The leases that the node has granted to this client and that have not ended, oldest first."""
        return self._leases.values()

    def drop(self, reason: str) -> None:
        super().drop(reason)
        error = self._gone_error()
        leases = *self._leases.values(), *self._with_prompt.values()
        self._leases = {}
        for prefill_id in tuple(self._with_prompt):
            self.note_refused(prefill_id)
        for lease in leases:
            lease.fail(error)
        if self._reading is not None:
            self._reading.cancel()

    async def close(self) -> None:
        await super().close()
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=CLEANUP_TIMEOUT_S)

    async def open(self, timeout_s: float) -> None:
        """Open the step stream, and return when the node has answered on it. Raises UnavailableError otherwise."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reading = self._reading = asyncio.ensure_future(self._read_steps(opened))
        await self._clock.wait((opened, reading, self._gone), timeout_s)
        if not opened.done():
            self.drop(f"its step stream did not open within {timeout_s:g} s")
        if self._gone.done():
            raise self._gone_error()

    async def connect(self, peer: NixlEndpoint, timeout_s: float) -> None:
        """Make the NIXL connection from this decode node to a prefill node."""
        request = decode_pb2.ConnectRequest(generation=self.ref.generation, peer=codec.nixl_endpoint_to_proto(peer))
        await self._call(self._stub.Connect, request, timeout_s)

    async def reserve(
        self, lease: RemoteLease, *, num_prompt_tokens: int, max_tokens: int, share_key: str, timeout_s: float
    ) -> None:
        """Reserve KV room and a place in line for `lease`. share_key: as in `corun.v1.ReserveRequest`.

        Raises OverloadedError if the node has no room now, or keeps its room for routers that hold less. Raises
        DeadlineError if the node has not answered after `timeout_s`.

        After such a timeout or a cancellation, the call goes on for up to `timeout_s` + `CLEANUP_TIMEOUT_S` in all,
        because `release` must know whether the node granted it. A node that has not answered by then is given up.
        The same holds for a node whose answer is lost because the call breaks.
        """
        request = decode_pb2.ReserveRequest(
            router_id=self.router_id,
            session=self.session,
            generation=self.ref.generation,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            share_key=share_key,
        )
        lease.reserving = asyncio.ensure_future(self._reserve(lease, request, timeout_s + CLEANUP_TIMEOUT_S))
        lease.reserving.add_done_callback(_retrieve)
        await self._clock.wait((lease.reserving,), timeout_s)
        if not lease.reserving.done():
            raise DeadlineError(f"{self.ref} has not answered a reservation for {timeout_s:g} s")
        lease.reserving.result()

    def with_prompt(
        self, lease: RemoteLease, prefill_id: str, *, params: SamplingParams, seed: int, share_key: str
    ) -> prefill_pb2.PromptSample:
        """Return a sample as it goes with its prompt, in the prefill call of this id, which also reserves `lease`."""
        lease.prefill_id, lease.heard_at = prefill_id, self._clock.time()
        lease.reserving = asyncio.get_running_loop().create_future()
        self._with_prompt[prefill_id] = lease
        return prefill_pb2.PromptSample(
            sampling_params=codec.sampling_params_to_proto(params),
            seed=seed,
            router_id=self.router_id,
            session=self.session,
            share_key=share_key,
        )

    def note_granted(self, prefill_id: str, lease_id: int) -> None:
        """Note that a prefill call has reserved a lease, which its answer and the step stream tell. Give the lease back
        if nobody waits for it any more."""
        lease = self._with_prompt.pop(prefill_id, None)
        if lease is not None and lease.reserving is not None:
            self._hold(lease, lease_id)
            lease.reserving.set_result(None)
        elif lease_id not in self._leases and not self.is_gone:
            self._spawn(self._give_back(lease_id))

    def note_refused(self, prefill_id: str) -> None:
        """Note that a prefill call does not reserve the lease that came with it."""
        lease = self._with_prompt.pop(prefill_id, None)
        if lease is not None and lease.reserving is not None:
            lease.reserving.set_result(None)

    async def start(
        self,
        lease: RemoteLease,
        handle: Handle,
        *,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        timeout_s: float,
        metadata: Metadata,
    ) -> None:
        """Start decoding in the room of a lease. Rows follow on the step stream as soon as the sample has a slot."""
        request = decode_pb2.StartRequest(
            lease_id=lease.lease_id,
            generation=self.ref.generation,
            handle=handle,
            prompt_token_ids=prompt_token_ids,
            sampling_params=codec.sampling_params_to_proto(params),
            seed=seed,
        )
        lease.heard_at = self._clock.time()
        await self._call(self._stub.Start, request, timeout_s, metadata)

    def silent_s(self, lease: RemoteLease) -> float:
        """Return for how many seconds nothing was heard of a started lease. Only time in which this router could have
        read a message counts."""
        return self._clock.time() - lease.heard_at

    def excuse(self, lease: RemoteLease) -> None:
        """Do not count the silence of a lease until now, as when its sample was started with its prompt."""
        lease.heard_at = self._clock.time()

    def release(self, lease: RemoteLease, freed: Callable[[], None]) -> None:
        """End a lease in any state, in the background. Call `freed` once, when its room is free again."""
        undecided = lease.reserving is not None and not lease.reserving.done()
        if undecided:  # Rows that come with its grant are nobody's.
            lease.fail(InternalError("the lease was given up"))
        held = lease.lease_id is not None and self._leases.pop(lease.lease_id, None) is not None
        if undecided or held:
            self._spawn(self._release(lease, freed))
        else:  # The lease was never granted, was ended by the node, or was lost with the node.
            freed()

    async def _reserve(self, lease: RemoteLease, request: decode_pb2.ReserveRequest, timeout_s: float) -> None:
        response = await self._call(self._answered_reserve, request, timeout_s)
        self._hold(lease, response.lease_id)

    async def _answered_reserve(self, request: decode_pb2.ReserveRequest, **options: Any) -> decode_pb2.ReserveResponse:
        """Call `Reserve`. Give the node up if the call ends without an answer of it: it may have granted a lease, and
        nobody knows the lease's id. The step stream may stand nevertheless, on an older connection."""
        try:
            response: decode_pb2.ReserveResponse = codec.readable(await self._stub.Reserve(request, **options))
            return response
        except InternalError as error:
            self._give_up(f"it has not answered a reservation: {error}")
            raise
        except grpc.aio.AioRpcError as error:
            if not is_answered(error):
                self._give_up(f"it has not answered a reservation: {from_rpc_error(error)}")
            raise
        except asyncio.CancelledError:  # grpc.aio reports CANCELLED from the other side in this way.
            self._give_up("it has not answered a reservation: the call was cancelled")
            raise

    def _hold(self, lease: RemoteLease, lease_id: int) -> None:
        """Note that a lease is granted. Give the node up if another one has its id: rows could be of either."""
        lease.lease_id, lease.granted_at = lease_id, loop_time()
        if lease_id in self._leases:
            self._give_up(f"it granted lease {lease_id} twice")
            lease.fail(self._gone_error())
        else:
            self._leases[lease_id] = lease

    async def _release(self, lease: RemoteLease, freed: Callable[[], None]) -> None:
        try:
            if lease.prefill_id and lease.reserving is not None:
                await asyncio.wait((lease.reserving,), timeout=GRANT_TIMEOUT_S)
                self.note_refused(lease.prefill_id)  # If it is granted all the same, it is given back then.
            elif lease.reserving is not None:
                await asyncio.wait((lease.reserving,))  # The call's own timeout bounds this wait.
            if lease.lease_id is not None:
                self._leases.pop(lease.lease_id, None)
                await self._give_back(lease.lease_id)
        finally:
            freed()

    async def _give_back(self, lease_id: int) -> None:
        request = decode_pb2.ReleaseRequest(lease_id=lease_id, generation=self.ref.generation)
        try:
            await self._call(self._stub.Release, request, CLEANUP_TIMEOUT_S)
        except CorunError as error:
            self._give_up(f"a lease could not be released: {error}")

    def _give_up(self, reason: str) -> None:
        """Report the node as lost, unless it was given up before."""
        if not self.is_gone:
            self.drop(reason)
            self._on_lost(reason)

    async def _read_steps(self, opened: asyncio.Future[None]) -> None:
        """Read the step stream until it ends. Its end means that the node is lost, unless it was given up before."""
        request = decode_pb2.StreamStepsRequest(
            router_id=self.router_id, generation=self.ref.generation, session=self.session
        )
        reason, expected = "its step stream ended", 0
        try:
            async for answer in self._stub.StreamSteps(request):
                message: decode_pb2.StreamStepsResponse = codec.readable(answer)
                if message.step != expected:
                    raise DataLossError(f"message {message.step} came instead of {expected}")
                expected += 1
                if not opened.done():
                    opened.set_result(None)
                self._on_step(message)
        except grpc.aio.AioRpcError as error:
            reason = f"its step stream broke: {from_rpc_error(error)}"
        except CorunError as error:
            reason = f"its step stream is broken: {error}"
        finally:  # This includes CANCELLED from the other side, which grpc.aio raises as a CancelledError.
            self._give_up(reason)

    def _on_step(self, message: decode_pb2.StreamStepsResponse) -> None:
        """Deliver the rows of one decode step. This is the hot path: the work per row is constant, and no task is woken
        for a row."""
        now = self._clock.time()
        leases = self._leases
        if not len(message.lease_ids) == len(message.token_ids) == len(message.logprobs):
            raise DataLossError(f"message {message.step} has columns of different lengths")
        for grant in message.granted:
            self.note_granted(grant.request_id, grant.lease_id)
        for lease_id in message.read:
            if (lease := leases.get(lease_id)) is not None:
                lease.note_read(now)
        columns = message.lease_ids, message.token_ids, message.logprobs
        none = itertools.repeat(NO_ALTERNATIVES, len(message.lease_ids))
        tops = _alternatives(message) if message.alternatives else none
        for lease_id, token_id, logprob, own in zip(*columns, tops, strict=True):
            lease = leases.get(lease_id)
            if lease is not None:
                lease.row(token_id, logprob, own, now)
        for end in message.ended:
            ended = leases.pop(end.lease_id, None)
            if ended is None:
                continue
            try:
                reason = codec.finish_reason_from_proto(end.finish_reason) or FinishReason.ERROR
            except InvalidArgumentError:  # A later version may know more reasons.
                ended.fail(InternalError(f"the node ended the sample for reason {end.finish_reason}, unknown here"))
            else:
                ended.end(reason, end.detail, not_finite=end.not_finite, invalid=end.invalid)


def _alternatives(message: decode_pb2.StreamStepsResponse) -> list[Alternatives]:
    """Return the alternatives of each row of a step. Raises DataLossError if they are not those of rows."""
    found = [NO_ALTERNATIVES] * len(message.lease_ids)
    for each in message.alternatives:
        if each.row >= len(found) or not len(each.token_ids) == len(each.logprobs) > 0:
            raise DataLossError(f"message {message.step} has alternatives that are not those of a row")
        found[each.row] = Alternatives(tuple(each.token_ids), tuple(each.logprobs))
    return found


async def _answer(method: Callable[..., Awaitable[Any]], request: object, timeout_s: float, metadata: Metadata) -> Any:
    try:
        return codec.readable(await method(request, timeout=max(timeout_s, 0), metadata=metadata))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, because its waiter may be gone."""
    if not future.cancelled():
        future.exception()
