"""Audits: a random share of the finished samples, run again on other nodes and compared bit by bit.

Owns: which samples are audited, when, and what follows from a difference. Audits only use what is idle: they never
queue, start only while nobody waits and slots are left over, and give way at once to a sample that a client waits for.
This module must not know gRPC messages or how a sample is run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from corun.cluster import AuditStatus, FinishReason
from corun.config import RouterConfig
from corun.errors import CorunError, OverloadedError
from corun.reproduction import Reproduction
from router.admission import AdmissionQueue
from router.comparison import Comparison
from router.failover import Finished, NodeFaultError, Run, Sample, receipt_of
from router.members import Seat
from router.output import RECORD
from router.placement import Need
from router.registry import Registry
from router.reproductions import Reproductions

SPARE_SLOTS = 4
"""Slots that stay free on a node beside its audits, for samples that come in while audits give way; all but one on a
node that has fewer."""
MAX_RUNNING = 4
"""Audits at a time: a thousandth of what some thousand slots finish."""
MAX_WAITING = 256
"""Samples that wait for their audit, or are being audited."""
MAX_WAITING_TOKENS = 262_144
"""Tokens of them, prompt and output."""
MAX_TRIES = 8
"""Starts of one audit that gives way again and again."""
AUDIT_TIMEOUT_S = 3600.0
"""Longest audit; as long as the longest call of a client."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Audit:
    """A sample that was chosen."""

    finished: Finished
    need: Need
    """It avoids the nodes of the first run."""
    tries: int = 0

    @property
    def num_tokens(self) -> int:
        return self.need.num_prompt + len(self.finished.records) // RECORD.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An audit that holds a seat."""

    audit: Audit
    sample: Sample
    run: Run
    comparison: Comparison

    async def to_end(self) -> FinishReason:
        await self.run.reserve()
        return self.comparison.end(await self.run.to_end())

    @property
    def same_nodes(self) -> tuple[str, ...]:
        """Ids of the nodes that the first run used as well, because there was no other."""
        ids = (ref.node_id for ref in self.run.seat.refs)
        return tuple(node_id for node_id in ids if node_id in self.audit.need.avoid)


