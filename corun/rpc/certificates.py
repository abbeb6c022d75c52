"""Files that are renewed on disk while a process uses them: certificates, keys, tokens.

Owns: noticing that they have changed, and keeping what was read before when the new ones cannot be used. Must not know
gRPC, nor what the files are for.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from corun.config.fields import TlsConfig
from corun.errors import CorunError, InvalidArgumentError, Shown

T = TypeVar("T")
State = tuple[tuple[int, int, int, int] | None, ...]

log = logging.getLogger(__name__)


class Renewed(Generic[T]):
    """What some files say, read again when they have changed. Threads may share it.

    read: raises CorunError if the files cannot be used; making this raises it, `current` logs it.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._paths = [path for path in paths if path]
        self._read = read
        self._lock = threading.Lock()
        self._state = _state(self._paths)
        self._value = read()

    def current(self) -> T:
        """What the files say now, or said when they could be used last."""
        with self._lock:
            state = _state(self._paths)  # Before they are read: what changes meanwhile is read the next time.
            if state != self._state:
                self._state = state
                self._renew()
            return self._value

    def _renew(self) -> None:
        names = ", ".join(self._paths)
        try:
            value = self._read()
        except CorunError as error:
            log.error("what was read before stays in use, since the renewed files cannot be: %s", error)
            return
        if value != self._value:
            self._value = value
            log.info("renewed: %s", names)


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of the files of one end of TLS links."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


def identity(tls: TlsConfig) -> Renewed[Identity]:
    """Raises InvalidArgumentError if the files cannot be used."""
    return Renewed((tls.cert, tls.key, tls.ca), lambda: _read_identity(tls))


def _read_identity(tls: TlsConfig) -> Identity:
    found = _content(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if found.ca:
            context.load_verify_locations(cadata=found.ca.decode("ascii", "ignore"))  # Comments may hold anything.
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgumentError("tls_ca", tls.ca, f"must hold certificates: {error}") from error
    try:
        if found.cert:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")  # Else OpenSSL would ask the terminal.
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgumentError("tls_key", tls.key, f"must be that of {tls.cert}: {error}") from error
    if _content(tls) != found:  # What was checked must be what is used.
        raise InvalidArgumentError("tls_cert", Shown(tls.cert), "must not change while it is read")
    return found


def _content(tls: TlsConfig) -> Identity:
    return Identity(tls.pem("cert"), tls.pem("key"), tls.pem("ca"))


def _state(paths: Sequence[str]) -> State:
    """Differs when a file was written, replaced, or is another one behind its link; None: there is none."""
    return tuple(_state_of(path) for path in paths)


def _state_of(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
