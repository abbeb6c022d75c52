"""Audits: a random share of the finished samples runs again on other nodes and is compared bit by bit.

Owns: which samples are audited, when, and what follows from a difference. Audits use only idle nodes
(`router.audit.idle`), and start only while spare slots are left. This module must not know gRPC messages or how a
sample is run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from corun.config.fields import RouterConfig
from corun.errors import CorunError
from corun.records.reproduction import Reproduction
from corun.types import AuditStatus, FinishReason
from router.attempt import NodeFaultError, SampleTask, receipt_of
from router.audit.comparison import Comparison
from router.audit.idle import SPARE_SLOTS, IdleRun, IdleRuns
from router.audit.reproductions import Reproductions
from router.nodes.node_client import is_not_finite
from router.nodes.registry import Registry
from router.output import RECORD
from router.placement import Need
from router.sample import Finished

MAX_RUNNING = 4
"""The most audits at a time. They are enough to audit a thousandth of what some thousand slots finish."""
MAX_WAITING = 256
"""The most samples that wait for their audit or are being audited."""
MAX_WAITING_TOKENS = 262_144
"""The most prompt and output tokens of the samples that wait for their audit or are being audited."""
MAX_TRIES = 8
"""The most starts of one audit that gives way again and again."""
AUDIT_TIMEOUT_S = 3600.0
"""The longest time of an audit, as long as the longest call of a client."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Audit:
    """A finished sample that was chosen for an audit."""

    finished: Finished
    need: Need
    """The need of the audit's run. It avoids the nodes of the first run."""
    tries: int = 0

    @property
    def num_tokens(self) -> int:
        return self.need.num_prompt + len(self.finished.records) // RECORD.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An audit that holds a placement."""

    audit: Audit
    run: IdleRun
    comparison: Comparison

    @property
    def same_nodes(self) -> tuple[str, ...]:
        """The ids of the nodes that the first run used as well, because there were no others."""
        ids = (ref.node_id for ref in self.run.placement.refs)
        return tuple(node_id for node_id in ids if node_id in self.audit.need.avoid)


class Auditor:
    """Audits the samples of one router. `pump` has to be called when the registry changes."""

    def __init__(
        self, registry: Registry, idle: IdleRuns, config: RouterConfig, rng: random.Random | None = None
    ) -> None:
        self._registry = registry
        self._idle = idle
        self._config = config
        self._rng = rng or random.Random()
        self._files = Reproductions(config.audit_dir)
        self._waiting: deque[Audit] = deque()
        self._tokens = 0  # The tokens of all audits, waiting and running.
        self._running: dict[IdleRun, Running] = {}
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
            waiting=self.waiting,
            last_mismatch=self._last_mismatch,
        )

    def note(self, finished: Finished) -> None:
        """Note a sample that ended well, and perhaps choose it for an audit. The choice is random and does not depend
        on the client's request."""
        if self._rng.random() >= self._config.audit_fraction:
            return
        nodes = finished.receipt.prefill_node.node_id, finished.receipt.decode_node.node_id
        audit = Audit(finished=finished, need=finished.task.need.again(*nodes))
        full = self.waiting >= MAX_WAITING
        if self._closed or full or self._tokens + audit.num_tokens > MAX_WAITING_TOKENS:
            self._skipped += 1
            return
        self._tokens += audit.num_tokens
        self._waiting.append(audit)
        asyncio.get_running_loop().call_soon(self.pump)

    @property
    def waiting(self) -> int:
        """The number of audits that wait or run."""
        return len(self._waiting) + len(self._running)

    def pump(self) -> None:
        """Start the audits that may start now."""
        while self._waiting and not self._closed and len(self._running) < MAX_RUNNING:
            if not self._start(self._waiting[0]):
                self._waiting.rotate(-1)  # The next change tries another: one that fits nowhere must not block others.
                return
            self._waiting.popleft()

    def stop(self) -> None:
        """End all audits, and accept no more."""
        self._closed = True
        while self._waiting:
            self._skip(self._waiting.popleft())
        self._idle.end(self._running)

    async def close(self) -> None:
        """Stop, and wait until the reproduction files are written."""
        self.stop()
        await self._files.close()

    def _start(self, audit: Audit) -> bool:
        deadline = asyncio.get_running_loop().time() + AUDIT_TIMEOUT_S
        sample = replace(audit.finished.task, deadline=deadline, received=None)
        comparison = Comparison(audit.finished)
        run = self._idle.start(
            sample, audit.need, comparison, self._ended, spare_slots=SPARE_SLOTS, keeps_free=SPARE_SLOTS
        )
        if run is None:
            return False
        audit.tries += 1
        self._running[run] = Running(audit=audit, run=run, comparison=comparison)
        return True

    def _ended(self, run: IdleRun) -> None:
        running = self._running.pop(run)
        if run.gave_way:
            self._again(running.audit)
        elif isinstance(run.error, NodeFaultError) and is_not_finite(run.error.error):
            # This is a difference, because the first run had finite logits and drew tokens.
            self._judge(running, running.comparison.end(FinishReason.ERROR))
        elif run.reason is None:
            self._fail(running, run.error)
        else:
            self._judge(running, running.comparison.end(run.reason))

    def _again(self, audit: Audit) -> None:
        if self._closed or audit.tries >= MAX_TRIES:
            self._skip(audit)
        else:
            self._waiting.appendleft(audit)

    def _skip(self, audit: Audit) -> None:
        self._skipped += 1
        self._tokens -= audit.num_tokens

    def _fail(self, running: Running, error: BaseException | None) -> None:
        self._failed += 1
        self._tokens -= running.audit.num_tokens
        known = isinstance(error, (NodeFaultError, CorunError))
        log.warning("the audit of %s failed: %s", running.run.task, error, exc_info=None if known else error)

    def _judge(self, running: Running, reason: FinishReason) -> None:
        self._tokens -= running.audit.num_tokens
        self._same_node += bool(running.same_nodes)
        if running.comparison.differs_at is None:
            self._matched += 1
            log.debug("the audit of %s gave the same bits; nodes used again: %s", running.run.task, running.same_nodes)
        else:
            self._mismatched += 1
            self._accuse(_reproduction(running, running.comparison.differs_at, reason), running.run.task)

    def _accuse(self, found: Reproduction, sample: SampleTask) -> None:
        """Quarantine the nodes of both runs until they have restarted, because one run was wrong and nothing shows
        which. Keep a reproduction file."""
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
        prompt_token_ids=running.run.task.prompt_token_ids,
        params=running.run.task.params,
        first=first,
        audit=receipt_of(running.run.task, first.fingerprint, running.comparison, running.run.placement, reason),
        differs_at=differs_at,
        first_token=first_token,
        audit_token=audit_token,
        same_nodes=running.same_nodes,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
