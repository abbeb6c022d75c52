"""How `corun scale` reaches a running `corun up`: a named Ray actor has the wanted cluster and how far it is reached.

This module owns that actor, the note that says where it is, and the wait of the caller. It must not know how a cluster
is scaled.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corun.config.cluster_file import ClusterSpec
from corun.errors import DeadlineError, InvalidArgumentError, Shown, UnavailableError
from corun.launch import preflight, runtime
from corun.launch.members import ROUTER, ProcessSpec

_POLL_S = 0.2
_CALL_TIMEOUT_S = 10.0
_PREFIX = "corun-up-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleStatus:
    """How far the nodes of a cluster are from what is wanted, as `corun up` saw it last."""

    spec: ClusterSpec
    """What was wanted then."""
    unsettled: frozenset[ProcessSpec] = frozenset()
    """The nodes that are not yet as wanted. A node that failed is none of them."""
    failed: Mapping[ProcessSpec, str] = field(default_factory=dict)
    """The wanted nodes that cannot start, each with the reason."""


class _Board:
    """The actor with the wanted cluster. It lives as long as the `corun up` that made it, on the same machine.

    is_alone: all nodes run on this machine, so its memory is theirs. What other machines have is not known here.
    """

    def __init__(self, spec: ClusterSpec, is_alone: bool) -> None:
        self._wanted = spec
        self._is_alone = is_alone
        self._status = ScaleStatus(spec=spec)

    def read(self) -> tuple[ClusterSpec, ScaleStatus]:
        return self._wanted, self._status

    def change(self, pool: str, counts: Mapping[str, int]) -> Change | InvalidArgumentError:
        """Want other numbers of processes. Return the error if they are not allowed: Ray would wrap a raised one."""
        before = self._wanted
        try:
            name = before.pool(pool).name
            if ROUTER in counts:
                limit = "cannot change while it serves: nodes and clients know the routers by their addresses"
                raise InvalidArgumentError(ROUTER, counts[ROUTER], limit)
            wanted, text = before.scaled(name, counts), in_words(before, name, counts)
            if self._is_alone and (lack := preflight.lacking_memory(before, wanted)):
                raise InvalidArgumentError("counts", Shown(text), lack)
        except InvalidArgumentError as error:
            return error
        self._wanted = wanted
        return Change(pool=name, counts=counts, text=text, had_failed=tuple(self._status.failed))

    def report(self, status: ScaleStatus) -> ClusterSpec:
        """Take what `corun up` saw. Return what is wanted now."""
        self._status = status
        return self._wanted


class Control:
    """The `corun up` side of the actor. spec: the cluster that is wanted at first. is_alone: all nodes run on this
    machine."""

    def __init__(self, spec: ClusterSpec, *, is_alone: bool) -> None:
        self.name = _PREFIX + secrets.token_hex(4)
        here = runtime.on(runtime.api().get_runtime_context().get_node_id())
        self._board = runtime.api().remote(_Board).options(name=self.name, num_cpus=0, **here).remote(spec, is_alone)
        self._question: Any = None

    def report(self, status: ScaleStatus) -> ClusterSpec | None:
        """Report what was seen. Return what is wanted now, or None if the actor has not answered yet: never wait."""
        self._question = self._question or self._board.report.remote(status)
        answered, _ = runtime.api().wait([self._question], timeout=0)
        if not answered:
            return None
        question, self._question = self._question, None
        with suppress(runtime.api().exceptions.RayActorError):
            wanted: ClusterSpec = runtime.api().get(question)
            return wanted
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Where a running `corun up` is found."""

    pid: int
    name: str
    """The name of its actor."""
    address: str
    """The address of the Ray that it runs on."""
    host: str
    """The address of this machine in that Ray."""
    auth_mode: str
    """The RAY_AUTH_MODE of that Ray. The token itself stays where Ray keeps it."""


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Let `corun scale` on this machine find this process for as long as the block runs."""
    address = runtime.api().get_runtime_context().gcs_address
    auth_mode = os.environ.get(runtime.AUTH_MODE_VARIABLE, "")
    note = Note(pid=os.getpid(), name=name, address=address, host=runtime.own_host(), auth_mode=auth_mode)
    path = _directory() / f"{note.pid}.json"
    aside = path.with_suffix(".new")  # `corun scale` may read the directory at any time.
    aside.write_text(json.dumps(asdict(note)))
    os.replace(aside, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _directory() -> Path:
    """Return the directory of the notes. Only this user may write there: a note decides which Ray is called."""
    base, path = os.environ.get("XDG_RUNTIME_DIR"), Path(tempfile.gettempdir()) / f"corun-{os.getuid()}"
    with suppress(OSError):  # After `su`, it may be the directory of another user, or of none.
        if base and os.stat(base).st_uid == os.getuid():
            path = Path(base) / "corun"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UnavailableError(f"{path} must be a directory that only you can write to")
    return path


def latest() -> Note | None:
    """Return the note of the `corun up` that was started last, or None.

    Remove the notes of processes that were killed. Leave notes that another version wrote.
    """
    living: list[tuple[float, Note]] = []
    for path in _directory().glob("*.json"):
        if not Path(f"/proc/{path.stem}").exists():
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError, ValueError, TypeError):  # It is gone, or of another version.
            living.append((path.stat().st_mtime, Note(**json.loads(path.read_text(encoding="utf-8")))))
    return max(living, key=lambda found: found[0])[1] if living else None


def scale(pool: str, counts: Mapping[str, int], *, ray_address: str | None, timeout_s: float) -> str:
    """Tell a running `corun up` other numbers of processes. Return what happened once its nodes are as wanted.

    ray_address: the Ray that `corun up` runs on; None: that of the `corun up` started last on this machine.

    Raises:
        InvalidArgumentError: these numbers are not allowed; nothing was changed.
        UnavailableError: there is no `corun up`, a wanted process cannot start, or somebody wants other numbers now.
        DeadlineError: the change was not done in time; `corun up` continues with it.
    """
    deadline = time.monotonic() + timeout_s
    name, host = "", ""
    if ray_address is None:
        if (note := latest()) is None:
            raise UnavailableError("no corun up runs on this machine; give --ray-address, if one runs elsewhere")
        if note.auth_mode:
            os.environ.setdefault(runtime.AUTH_MODE_VARIABLE, note.auth_mode)
        name, host, ray_address = note.name, note.host, note.address
    with runtime.joined(ray_address, host):
        board = _find_board(name)
        change: Change | InvalidArgumentError = _get(board.change.remote(pool, counts))
        if isinstance(change, InvalidArgumentError):
            raise change
        try:
            while not change.is_done(*_get(board.read.remote())):
                if time.monotonic() > deadline:
                    raise DeadlineError(f"not done within {timeout_s:g} s; corun up goes on with it, and says how")
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            print(f"corun up goes on with it: {change.text}", file=sys.stderr)
            raise
    return change.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The numbers of processes that one `corun scale` has written."""

    pool: str
    counts: Mapping[str, int]
    text: str
    had_failed: Collection[ProcessSpec]
    """The nodes that had failed before the change. They do not decide whether it is done."""

    def is_done(self, wanted: ClusterSpec, status: ScaleStatus) -> bool:
        """Return whether the nodes are as wanted. wanted: what is wanted now. status: what `corun up` saw last.

        Raises UnavailableError if a wanted node cannot start, or if other numbers are wanted now.
        """
        now = {role: wanted.pool(self.pool).count(role) for role in self.counts}
        if now != self.counts:
            numbers = ", ".join(f"{role}={count}" for role, count in now.items())
            raise UnavailableError(f"{self.text}: superseded by a later request, {numbers}")
        if status.spec != wanted:
            return False  # `corun up` has not read these numbers yet.
        failed = [node for node in status.failed if self._concerns(node) and node not in self.had_failed]
        for node in sorted(failed, key=lambda node: node.name):
            raise UnavailableError(f"{self.text}: {node.name} {status.failed[node]}")
        return not any(map(self._concerns, status.unsettled))

    def _concerns(self, node: ProcessSpec) -> bool:
        return node.pool == self.pool and node.role in self.counts


