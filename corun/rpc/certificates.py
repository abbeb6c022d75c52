"""Files that are renewed on disk while a process uses them: certificates, keys, tokens.

This module notices that files have changed. If the new files cannot be used, it keeps what was read before. It must
not know gRPC, nor what the files are for.
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
    """A value read from some files, which is read again when they have changed. Threads may share it.

    read: returns the value, and raises CorunError if the files cannot be used. The constructor raises that error;
    `current` logs it.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._paths = [path for path in paths if path]
        self._read = read
        self._lock = threading.Lock()
        self._state = _state(self._paths)
        self._value = read()

    def current(self) -> T:
        """Return the value of the files now, or the one from when they could last be used."""
        with self._lock:
            state = _state(self._paths)  # Taken before reading, so a later change is noticed.
            if state != self._state:
                self._state = state
                try:
                    value = self._read()
                except CorunError as error:
                    log.error("what was read before stays in use, since the renewed files cannot be: %s", error)
                    return self._value
                if value != self._value:
                    self._value = value
                    log.info("renewed: %s", ", ".join(self._paths))
            return self._value


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of the files that one end of TLS links uses."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


def identity(tls: TlsConfig) -> Renewed[Identity]:
    """Return the content of the TLS files, kept up to date. Raises InvalidArgumentError if they cannot be used."""
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
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")  # Keeps OpenSSL from asking the terminal.
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgumentError("tls_key", tls.key, f"must be that of {tls.cert}: {error}") from error
    if _content(tls) != found:  # The files that were checked must be those that are used.
        raise InvalidArgumentError("tls_cert", Shown(tls.cert), "must not change while it is read")
    return found


def _content(tls: TlsConfig) -> Identity:
    return Identity(tls.pem("cert"), tls.pem("key"), tls.pem("ca"))


def _state(paths: Sequence[str]) -> State:
    """Return the state of files, which changes when one is written, replaced, linked to another, or gets another owner
    or mode; None: no file."""
    states: list[tuple[int, int, int, int] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            states.append(None)
        else:
            states.append((found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev))
    return tuple(states)
