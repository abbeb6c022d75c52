"""How `corun scale` reaches a running `corun up`: requests and outcomes go through a named Ray actor.

This module owns that actor, the note that says where it is, and the wait of the caller. It must not know how a cluster
is scaled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corun.errors import DeadlineError, InvalidArgumentError, Shown, UnavailableError
from corun.launch import runtime

_POLL_S = 0.2
_CALL_TIMEOUT_S = 10.0
_PREFIX = "corun-up-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for other numbers of processes in one pool."""

    number: int
    pool: str
    """The name of the pool; empty: the only pool."""
    counts: Mapping[str, int]
    """The wanted number of processes, by role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a request."""

    text: str
    refused: tuple[str, str, str] | None = None
    """The field, value and limit of an invalid request; nothing was changed."""
    failed: bool = False
    """True if the change was tried but a process cannot start, or if a later request superseded it."""


class _Mailbox:
    """The actor that holds requests and their outcomes. It lives as long as the `corun up` that made it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._outcomes: dict[int, Outcome] = {}
        self._number = 0

    def ask(self, pool: str, counts: dict[str, int]) -> int:
        self._number += 1
        self._requests.append(Request(number=self._number, pool=pool, counts=counts))
        return self._number

    def take(self) -> list[Request]:
        taken, self._requests = self._requests, []
        return taken

    def tell(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome

    def outcome(self, number: int) -> Outcome | None:
        return self._outcomes.pop(number, None)


class Control:
    """The `corun up` side of the mailbox."""

    def __init__(self) -> None:
        self.name = _PREFIX + secrets.token_hex(4)
        self._mailbox = runtime.api().remote(_Mailbox).options(name=self.name, num_cpus=0, **runtime.here()).remote()
        self._question: Any = None

    def take(self) -> list[Request]:
        """Return the new requests. Never wait: if the actor has not answered yet, a later call returns the answer."""
        self._question = self._question or self._mailbox.take.remote()
        answered, _ = runtime.api().wait([self._question], timeout=0)
        if not answered:
            return []
        question, self._question = self._question, None
        with contextlib.suppress(runtime.api().exceptions.RayActorError):
            return list(runtime.api().get(question))
        return []

    def tell(self, request: Request, outcome: Outcome) -> None:
        self._mailbox.tell.remote(request.number, outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Where a running `corun up` is found."""

    pid: int
    name: str
    """The name of its mailbox actor."""
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
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "corun" if base else Path(tempfile.gettempdir()) / f"corun-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        elif (found := _read(path)) is not None:
            living.append(found)
    return max(living, key=lambda found: found[0])[1] if living else None


def _read(path: Path) -> tuple[float, Note] | None:
    """Return a note and the time it was written; None if this version cannot read it or the file is gone."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return path.stat().st_mtime, Note(**content)
    except (OSError, ValueError, TypeError):
        return None


def scale(pool: str, counts: Mapping[str, int], *, ray_address: str | None, timeout_s: float) -> str:
    """Ask a running `corun up` for other numbers of processes. Return what happened once the change is done.

    ray_address: the Ray that `corun up` runs on; None: that of the `corun up` started last on this machine.

    Raises:
        InvalidArgumentError: these numbers are not allowed; nothing was changed.
        UnavailableError: there is no `corun up`, a wanted process cannot start, or a later request superseded this one.
        DeadlineError: the change was not done in time; `corun up` continues with it.
    """
    deadline = time.monotonic() + timeout_s
    note = latest() if ray_address is None else None
    if note is None and ray_address is None:
        raise UnavailableError("no corun up runs on this machine; give --ray-address, if one runs elsewhere")
    if note is not None and note.auth_mode:
        os.environ.setdefault(runtime.AUTH_MODE_VARIABLE, note.auth_mode)
    with runtime.joined(note.address if note else str(ray_address), note.host if note else ""):
        mailbox = _mailbox(note.name if note else "")
        number = _get(mailbox.ask.remote(pool, dict(counts)))
        while (outcome := _get(mailbox.outcome.remote(number))) is None:
            if time.monotonic() > deadline:
                raise DeadlineError(f"not done within {timeout_s:g} s; corun up goes on with it, and says how")
            time.sleep(_POLL_S)
    if outcome.refused is not None:
        field, value, limit = outcome.refused
        raise InvalidArgumentError(field, Shown(value), limit)
    if outcome.failed:
        raise UnavailableError(outcome.text)
    return str(outcome.text)


def _mailbox(name: str) -> Any:
    """Return the mailbox actor with this name; if the name is empty, the actor of the only `corun up` on this Ray."""
    listed = runtime.api().util.list_named_actors(all_namespaces=True)
    names = [found["name"] for found in listed if found["namespace"] == runtime.NAMESPACE]
    names = [found for found in names if (found == name if name else found.startswith(_PREFIX))]
    if not names:
        raise UnavailableError("no corun up runs on that Ray")
    if len(names) > 1:
        raise UnavailableError(
            f"{len(names)} corun ups run on that Ray: use corun scale where the one meant was started"
        )
    return runtime.api().get_actor(names[0], namespace=runtime.NAMESPACE)


def _get(question: Any) -> Any:
    errors = runtime.api().exceptions
    try:
        return runtime.api().get(question, timeout=_CALL_TIMEOUT_S)
    except (errors.RayActorError, errors.GetTimeoutError) as error:
        raise UnavailableError("corun up has ended, or does not answer") from error
