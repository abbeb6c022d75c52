"""Requests of `corun scale` that are not done yet, and the outcome of each.

This module is pure. It must not know how processes are started and stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from corun.launch.control import Outcome, Request
from corun.launch.members import ProcessSpec
from corun.launch.supervisor import ProcessState, ProcessStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A request that was accepted."""

    request: Request
    pool: str
    text: str
    touched: tuple[ProcessSpec, ...]
    """The nodes that this change adds or removes. Only these nodes decide its outcome."""

    def superseded(self, other: Change) -> bool:
        """Return whether a later change sets the count of a role that this change also sets, in the same pool."""
        return self.pool == other.pool and not self.request.counts.keys().isdisjoint(other.request.counts)

    def outcome(
        self,
        wanted: Collection[ProcessSpec],
        running: Collection[ProcessSpec],
        stopping: Collection[ProcessSpec],
        statuses: Mapping[ProcessSpec, ProcessStatus],
        in_use: Sequence[Collection[str]],
    ) -> Outcome | None:
        """Return the outcome of this change, or None while it is not done.

        in_use: for each router that answers, the names of the nodes that it uses.
        """
        for member in (m for m in self.touched if m in wanted and m not in stopping):
            status = statuses.get(member)
            if status is not None and status.state is ProcessState.FAILED:
                return Outcome(text=f"{self.text}: {member.name} {status.detail}", failed=True)
        settled = all((m in running) == (m in wanted) and m not in stopping for m in self.touched)
        seen = bool(in_use) and all((m.name in used) == (m in wanted) for used in in_use for m in self.touched)
        return Outcome(text=self.text) if settled and seen else None


class Changes:
    """The changes that are not done yet."""

    def __init__(self) -> None:
        self._open: list[Change] = []

    def __iter__(self) -> Iterator[Change]:
        return iter(list(self._open))

    def add(
        self, request: Request, pool: str, text: str, before: Sequence[ProcessSpec], after: Sequence[ProcessSpec]
    ) -> list[tuple[Request, Outcome]]:
        """Add a request. Return the outcomes of the requests that it supersedes.

        The new change also takes over the nodes of the same roles that the superseded changes touched. before, after:
        all members of the cluster before and after the request.
        """
        differ = dict.fromkeys(m for m in (*before, *after) if (m in before) != (m in after))
        new = Change(request=request, pool=pool, text=text, touched=tuple(differ))
        old = [change for change in self._open if change.superseded(new)]
        begun = dict.fromkeys(m for change in old for m in change.touched if m.role in request.counts)
        self._open = [change for change in self._open if change not in old]
        self._open.append(replace(new, touched=tuple(differ | begun)))
        return [
            (change.request, Outcome(text=f"{change.text}: superseded by a later request, {text}", failed=True))
            for change in old
        ]

    def remove(self, change: Change) -> None:
        self._open.remove(change)
