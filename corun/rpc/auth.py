"""Who may call what: bearer tokens of clients, the one secret of the cluster's members, and what each token may use.

This module owns token files, the comparison of tokens, and the number of requests in progress per token. It keeps
tokens as digests only. It must not know gRPC, TLS or any configuration.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from corun.errors import InvalidArgumentError, OverloadedError, Shown, UnauthenticatedError
from corun.types import Priority

AUTHORIZATION = "authorization"
"""The metadata key of a token."""
MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 512
RETRY_S = 1.0
"""The retry delay in seconds for a client that already has as many requests in progress as it may have."""

_LINE = "[NAME:] TOKEN [max_requests=N] [max_priority=high|normal|low] [weight=N] [operator]"
_SETTING = re.compile(
    r"operator|max_priority=(high|normal|low)|max_requests=[0-9]{1,9}|weight=(?!0+$)[0-9]{1,9}", re.ASCII
)
_SCHEME = "Bearer "
_OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
_PUBLIC_SERVICES = frozenset({"corun.v1.ClusterService", "grpc.reflection.v1alpha.ServerReflection"})
_UNCOUNTED = frozenset(
    {
        "/corun.v1.ClusterService/StreamOutputs",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""Methods whose calls are no requests: they carry what comes of other calls, or tell how those are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who makes a call, for code that shares something among callers. It never holds what a caller says of itself."""

    name: str = ""
    weight: int = 1
    """The weight of the caller's share when there is not enough for all."""
    max_priority: Priority = Priority.HIGH
    """The highest priority that the caller may ask for."""
    max_requests: int = 0
    """The most requests that the caller may have in progress; 0: any number."""
    is_operator: bool = False
    """Whether the caller may see all of the cluster's status, including that of other clients."""