def in_words(before: ClusterSpec, pool: str, counts: Mapping[str, int]) -> str:
    """Return a change of the numbers of processes of a pool as text. before: the cluster before the change."""
    changes = ", ".join(f"{role} {before.pool(pool).count(role)} → {count}" for role, count in counts.items())
    return changes if len(before.pools) == 1 else f"pool {pool}: {changes}"


def _find_board(name: str) -> Any:
    """Return the actor with this name; if the name is empty, the actor of the only `corun up` on this Ray."""
    listed = runtime.api().util.list_named_actors(all_namespaces=True)
    names = [found["name"] for found in listed if found["namespace"] == runtime.NAMESPACE]
    names = [found for found in names if (found == name if name else found.startswith(_PREFIX))]
    if not names:
        raise UnavailableError("no corun up runs on that Ray")
    if len(names) > 1:
        raise UnavailableError(
            f"{len(names)} corun ups run on that Ray: use corun scale where the one meant was started"
        )
    try:
        return runtime.api().get_actor(names[0], namespace=runtime.NAMESPACE)
    except ValueError as error:  # It has ended since it was listed.
        raise UnavailableError("no corun up runs on that Ray") from error


def _get(question: Any) -> Any:
    errors = runtime.api().exceptions
    try:
        return runtime.api().get(question, timeout=_CALL_TIMEOUT_S)
    except (errors.RayActorError, errors.GetTimeoutError) as error:
        raise UnavailableError("corun up has ended, or does not answer") from error
