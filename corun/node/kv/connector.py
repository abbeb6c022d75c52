"""vLLM's NIXL connector with checks: it records which prompt's KV a block holds, and decodes only the handle's own KV.

Owns: what is added to vLLM's connector: stamps and digests of blocks, the check of every read, pairs within one
fingerprint only, early release, connecting before the first request. Must not know: gRPC, leases of routers.

A prefill node's scheduler half decides which blocks get which owner in a step, and its worker half writes the owners
before the step computes. A decode node's worker half lets vLLM read, checks the owners afterwards, and only then tells
the prefill node that its blocks are free. If it told so earlier, the blocks could get a new owner before the check.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    compute_nixl_compatibility_hash,
)

from corun.node.kv import own_kv
from corun.node.kv.digest import KvDigest, region_words
from corun.node.kv.handle import (
    AT_ONCE_PARAM,
    IN_PLACE_PARAM,
    OWNERS_PARAM,
    STAMPS_PARAM,
    TAIL_PARAM,
    TARGETS_PARAM,
    names_in,
    owner,
)
from corun.node.kv.handshake import UNDER_WAY, condition, in_words, sealed
from corun.node.kv.judging import PATIENCE_S, UNKNOWN, Claim, Judge, Verdict
from corun.node.kv.paced_reads import PacedReads
from corun.node.kv.stamps import STAMP_BYTES, Owned, PeerTable, Prefills, StampTable, Transfers, stamps
from corun.node.workarounds import ucx_mappings
from corun.rpc.auth import read_token
from corun.types import NodeRef

RELEASE_TTL_S = 60.0
"""A release of KV that was read at the same moment finds nothing to free; it is forgotten after this time."""
WARM_TIMEOUT_S = 10.0
HEARTBEAT = b"HB:"
"""The prefix of vLLM's messages that renew leases (nixl/pull_worker.py: `_get_new_notifs`)."""
SHARED_LEASE_S = 10.0
"""The least time that a KV lease must last when another reader is added, which still has to begin and renew it."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Handoffs:
    """The NIXL READs since start: the first six fields are those of `corun.types.KvReads`."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0
    """The number of reads that failed, including those that were refused."""
    shared_tokens: int = 0
    prompt_tokens: int = 0
    checked: int = 0
    """The number of reads that were compared by digest."""
    refused: int = 0
    """The number of completed reads whose KV was not what the handle claims."""
    check_seconds: float = 0.0
    """The time that all checks took in the engine's own thread, with the queuing of copies inside the engine."""


class HandoffMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """The orders of vLLM, and ours, to the workers for one step."""

    def __init__(self, orders: NixlConnectorMetadata | None = None) -> None:
        super().__init__()
        self.__dict__.update(vars(orders) if orders else {})
        self.owned: list[Owned] = []
        """Prefill: the blocks that get an owner before the step."""
        self.signed: list[tuple[int, ...]] = []
        """Prefill: the blocks that get digests after the step."""
        self.stamps: dict[str, bytes] = {}
        """Decode: the stamps that the handle's blocks must have, by request id."""
        self.rows: int | None = None
        """Colocated: the number of decode rows in a step that also holds prompts; None: it holds none."""


class CorunNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Pull mode: a decode node reads the KV that a prefill node holds."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _seal(vllm_config.kv_transfer_config.get_from_extra_config("cluster_token_file", ""))
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:  # It has read the port from the environment (base_scheduler.py).
            port = vllm_config.kv_transfer_config.get_from_extra_config("handshake_port", None)
            self.connector_scheduler.side_channel_port = port
        self.handoffs = Handoffs()
        self.expired = 0
        self._released: dict[str, float] = {}  # request id -> when to forget the release
        self._readers: dict[str, set[str]] = {}  # request id -> readers that have not read yet, for shared KV only
        self._in_place: dict[str, int] = {}
        """By sample that has not begun, how many of its blocks are its prompt's, and keep that prompt's stamps."""
        self._handshakes: dict[str, Future[Any]] = {}  # the peer's engine id -> the running handshake
        self._warming: dict[str, Iterator[None]] = {}  # the peer's engine id -> the rest of its first read
        self._said: dict[str, str] = {}  # the peer's engine id -> why a handshake with it failed last
        self._prefills = Prefills(vllm_config.cache_config.block_size)
        self._block_size: int = vllm_config.cache_config.block_size
        self._has_both = vllm_config.kv_transfer_config.kv_role == "kv_both"
        """Whether this engine computes prompts and runs samples."""
        self._claims: dict[str, Claim] = {}  # request id -> the claim of a read that runs, or is to be judged
        self._copied: set[str] = set()
        """The requests whose KV has been copied from this engine's own since the last step ended."""
        self._stamps: dict[str, int] = {}  # the peer's engine id -> where the rank that we read from keeps its stamps

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens' KV a request gets from elsewhere, and whether it has to wait for it.

        What is copied at once serves the sample's first row in the same step. That row computes the prompt's last
        position itself, as it does with KV that was read before.
        """
        params = request.kv_transfer_params or {}
        if params.get(TAIL_PARAM):
            return 0, False
        if params.get(AT_ONCE_PARAM):
            return request.num_prompt_tokens - 1 - num_computed_tokens, False
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._prefills.begin(request)
        params = request.kv_transfer_params or {}
        if params.get(AT_ONCE_PARAM):
            # The prompt's lease need not be renewed. vLLM does that until it hears that the read has ended.
            self.connector_scheduler._stop_heartbeat(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        reads = self.connector_scheduler._reqs_need_recv
        if (in_place := params.get(IN_PLACE_PARAM)) and request.request_id in reads:
            self._in_place[request.request_id] = in_place
            if num_external_tokens:  # vLLM would have all blocks copied that its cache cannot find.
                ours = [block.block_id for block in blocks.blocks[0][in_place:]]
                reads[request.request_id] = (request, [ours])

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return vLLM's answer; to what the reader of the KV must know, add who computed the blocks. The KV of a scored
        prompt is not kept: no reader comes."""
        owners = self._prefills.end(request.request_id, itertools.chain(*block_ids))
        self._in_place.pop(request.request_id, None)
        if TARGETS_PARAM in (request.kv_transfer_params or {}):
            return False, {OWNERS_PARAM: owners}
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        if params := finished[1]:
            params[OWNERS_PARAM] = owners
        return finished

    def stamps_of(self, prompt: Any, blocks: Any, node: NodeRef) -> bytes:
        """Return the stamps of a prompt's blocks, which may be those of earlier prompts. node: who computes prompts."""
        owners = [(owner(name, node), count) for name, count in self._prefills.owners_of(itertools.chain(*blocks))]
        if len(owners) == 1 and owners[0][0] == owner(prompt.request_id, node):
            found: bytes = prompt.kv_transfer_params[STAMPS_PARAM]
            return found
        return stamps(owners, prompt.prompt_token_ids, self._block_size)

    def build_connector_meta(self, scheduler_output: Any) -> HandoffMetadata:
        reads = self.connector_scheduler._reqs_need_recv
        params = {name: request.kv_transfer_params for name, (request, _) in reads.items()}
        others = [block for _, groups in reads.values() for block in itertools.chain(*groups)]
        meta = HandoffMetadata(super().build_connector_meta(scheduler_output))  # This call empties `_reqs_need_recv`.
        meta.stamps = {name: given[STAMPS_PARAM] for name, given in params.items() if STAMPS_PARAM in given}
        for name, groups, anew in yield_req_data(scheduler_output) if self._prefills or self._has_both else ():
            if groups and (owned := self._prefills.give(name, itertools.chain(*groups), anew=anew)):
                meta.owned.append(owned)
            elif groups:
                others.extend([*itertools.chain(*groups)][self._in_place.pop(name, 0) :])
            if blocks := self._prefills.completed(name, scheduler_output.num_scheduled_tokens[name]):
                meta.signed.append(blocks)
        if self._has_both and others:
            # A sample's blocks may have been a prompt's whose lease has ended. Who reads that prompt late must see it.
            meta.owned.append(Owned(tuple(others), bytes(STAMP_BYTES * len(others))))
        return meta

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the stamps, then the KV caches: vLLM's call completes the agent's metadata that peers get. Tables
        that are registered later are read by nobody else.

        Raises RuntimeError if the model keeps its KV in several groups. vLLM marks only the first group's blocks as not
        loaded (nixl/base_worker.py: `_handle_failed_transfer`).
        """
        worker = self.connector_worker
        if len(worker.kv_cache_config.kv_cache_groups) != 1:
            raise RuntimeError("this model cannot keep the contract: it keeps its KV in several groups")
        self.table = self._new_table(worker.nixl_wrapper, worker._logical_num_blocks)
        super().register_kv_caches(kv_caches)
        self._regions = _regions(worker, kv_caches.values())
        self.watch(KvDigest(self._regions).of)

    def watch(self, digests: Callable[[Sequence[int]], Any]) -> None:
        """Insert the check between vLLM's reads and their use, and post reads in pieces that tell the peer nothing."""
        worker = self.connector_worker
        self._digests = digests
        self._agent = agent = worker.nixl_wrapper
        self._judge = Judge(agent, partial(self._new_table, agent, len(self.table.rows)), self._table_of, digests)
        self._warmed = self._new_table(agent, 1)
        self._reads = worker.nixl_wrapper = PacedReads(self._agent)
        worker.nixl_wrapper.get_new_notifs = self._last_notices
        self._pop_done, worker._pop_done_transfers = worker._pop_done_transfers, self._pop_judged
        self._log_other_failure, worker._log_failure = worker._log_failure, self._log_failure

    def bind(self, facts: Mapping[str, Any]) -> None:
        """Make `facts`, which vLLM's own hash omits, a condition of every handshake with this worker, in place of the
        model's path. Raises what `corun.node.kv.handshake.condition` raises."""
        worker = self.connector_worker
        worker.compat_hash = condition(worker, compute_nixl_compatibility_hash, facts)
        worker.xfer_handshake_metadata = replace(worker.xfer_handshake_metadata, compatibility_hash=worker.compat_hash)

    def handle_preemptions(self, kv_connector_metadata: HandoffMetadata) -> None:
        """Write the owners. vLLM calls this before the step writes to any block. The CPU runner zeroes new blocks next,
        and a peer that still reads the old KV must not accept the zeros."""
        for owned in kv_connector_metadata.owned:
            self.table.own(owned.blocks, owned.stamps)
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Record the claims of the reads that begin, before the worker turns their block ids into its kernels' ids.

        If we have the first blocks of a prompt already, vLLM reads the last ones (nixl/base_worker.py:
        `_apply_prefix_caching`).
        """
        meta = self._connector_metadata
        for name, read in meta.reqs_to_recv.items():
            if name in meta.stamps and read.local_block_ids:  # A read without blocks was aborted before it began.
                (theirs,), (ours,) = read.remote.block_ids, read.local_block_ids
                first = max(0, len(theirs) - len(ours))
                self._claims[name] = Claim(
                    stamps=meta.stamps[name][STAMP_BYTES * first :],
                    first=first,
                    engine_id=read.remote.engine_id,
                    request_id=read.remote.request_id,
                    theirs=tuple(theirs[first:]),
                    ours=tuple(ours),
                )
        worker = self.connector_worker
        if prompts := own_kv.take_heartbeat(meta, worker.engine_id):
            worker._handle_heartbeat(prompts)
        self._read_own(own_kv.take_reads(meta, worker.engine_id))
        super().start_load_kv(forward_context, **kwargs)
        for name, read in meta.reqs_to_recv.items():
            # vLLM has told the peer that an aborted read never begins, and would keep the prompt's block ids for good.
            if not read.local_block_ids and read.remote.engine_id in worker._remote_agents:
                worker._recving_metadata.pop(name, None)

    def _read_own(self, reads: Mapping[str, Any]) -> None:
        """Copy the KV that samples read from prompts of this engine, which needs it no longer for these readers."""
        worker = self.connector_worker
        claims = {name: self._claims[name] for name in reads if name in self._claims}
        began = time.monotonic()
        verdicts = own_kv.copy(list(claims.values()), self._regions, self.table, self._digests)
        self.handoffs.check_seconds += time.monotonic() - began
        found = dict(zip(claims, verdicts, strict=True))
        for name, read in reads.items():
            if not read.local_block_ids:  # It was aborted before it began.
                self.release(*names_in(read.remote.request_id))
                continue
            worker._recving_metadata[name] = read
            if self._accept(name, claims.get(name), found.get(name, UNKNOWN)):
                self.release(*names_in(read.remote.request_id))
                del worker._recving_metadata[name]
                self._copied.add(name)

    def wait_for_save(self) -> None:
        """Write the digests. vLLM calls this after the step's forward pass, before its result leaves this process."""
        # All at once: each answer waits for the device.
        if unsigned := self.table.unsigned(itertools.chain(*self._connector_metadata.signed)):
            self.table.sign(unsigned, self._digests(unsigned))
        super().wait_for_save()

    def _pop_judged(self, transfers: dict[str, Any]) -> set[str]:
        """Return vLLM's completed reads, once they are judged, and those that failed. The blocks of refused reads are
        marked as not loaded."""
        done: set[str] = self._pop_done(transfers)
        failed = done.intersection(self.connector_worker._failed_recv_reqs.queue)
        began = time.monotonic()
        judged = self._judge.judge([(name, self._claims.get(name)) for name in sorted(done - failed)])
        for name, claim, verdict in judged:
            if self._accept(name, claim, verdict) and claim:
                self._thank(claim)
        self.handoffs.check_seconds += time.monotonic() - began
        return failed.union(name for name, _, _ in judged)

    def _new_table(self, agent: Any, num_blocks: int) -> StampTable:
        """Return a new table that is registered."""
        made = StampTable(num_blocks)
        self.connector_worker._registered_descs.append(made.register(agent))
        return made

    def _accept(self, name: str, claim: Claim | None, verdict: Verdict) -> bool:
        """Count a read that is complete, and return whether its KV may be used; if not, its blocks are marked as not
        loaded."""
        self.handoffs.checked += verdict.checked
        if verdict.refusal:
            self.handoffs.refused += 1
            log.error("KV of %s is refused: %s; it claims to be %s", name, verdict.refusal, claim)
            self.connector_worker._handle_failed_transfer(name, None)
        elif claim:
            self.handoffs.shared_tokens += claim.first * self._block_size
            self.handoffs.prompt_tokens += (claim.first + len(claim.ours)) * self._block_size
        return not verdict.refusal

    def _table_of(self, engine_id: str) -> PeerTable | None:
        """Return a connected peer's stamp table; None if it is not known where that is."""
        worker = self.connector_worker
        info = worker.transfer_topo.get_engine_info(engine_id)
        num_blocks = worker.dst_num_blocks[engine_id] // info.remote_physical_blocks_per_logical
        if (address := self._stamps.get(engine_id)) is None:
            return None
        return PeerTable(agent=self._peer(engine_id), address=address, num_blocks=num_blocks)

    def _thank(self, claim: Claim) -> None:
        """Tell the prefill node that its blocks have been read, as vLLM's transfer would do (nixl/pull_worker.py)."""
        worker = self.connector_worker
        notice = f"{claim.request_id}:{worker.world_size}".encode()
        try:
            worker.nixl_wrapper.send_notif(self._peer(claim.engine_id), notif_msg=notice)
        except Exception as error:  # NIXL's errors share no base. The peer's blocks are freed when their lease ends.
            worker._log_failure(failure_type="notification_failed", req_id=claim.request_id, error=error)
            worker.xfer_stats.record_failed_notification()

    def _peer(self, engine_id: str) -> str:
        """Return the name of the one agent that we read from. The same rank exists there: nodes of one fingerprint have
        the same number of ranks."""
        worker = self.connector_worker
        name: str = worker._remote_agents[engine_id][0, worker.tp_rank]
        return name

    def get_kv_connector_stats(self) -> Any:
        """Return vLLM's own figures of the last step and add them to `handoffs`."""
        stats = super().get_kv_connector_stats()
        if stats is not None:
            self.handoffs.count += len(stats.data["transfer_duration"])
            self.handoffs.bytes += sum(stats.data["bytes_transferred"])
            self.handoffs.seconds += sum(stats.data["transfer_duration"])
            self.handoffs.failed += len(stats.data["num_failed_transfers"])
        return stats

    @staticmethod
    def nothing_to_do(rows: int | None) -> HandoffMetadata:
        """Return the metadata of a step that moves no KV. rows: see `HandoffMetadata`."""
        meta = HandoffMetadata()
        meta.rows = rows
        return meta

    def share(self, request_id: str, readers: Iterable[str]) -> bool:
        """Keep the KV of a prefill for these readers, too; the first reader has the prefill's own id. Return False if
        the KV has been freed or will be freed soon."""
        worker = self.connector_worker
        is_there = request_id in worker._reqs_to_send or request_id in worker._reqs_to_process
        left_s = worker._reqs_to_send.get(request_id, math.inf) - time.perf_counter()
        if not is_there or request_id in self._released or left_s < SHARED_LEASE_S:
            return False
        self._readers.setdefault(request_id, {request_id}).update(readers)
        return True

    def _last_notices(self) -> dict[str, list[bytes]]:
        """Return the peers' messages in vLLM's form, which has no readers. A prefill gets one notice, after the last
        reader's. What was released gets its notice from here, because a lease that is ended counts as expired in vLLM,
        which warns of it."""
        found = {
            agent: [*filter(None, map(self._in_vllms_words, notices))]
            for agent, notices in self._agent.get_new_notifs().items()
        }
        read = {notice.rpartition(b":")[0].decode() for notice in itertools.chain(*found.values())}
        worker = self.connector_worker
        # Before its lease begins, the prefill may still run.
        ended = [name for name in self._released if name in worker._reqs_to_send]
        for name in ended:
            del self._released[name]
        return found | {"": [f"{name}:{worker.world_size}".encode() for name in ended if name not in read]}

    def _in_vllms_words(self, notice: bytes) -> bytes:
        """Return a message in vLLM's form; empty if vLLM must not get it, because other readers have yet to read, or
        because it is no message of a peer with as many ranks: vLLM would end the engine."""
        text = notice.decode(errors="replace")
        if notice.startswith(HEARTBEAT):
            ids = text[len(HEARTBEAT) :].split(",")
            return HEARTBEAT + ",".join(names_in(name)[0] for name in ids).encode()
        name, _, ranks = text.rpartition(":")
        if ranks != str(self.connector_worker.world_size):
            log.warning("a message over NIXL that cannot be read is ignored: %.100r", notice)
            return b""
        request_id, reader = names_in(name)
        return f"{request_id}:{ranks}".encode() if self._was_last(request_id, reader) else b""

    def _was_last(self, request_id: str, reader: str) -> bool:
        """Remove a reader from the readers of a prefill's KV. Return True if it was a reader and none is left."""
        readers = self._readers.get(request_id, {request_id})
        was_one = reader in readers
        readers.discard(reader)
        if not readers:
            self._readers.pop(request_id, None)
        return was_one and not readers

    def release(self, request_id: str, reader: str) -> None:
        """Remove a reader from `request_id`'s KV. After the last one, the next step frees the KV."""
        if self._was_last(request_id, reader):
            self._released[request_id] = time.monotonic() + RELEASE_TTL_S

    def held(self) -> dict[str, Any]:
        """Return the finished prefills whose KV waits to be read, soonest expiry first, and how many have expired since
        start, because their KV was neither read nor released before its lease ended."""
        return {"names": list(self.connector_worker._reqs_to_send), "expired": self.expired}

    def contents(self, blocks: Sequence[int]) -> list[int]:
        """Return digests of what KV blocks hold now. Nothing may write to them meanwhile."""
        found: list[int] = self._digests(blocks).tolist()
        return found

    def stamp_address(self) -> int:
        """Return the address where readers of this worker's KV find the stamps of its blocks."""
        return self.table.address

    def figures(self) -> dict[str, float]:
        """Return the figures of the KV reads since start, by the names of `Handoffs`."""
        return asdict(self.handoffs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Post some of the waiting reads, and return the requests whose KV was read: by peers, and by us.

        vLLM calls this when the step's kernels are queued, so the GPU computes while reads are posted.
        """
        self._reads.post()
        expired = self.connector_worker.xfer_stats.data["num_kv_expired_reqs"]
        before = len(expired)
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        self.expired += len(expired) - before
        copied, self._copied = self._copied, set()
        finished[1].update(copied)
        for name in finished[0]:
            self._readers.pop(name, None)
        for name in finished[1]:
            self._claims.pop(name, None)
        now = time.monotonic()
        self._released = {name: until for name, until in self._released.items() if until > now}
        return finished

    def connect(self, engine_id: str, host: str, port: int, tp_size: int, stamp_addresses: Sequence[int]) -> str:
        """Begin the handshake with a prefill engine. Call this again while it returns `UNDER_WAY`.

        If it failed, return why, in words, and the next call begins another: an exception of a worker is logged with a
        traceback and loses its type. stamp_addresses: where each of the peer's ranks keeps the stamps of its blocks.
        """
        worker = self.connector_worker
        self._stamps[engine_id] = stamp_addresses[worker.tp_rank]
        future = self._handshakes.get(engine_id) or worker._ensure_handshake(engine_id, host, port, tp_size)
        if future is not None and not future.done():
            self._handshakes[engine_id] = future
            return UNDER_WAY
        self._handshakes.pop(engine_id, None)
        if future is not None and (error := future.exception()) is not None:
            return in_words(error)
        if engine_id not in worker._remote_agents:
            return UNDER_WAY  # The handshake's thread is about to record its result.
        self._said.pop(engine_id, None)
        return ""

    def _log_failure(self, failure_type: str, req_id: str | None, **context: Any) -> None:
        """Log a failure in place of vLLM's function. The reason why handshakes with a peer fail is logged only when it
        changes, and without a traceback, because they are tried every few seconds while the peer is registered."""
        if failure_type != "handshake_setup_failed":
            self._log_other_failure(failure_type=failure_type, req_id=req_id, **context)
            return
        engine_id, reason = context["remote_engine_id"], in_words(context["error"])
        if self._said.get(engine_id) != reason:
            log.error("no NIXL connection to engine %s: %s", engine_id, reason)
        self._said[engine_id] = reason

    def warm(self, engine_id: str) -> str:
        """Read a connected peer's null block and its stamp, so that the set-up cost of a first transfer is paid here.
        Call this again while it returns `UNDER_WAY`: no step may wait for a peer. Then return in words why that failed
        or took longer than 10 s; empty if it succeeded."""
        warming = self._warming.setdefault(engine_id, self._warm(engine_id))
        said = ""
        try:
            next(warming)
            return UNDER_WAY
        except StopIteration:
            pass
        except Exception as error:  # NIXL's errors share no base class.
            said = in_words(error)
        del self._warming[engine_id]
        return said

    def _warm(self, engine_id: str) -> Iterator[None]:
        """Read what `warm` says, a little at a time. Raises the error of a read that failed."""
        read = Transfers(self._agent, (self._null_block(engine_id),), WARM_TIMEOUT_S)
        while not read.are_over(PATIENCE_S):
            yield
        (error,) = read.end()
        self._judge.keep(read)  # Nobody looks at what comes late, nor at the row below.
        if error is not None:
            raise error
        wanted: Any = [(self._table_of(engine_id), (0,))]
        fetch = self._warmed.fetch(self._agent, wanted, WARM_TIMEOUT_S)
        while (rows := fetch.rows(PATIENCE_S)) is None:
            yield
        self._judge.keep(fetch.transfers)
        if isinstance(rows[0], Exception):
            raise rows[0]

    def _null_block(self, engine_id: str) -> Any:
        """Return a transfer of a peer's null block, not started."""
        worker = self.connector_worker
        info = worker.transfer_topo.get_engine_info(engine_id)

        def descriptors(num_blocks: int, split: int) -> Any:
            return worker._compute_desc_ids(([*range(split)],), num_blocks, None, split)

        return self._agent.make_prepped_xfer(
            "READ",
            worker.src_xfer_handles_by_block_size[info.remote_block_size],
            descriptors(worker.num_blocks, worker._physical_blocks_per_logical_kv_block),
            worker.dst_xfer_side_handles[engine_id][worker.tp_rank],
            descriptors(worker.dst_num_blocks[engine_id], info.remote_physical_blocks_per_logical),
        )

    def mapped_pids(self) -> list[int]:
        """Return the ids of the processes whose GPU memory is mapped here for reading."""
        mappings = ucx_mappings.of_this_process()
        return sorted(mappings.pids()) if mappings else []

    def unmap(self, pids: Collection[int]) -> bool:
        """Unmap the GPU memory of processes that have died. Return False if a peer is being read or connected now; then
        call again."""
        for engine_id in tuple(self._warming):  # Nobody else may ask for the end of a first read any more.
            self.warm(engine_id)
        worker = self.connector_worker
        reads = any(read.running for read in itertools.chain(*worker._recving_transfers.values()))
        if reads or worker._handshake_futures or self._warming or self._judge.is_at_work:
            return False
        if mappings := ucx_mappings.of_this_process():
            mappings.drop(pids)
        return True


def _seal(token_file: str) -> None:
    """Restrict this process's handshake sockets to members of the cluster."""
    if token_file:
        # A malformed request, or a request for a rank that does not exist, would end vLLM's listener. Sealed sockets
        # accept no request from a process without the token.
        base_scheduler.zmq_ctx = base_worker.zmq_ctx = sealed(read_token("cluster_token_file", token_file))


def _regions(worker: Any, caches: Iterable[Any]) -> list[Any]:
    """Return the regions that the worker registered, as rows of int32 words, one row for each logical block."""
    memory = {cache.untyped_storage().data_ptr(): cache for cache in caches}
    found = []
    for address, size in zip(
        worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank], worker.block_len_per_layer, strict=True
    ):
        owner = memory[max(start for start in memory if start <= address)]
        block_bytes = size * worker._physical_blocks_per_logical_kv_block
        found.append(region_words(owner, address, block_bytes, worker._logical_num_blocks))
    return found