ANYONE = Caller()
_CLUSTER = Caller(name="cluster", is_operator=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientToken:
    """One line of a file of client tokens, without its secret."""

    caller: Caller
    digest: bytes


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that carries a token. An empty token gives no metadata."""
    return ((AUTHORIZATION, _SCHEME + token),) if token else ()


def check_token(field: str, token: str, where: str = "") -> str:
    """Return the token. Raises InvalidArgumentError if it is not valid; the error never shows the token.

    where: the place of the token, for the error.
    """
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not all("!" <= char <= "~" for char in token):
        limit = f"must be {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} visible ASCII characters"
        place = f" ({where})" if where else ""
        raise InvalidArgumentError(field, Shown(f"a token of {len(token)} characters"), limit + place)
    return token


def read_token(field: str, path: str) -> str:
    """Return the one token of a file. Raises InvalidArgumentError, which names `field`, if it has none."""
    lines = _lines(field, path)
    if len(lines) != 1:
        raise InvalidArgumentError(field, path, f"must hold one token on one line, not {len(lines)}")
    return check_token(field, lines[0][1], path)


def read_client_tokens(field: str, path: str) -> tuple[ClientToken, ...]:
    """Read a file of client tokens: one per line, apart from empty lines and # comments.

    A line is `[NAME:] TOKEN [max_requests=N] [max_priority=high|normal|low] [weight=N] [operator]`. A token without a
    name is named by its digest. So it keeps its name, and what depends on the name, when the file is edited.

    Raises InvalidArgumentError if the file cannot be read, has no token or a bad line, or repeats a token or a name.
    """
    found = [_client_token(field, path, number, line) for number, line in _lines(field, path)]
    if not found:
        raise InvalidArgumentError(field, path, "must hold at least one token")
    for what, values in (("tokens", {t.digest for t in found}), ("names", {t.caller.name for t in found})):
        if len(values) != len(found):
            raise InvalidArgumentError(field, path, f"must not hold two equal {what}")
    return tuple(found)


class Gate:
    """Admits calls to a server by their token. Health checks need no token.

    cluster: the members' secret, which opens every service. Without it, all services but the public ones are open to
    all. clients: the tokens that open the public services only. Without them, the public ones are open to all. If
    clients is a function, it is called for every call, since tokens come and go.
    """

    def __init__(
        self, *, cluster: str = "", clients: Sequence[ClientToken] | Callable[[], Sequence[ClientToken]] = ()
    ) -> None:
        self._cluster = (ClientToken(caller=_CLUSTER, digest=_digest(cluster)),) if cluster else ()
        self._clients = clients if callable(clients) else lambda: clients
        self._running: Counter[str] = Counter()

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[Caller | None]:
        """Return the context that a call has to hold while it runs.

        Entering the context gives the caller, or None if tokens do not tell callers apart. It raises OverloadedError if
        the token's limit of requests in progress is reached.

        Raises UnauthenticatedError if the call has no token that opens `method`, which is "/package.Service/Method".
        """
        service = method.strip("/").partition("/")[0]
        public = service in _PUBLIC_SERVICES
        clients = self._clients() if public else ()
        needed = clients if public else self._cluster
        if service in _OPEN_SERVICES or not needed:
            return nullcontext(None)
        token = _find(_given(metadata), (*self._cluster, *clients))
        if token is None:
            kind = "a client's token" if public else "the cluster's token"
            raise UnauthenticatedError(f"{service} needs {kind} as metadata 'authorization: Bearer …'")
        is_counted = token.caller.max_requests and method not in _UNCOUNTED
        return self._hold(token.caller) if is_counted else nullcontext(token.caller)

    @contextmanager
    def _hold(self, caller: Caller) -> Iterator[Caller]:
        name, running = caller.name, self._running[caller.name]
        if running >= caller.max_requests:
            raise OverloadedError(f"client {name} has {running} requests in progress, as many as it may", RETRY_S)
        self._running[name] = running + 1
        try:
            yield caller
        finally:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]


def _given(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the token of a call; empty if it has no token, or several."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str) or values[0][: len(_SCHEME)].lower() != _SCHEME.lower():
        return ""
    return values[0][len(_SCHEME) :]


def _find(given: str, tokens: Sequence[ClientToken]) -> ClientToken | None:
    """Return the token that was given, or None.

    This takes equally long for right and wrong tokens: it compares digests of one length, each of them in full.
    """
    digest = _digest(given)
    found = [token for token in tokens if hmac.compare_digest(digest, token.digest)]
    return found[-1] if found else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _client_token(field: str, path: str, number: int, line: str) -> ClientToken:
    first, *rest = line.split()
    name, words = (first[:-1], rest) if first.endswith(":") else ("", [first, *rest])
    settings = {key: value for key, _, value in (word.partition("=") for word in words[1:])}
    # Another colon in the first word may be a part of a token. A part of it must not become a name: names are shown.
    is_clear = ":" not in first[:-1] and len(words) == 1 + len(settings)
    if not is_clear or not all(map(_SETTING.fullmatch, words[1:])):
        raise InvalidArgumentError(field, Shown(f"line {number}"), f"must be '{_LINE}' ({path})")
    token = check_token(field, words[0], f"{path}, line {number}")
    caller = Caller(
        # A token without a name has a permanent one. It is shown, so it is from another digest than the one compared.
        name=name or f"token-{_digest('corun client name ' + token).hex()[:12]}",
        weight=int(settings.get("weight", 1)),
        max_priority=Priority(settings.get("max_priority", Priority.HIGH.value)),
        max_requests=int(settings.get("max_requests", 0)),
        is_operator="operator" in settings,
    )
    return ClientToken(caller=caller, digest=_digest(token))


def _lines(field: str, path: str) -> list[tuple[int, str]]:
    """Return the lines of a file with their numbers, without empty lines and comments."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise InvalidArgumentError(field, path, f"must be a readable file: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidArgumentError(field, path, "must be ASCII text") from None
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]
