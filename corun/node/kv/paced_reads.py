"""Posts reads of KV in pieces, a few milliseconds in each step, so that a long prompt's read stops nobody's stream.

Owns: when the pieces of vLLM's reads are posted, and the state of a read as a whole. Must not know: whose KV it is.

NIXL posts each descriptor by itself, in the caller's thread, which is the engine's own: 9 us each on an H200, 5 ms for
a prompt of 8,000 tokens. Two dozen such prompts in one step stopped all rows for up to 0.4 s.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

POST_S = 0.01
"""The time in a step after which no further piece is posted. The GPU computes the step meanwhile."""
PIECE = 256
"""Descriptors of a piece. One is a block: of all layers, or of one, as the model keeps its KV."""
log = logging.getLogger(__name__)
_SUMMED = ("postDuration", "totalBytes", "descCount")


@dataclass(eq=False, slots=True, kw_only=True)
class Read:
    """A read as vLLM knows it. It stands for several NIXL transfers, one after the other."""

    sides: tuple[Any, Any]
    """The prepared descriptor lists, ours and the peer's."""
    ours: Sequence[int]
    theirs: Sequence[int]
    """Indices in these lists."""
    posted: int = 0
    """The number of indices that were posted."""
    running: deque[Any] = field(default_factory=deque)
    """The handles of the pieces that have not ended."""
    has_failed: bool = False
    began: float = 0.0
    sums: Counter[str] = field(default_factory=Counter)
    """NIXL's figures of the pieces that ended, by their names there."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of this read will be posted any more."""
        return self.has_failed or self.posted >= len(self.ours)


class PacedReads:
    """NIXL's agent as vLLM's worker sees it: all is the agent's own but reads. They send no notice when they end."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._waiting: deque[Read] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(
        self,
        operation: str,
        local: Any,
        ours: Sequence[int],
        remote: Any,
        theirs: Sequence[int],
        notif_msg: bytes = b"",
    ) -> Read:
        if operation != "READ":
            raise ValueError(f"only reads are paced, not {operation}")
        return Read(sides=(local, remote), ours=ours, theirs=theirs)

    def transfer(self, read: Read) -> None:
        read.began = time.monotonic()
        self._waiting.append(read)

    def post(self) -> None:
        """Post one piece of each waiting read in turn, until `POST_S` have passed."""
        end = time.monotonic() + POST_S
        while self._waiting:
            read = self._waiting.popleft()
            if read.is_over:
                continue
            self._post_piece(read)
            self._waiting.append(read)
            if time.monotonic() >= end:
                return

    def check_xfer_state(self, read: Read) -> str:
        """Return the state of the whole read. A failed read ends only when nothing writes to its blocks any more."""
        while read.running:
            state = "ERR"
            with _failing(read):
                state = self._agent.check_xfer_state(read.running[0])
            if state == "PROC":
                return "PROC"
            handle = read.running.popleft()
            read.has_failed |= state != "DONE"
            with _failing(read):
                if state == "DONE":
                    found = self._agent.get_xfer_telemetry(handle)
                    read.sums.update({name: getattr(found, name) for name in _SUMMED})
                self._agent.release_xfer_handle(handle)
        if not read.is_over:
            return "PROC"
        return "ERR" if read.has_failed else "DONE"

    def get_xfer_telemetry(self, read: Read) -> Any:
        """Return NIXL's figures of a read that has just ended. Its duration is the time until now, in microseconds."""
        return SimpleNamespace(
            **{name: read.sums[name] for name in _SUMMED}, xferDuration=1e6 * (time.monotonic() - read.began)
        )

    def release_xfer_handle(self, read: Read) -> None:
        if read in self._waiting:
            self._waiting.remove(read)
        while read.running:
            self._agent.release_xfer_handle(read.running.popleft())

    def _post_piece(self, read: Read) -> None:
        here = slice(read.posted, read.posted + PIECE)
        read.posted = here.stop
        local, remote = read.sides
        with _failing(read):
            handle = self._agent.make_prepped_xfer("READ", local, read.ours[here], remote, read.theirs[here])
            read.running.append(handle)
            read.has_failed |= self._agent.transfer(handle) == "ERR"


@contextmanager
def _failing(read: Read) -> Iterator[None]:
    """Turn an error of NIXL into a failed read: out of vLLM's step, it would end the engine."""
    try:
        yield
    except Exception as error:  # NIXL's errors share no base class.
        log.error("a piece of a KV read failed: %r", error)
        read.has_failed = True
