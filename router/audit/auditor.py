"""Audits: a random share of the finished samples runs again on other nodes and is compared bit by bit.

Owns: which samples are audited, when, the comparison, and what follows from a difference. Audits use only idle nodes
(`router.audit.idle`), and start only while spare slots are left. This module must not know gRPC messages or how a
sample is run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corun.config.fields import RouterConfig
from corun.errors import CorunError
from corun.receipt import Receipt
from corun.records.reproduction import reproduction_row, write_reproduction
from corun.rpc.auth import ANYONE
from corun.types import NO_ALTERNATIVES, Alternatives, AuditStatus, FinishReason
from router.attempt import Attempt, NodeFaultError, SampleTask, receipt_of
from router.audit.idle import SPARE_SLOTS, IdleRun, IdleRuns
from router.clock import loop_time
from router.nodes.node_client import NotFiniteError
from router.nodes.registry import Registry
from router.output import RECORD, Output
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
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class AuditOutput(Output):
    """The output of one audit, to be compared with the output that the client got. It goes on after a difference, for
    the digest.

    Only token ids and the bits of log probabilities are compared, because text is a function of the tokens. If a stop
    string ended the sample, the node did not know that, so the audit ends at the same token, whatever the node would do
    next.
    """

    def __init__(self, finished: Finished) -> None:
        super().__init__()
        self._first = finished

    def take(self, token_id: int, logprob: float, tops: Alternatives = NO_ALTERNATIVES) -> bool:
        """Take the audit's next token. Return True if a stop string ended the first run at this token."""
        super().take(token_id, logprob, tops)
        return self._first.node_reason is None and len(self.records) >= len(self._first.records)

    def differs_at(self, reason: FinishReason) -> int | None:
        """Return the index, from 0, of the first token that differs, after an audit that ended for `reason`; None if
        nothing differs. If all tokens of the shorter run are equal, it is the index after them, where only one run
        ended or both ended for different reasons."""
        first, audit = self._first.records, self.records
        both = min(len(first), len(audit))
        if first[:both] != audit[:both]:
            return next(at for at in range(both // RECORD.size) if _record(first, at) != _record(audit, at))
        same_end = len(first) == len(audit) and self._first.node_reason in (None, reason)
        return None if same_end else both // RECORD.size


@dataclass(kw_only=True, slots=True, eq=False)
class Audit:
    """A finished sample that was chosen for an audit."""

    finished: Finished
    sample: SampleTask
    """The sample that the audit's runs repeat. It is made once, and only its deadline differs between runs: parameters
    check themselves when they are made, and there may be a thousand biases."""
    need: Need
    """The need of the audit's run. It avoids the nodes of the first run."""
    num_tokens: int
    """The tokens of its prompt and output."""
    tries: int = 0

    def __str__(self) -> str:
        return f"the audit of {self.finished.task}"


class Auditor:
    """Audits the samples of one router. `pump` has to be called when the registry changes."""

    def __init__(
        self, registry: Registry, idle: IdleRuns, config: RouterConfig, rng: random.Random | None = None
    ) -> None:
        self._registry = registry
        self._idle = idle
        self._config = config
        self._rng = rng or random.Random()
        self._waiting: deque[Audit] = deque()
        self._running: dict[IdleRun, Audit] = {}
        self._writing: set[asyncio.Task[None]] = set()  # The tasks that write reproduction files.
        self._closed = False
        self._counts: Counter[str] = Counter()  # By the fields of `AuditStatus`.
        self._last_mismatch = ""

    def status(self) -> AuditStatus:
        return AuditStatus(waiting=self.waiting, last_mismatch=self._last_mismatch, **self._counts)

    def note(self, finished: Finished) -> None:
        """Note a sample that ended well, and perhaps choose it for an audit. The choice is random and does not depend
        on the client's request."""
        if self._rng.random() >= self._config.audit_fraction:
            return
        nodes = finished.receipt.prefill_node.node_id, finished.receipt.decode_node.node_id
        need = finished.task.need.again(*nodes)
        num_tokens = need.num_prompt + len(finished.records) // RECORD.size
        if self._closed or self.waiting >= MAX_WAITING or self._num_tokens() + num_tokens > MAX_WAITING_TOKENS:
            self._counts["skipped"] += 1
            return
        sample = _repeated(finished.task)
        self._waiting.append(Audit(finished=finished, sample=sample, need=need, num_tokens=num_tokens))
        asyncio.get_running_loop().call_soon(self.pump)

    def _num_tokens(self) -> int:
        return sum(audit.num_tokens for audit in (*self._waiting, *self._running.values()))

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
        self._counts["skipped"] += len(self._waiting)
        self._waiting.clear()
        self._idle.end(self._running)

    async def close(self) -> None:
        """Stop, and wait until the reproduction files are written, at most `CLOSE_TIMEOUT_S` seconds."""
        self.stop()
        if self._writing:
            await asyncio.wait(set(self._writing), timeout=CLOSE_TIMEOUT_S)

    def _start(self, audit: Audit) -> bool:
        sample = replace(audit.sample, deadline=loop_time() + AUDIT_TIMEOUT_S)
        output, spare = AuditOutput(audit.finished), SPARE_SLOTS
        run = self._idle.start(sample, audit.need, output, self._ended, spare_slots=spare, keeps_free=spare)
        if run is not None:
            audit.tries += 1
            self._running[run] = audit
        return run is not None

    def _ended(self, run: IdleRun) -> None:
        audit, end = self._running.pop(run), run.end
        if isinstance(end, NodeFaultError) and isinstance(end.error, NotFiniteError):
            end = FinishReason.ERROR  # This is a difference: the first run had finite logits and drew tokens.
        if isinstance(end, FinishReason):
            self._judge(audit, run.attempt, end)
        elif end is not None:
            self._counts["failed"] += 1
            known = isinstance(end, (NodeFaultError, CorunError))
            log.warning("%s failed: %s", audit, end, exc_info=None if known else end)
        elif self._closed or audit.tries >= MAX_TRIES:
            self._counts["skipped"] += 1
        else:
            self._waiting.appendleft(audit)

    def _judge(self, audit: Audit, attempt: Attempt, reason: FinishReason) -> None:
        nodes = (ref.node_id for ref in attempt.placement.refs)
        same_nodes = tuple(node_id for node_id in nodes if node_id in audit.need.avoid)  # There were no others.
        self._counts["same_node"] += bool(same_nodes)
        output = attempt.output
        assert isinstance(output, AuditOutput)
        differs_at = output.differs_at(reason)
        if differs_at is None:
            self._counts["matched"] += 1
            log.debug("%s gave the same bits; nodes used again: %s", audit, same_nodes)
            return
        first = audit.finished.receipt
        again = receipt_of(attempt.task, first.fingerprint, output, attempt.placement, reason)
        drawn = _drawn(audit.finished.records, differs_at), _drawn(output.records, differs_at)
        task = attempt.task
        row = reproduction_row(task.prompt_token_ids, task.params, (first, again), differs_at, drawn, same_nodes)
        self._counts["mismatched"] += 1
        self._accuse(audit, again, row)

    def _accuse(self, audit: Audit, second: Receipt, row: Mapping[str, Any]) -> None:
        """Quarantine the nodes of both runs until they have restarted, because one run was wrong and nothing shows
        which. Keep a reproduction file. second: the audit's receipt."""
        first, found = audit.finished.receipt, row["audit"]
        self._last_mismatch = (
            f"{found['time']}: {audit.finished.task} differs at token {found['differs_at']}: {first.prefill_node} and "
            f"{first.decode_node} first, {second.prefill_node} and {second.decode_node} then"
        )
        log.error("audit: %s", self._last_mismatch)
        nodes = first.prefill_node, first.decode_node, second.prefill_node, second.decode_node
        self._registry.quarantine(nodes, str(audit))
        if self._config.audit_dir:
            task = asyncio.ensure_future(self._write(first.request_id, row))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, request_id: str, row: Mapping[str, Any]) -> None:
        """Write a reproduction file in a thread. Errors of the file system are logged."""
        try:
            path = await asyncio.to_thread(write_reproduction, Path(self._config.audit_dir), row)
        except OSError as error:
            log.error("no reproduction of %s could be written: %s", request_id, error)
        else:
            log.error("run it again: corun verify --reproduction %s", path)


def _repeated(task: SampleTask) -> SampleTask:
    """Return the sample that repeats a finished one. It is nobody's: its client has its output."""
    params = replace(task.params, top_logprobs=0)  # What is compared has none.
    return replace(task, params=params, received=None, caller=ANYONE, share_scope="", isolated=True)


def _record(records: bytes | bytearray, position: int) -> bytes | bytearray:
    """Return the record of the token at `position`; empty after the last token."""
    return records[position * RECORD.size : (position + 1) * RECORD.size]


def _drawn(records: bytes | bytearray, position: int) -> tuple[int, float] | None:
    record = _record(records, position)
    return RECORD.unpack(record) if record else None