class Auditor:
    """Audits the samples of one router. `pump` has to be called when the registry changes, `give_way` when a sample of
    a client was placed, or could not be."""

    def __init__(
        self, registry: Registry, queue: AdmissionQueue, config: RouterConfig, rng: random.Random | None = None
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._config = config
        self._rng = rng or random.Random()
        self._files = Reproductions(config.audit_dir)
        self._waiting: deque[Audit] = deque()
        self._tokens = 0  # Of all audits, waiting and running.
        self._running: dict[asyncio.Task[FinishReason], Running] = {}
        self._closed = False
        self._matched = self._mismatched = self._failed = self._skipped = self._same_node = 0
        self._last_mismatch = ""

    def status(self) -> AuditStatus:
        return AuditStatus(
            matched=self._matched,
            mismatched=self._mismatched,
            failed=self._failed,
            skipped=self._skipped,
            same_node=self._same_node,
            waiting=len(self._waiting) + len(self._running),
            last_mismatch=self._last_mismatch,
        )

    def note(self, finished: Finished) -> None:
        """A sample has ended well. Chosen by a coin of the router's own, whatever the client asked for."""
        if self._rng.random() >= self._config.audit_fraction:
            return
        nodes = finished.receipt.prefill_node.node_id, finished.receipt.decode_node.node_id
        audit = Audit(finished=finished, need=finished.sample.need.again(*nodes))
        full = len(self._waiting) + len(self._running) >= MAX_WAITING
        if self._closed or full or self._tokens + audit.num_tokens > MAX_WAITING_TOKENS:
            self._skipped += 1
            return
        self._tokens += audit.num_tokens
        self._waiting.append(audit)
        asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Starts what may start, and takes audits off nodes that have become busy or are to end."""
        self._cancel(task for task, running in self._running.items() if not _may_stay(running.run.seat))
        while self._waiting and not self._closed and len(self._running) < MAX_RUNNING and not self._queue.in_line:
            if (seat := self._registry.place_idle(self._waiting[0].need, SPARE_SLOTS)) is None:
                self._waiting.rotate(-1)  # The next change tries another: one that fits nowhere holds up nobody.
                return
            self._start(self._waiting.popleft(), seat)

    def give_way(self, seat: Seat | None) -> None:
        """A sample of a client got this seat; or, if None, has to wait, and no audit may be why."""
        self._cancel(
            task
            for task, running in self._running.items()
            if seat is None or _is_in_the_way(running.run.seat, seat) or not _may_stay(running.run.seat)
        )

    def stop(self) -> None:
        """Ends all audits, and takes no more."""
        self._closed = True
        while self._waiting:
            self._skip(self._waiting.popleft())
        self._cancel(self._running)

    async def close(self) -> None:
        """Returns when every audit has given back what it held."""
        self.stop()
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_TIMEOUT_S)
        await self._files.close()

    def _cancel(self, tasks: Iterable[asyncio.Task[FinishReason]]) -> None:
        for task in tuple(tasks):
            task.cancel()

    def _start(self, audit: Audit, seat: Seat) -> None:
        audit.tries += 1
        deadline = asyncio.get_running_loop().time() + AUDIT_TIMEOUT_S
        sample = replace(audit.finished.sample, deadline=deadline, received=None)
        comparison = Comparison(audit.finished)
        run = Run(sample, seat, comparison, self._config)
        running = Running(audit=audit, sample=sample, run=run, comparison=comparison)
        task = asyncio.ensure_future(running.to_end())
        self._running[task] = running
        task.add_done_callback(self._ended)  # Also of a task that was cancelled before its first step.

    def _ended(self, task: asyncio.Task[FinishReason]) -> None:
        running = self._running.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, OverloadedError):  # Another router's samples may fill the node.
            self._again(running.audit)
        elif error is not None:
            self._fail(running, error)
        else:
            self._judge(running, task.result())
        running.run.close()  # Last: it tells everybody that a slot is free.

    def _again(self, audit: Audit) -> None:
        if self._closed or audit.tries >= MAX_TRIES:
            self._skip(audit)
        else:
            self._waiting.appendleft(audit)

    def _skip(self, audit: Audit) -> None:
        self._skipped += 1
        self._tokens -= audit.num_tokens

    def _fail(self, running: Running, error: BaseException) -> None:
        """Nobody waits for it, so a node that fails it is not followed by another."""
        self._failed += 1
        self._tokens -= running.audit.num_tokens
        known = isinstance(error, (NodeFaultError, CorunError))
        log.warning("the audit of %s failed: %s", running.sample, error, exc_info=None if known else error)
        is_late = asyncio.get_running_loop().time() >= running.sample.deadline
        if isinstance(error, NodeFaultError) and not is_late:
            self._registry.note_fault(error.member, error.error)

    def _judge(self, running: Running, reason: FinishReason) -> None:
        self._tokens -= running.audit.num_tokens
        self._same_node += bool(running.same_nodes)
        if running.comparison.differs_at is None:
            self._matched += 1
            log.debug("the audit of %s gave the same bits; nodes used again: %s", running.sample, running.same_nodes)
        else:
            self._mismatched += 1
            self._accuse(_reproduction(running, running.comparison.differs_at, reason), running.sample)

    def _accuse(self, found: Reproduction, sample: Sample) -> None:
        """One of the runs was wrong. Which, nobody can tell: all their nodes are out until they have restarted."""
        first, audit = found.first, found.audit
        self._last_mismatch = (
            f"{found.time}: {sample} differs at token {found.differs_at}: {first.prefill_node} and "
            f"{first.decode_node} first, {audit.prefill_node} and {audit.decode_node} then"
        )
        log.error("audit: %s", self._last_mismatch)
        nodes = first.prefill_node, first.decode_node, audit.prefill_node, audit.decode_node
        self._registry.quarantine(nodes, f"the audit of {sample}")
        self._files.keep(found)


def _reproduction(running: Running, differs_at: int, reason: FinishReason) -> Reproduction:
    first = running.audit.finished.receipt
    first_token, audit_token = running.comparison.tokens()
    return Reproduction(
        prompt_token_ids=running.sample.prompt_token_ids,
        params=running.sample.params,
        first=first,
        audit=receipt_of(running.sample, first.fingerprint, running.comparison, running.run.seat, reason),
        differs_at=differs_at,
        first_token=first_token,
        audit_token=audit_token,
        same_nodes=running.same_nodes,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _may_stay(seat: Seat) -> bool:
    draining = seat.decode.draining or seat.prefill.draining
    return not draining and seat.decode.room.keeps_free(SPARE_SLOTS)


def _is_in_the_way(audit: Seat, sample: Seat) -> bool:
    """A prefill node computes one prompt after the other."""
    return audit.is_prefilling and audit.prefill is sample.prefill
