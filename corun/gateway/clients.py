"""The SDK clients that a gateway keeps: one for each token of its own clients, and more where one connection is full.

This module owns how many SDK clients there are, and what is known about the served model. The gateway passes each
request on with the token that it came with, so the routers decide who may do what. This module must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from corun.client.client import AsyncClient
from corun.errors import InvalidArgumentError, OverloadedError, UnauthenticatedError, UnavailableError
from corun.gateway.config import GatewayConfig
from corun.rpc.auth import check_token
from corun.types import TemplateSource

T = TypeVar("T")

MAX_CALLS = 1000
"""The most calls in progress on one SDK client. A router takes 1024 calls on a connection; more would wait unseen."""
FRESH_S = 10.0
"""The time in seconds for which the served model, and the routers' acceptance of a token, are assumed unchanged."""
HEALTH_FRESH_S = 1.0
"""The time in seconds for which an answer about the cluster's health is reused."""
RETRY_S = 1.0

log = logging.getLogger(__name__)


class Clients:
    """SDK clients by token. When there are too many tokens, the least recently used one without calls is dropped."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._kept: OrderedDict[str, dict[AsyncClient, int]] = OrderedDict()
        """The clients of each token, with the number of their calls in progress."""
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def lease(self, token: str, calls: int = 1) -> Iterator[AsyncClient]:
        """Yield an SDK client that shows `token`, for `calls` calls. Raises OverloadedError if too many tokens are in
        use, and UnavailableError if a file of the gateway cannot be used any more."""
        if token not in self._kept:
            if len(self._kept) >= self._config.max_tokens_kept:
                self._drop_one()
            self._kept[token] = {}
        self._kept.move_to_end(token)
        running = self._kept[token]
        client = next((each for each, count in running.items() if not count or count + calls <= MAX_CALLS), None)
        client = client or self._new(token)
        running[client] = running.get(client, 0) + calls
        try:
            yield client
        finally:
            running[client] -= calls

    def forget(self, token: str) -> None:
        """Close the idle connections of a token that the routers refuse. They would take the place of other tokens'."""
        if not any(self._kept.get(token, {}).values()):
            self._drop(token)

    async def close(self) -> None:
        """Close every SDK client, which ends the calls in progress."""
        for token in list(self._kept):
            self._drop(token)
        await asyncio.gather(*self._closing)

    def _new(self, token: str) -> AsyncClient:
        try:
            return AsyncClient(**self._config.arguments(token))
        except InvalidArgumentError as error:  # It was fit at the start, and its path is no client's business.
            log.error("no client of the routers can be made: %s", error)
            raise UnavailableError("the gateway cannot call the routers now", RETRY_S) from error

    def _drop_one(self) -> None:
        idle = next((token for token, running in self._kept.items() if not any(running.values())), None)
        if idle is None:
            raise OverloadedError(f"requests with {len(self._kept)} different tokens are in progress", RETRY_S)
        self._drop(idle)

    def _drop(self, token: str) -> None:
        for client in self._kept.pop(token, {}):
            task = asyncio.ensure_future(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def sent_token(authorization: str) -> str | None:
    """Return what an Authorization header has after "Bearer", which may be empty; None if it has another scheme."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def bearer_token(authorization: str | None) -> str:
    """Return the token of an Authorization header; empty if there is none, or if it cannot be a token of any cluster.

    Clients of OpenAI's API always send a key, even if it is "EMPTY" or an empty text. Where a token is needed, the
    router refuses the call. Raises UnauthenticatedError for another scheme than Bearer.
    """
    if not authorization:
        return ""
    token = sent_token(authorization)
    if token is None:
        raise UnauthenticatedError("the header Authorization must be 'Bearer TOKEN'")
    try:
        return check_token("authorization", token)
    except InvalidArgumentError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model that the cluster serves."""

    name: str
    """The name of the model that clients see."""
    root: str
    """The model as the nodes name it, a path, if the cluster tells this client; otherwise the cluster's name for it."""
    max_model_len: int
    """The most tokens of prompt and output together."""
    max_prompt_bytes: int
    """The most UTF-8 bytes of a prompt given as text."""

    @property
    def names(self) -> tuple[str, str]:
        """What requests may call the model. vLLM's own clients send the `root` of /v1/models to /tokenize."""
        return self.name, self.root


class Kept(Generic[T]):
    """An answer that many requests want. Who comes while it is asked for waits for that question, also if it ends with
    an error."""

    def __init__(self, ask: Callable[[T | None], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._answer: T | None = None
        self._asked_at = -math.inf
        self._asking: asyncio.Future[T] | None = None

    async def get(self, fresh_s: float) -> T:
        """Return an answer that is at most `fresh_s` seconds old. `ask` gets the one before it, or None."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_at >= fresh_s):
            self._asking = asyncio.ensure_future(self._keep())
            self._asking.add_done_callback(_forget)
        return await asyncio.shield(self._asking)

    async def _keep(self) -> T:
        self._answer = await self._ask(self._answer)
        self._asked_at = time.monotonic()  # After an error the time stays too old, so the next one asks again.
        return self._answer


def _forget(asking: asyncio.Future[Any]) -> None:
    """Look at a question's error, which asyncio would log if all who waited for it have left."""
    if not asking.cancelled():
        asking.exception()


class _KeptByToken(Generic[T]):
    """The routers' answers to one question, by the token that they were asked with."""

    def __init__(self, ask: Callable[[str], Coroutine[Any, Any, T]], most: int) -> None:
        self._ask = ask
        self._most = most
        self._known: OrderedDict[str, Kept[T]] = OrderedDict()

    async def get(self, token: str) -> T:
        """Return an answer that is at most 10 s old, since a cluster may come back with another model and a token may
        be revoked. While no router can answer, the last answer is used."""
        known = self._known.setdefault(token, Kept(lambda last: self._ask_again(token, last)))
        self._known.move_to_end(token)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return await known.get(FRESH_S)

    async def _ask_again(self, token: str, last: T | None) -> T:
        try:
            return await self._ask(token)
        except UnauthenticatedError:
            self._known.pop(token, None)
            raise
        except (OverloadedError, UnavailableError):
            if last is None:
                raise
            return last


class Catalog:
    """What the routers say about the cluster: which model it serves, and whether it answers requests."""

    def __init__(self, config: GatewayConfig, clients: Clients) -> None:
        self._config = config
        self._clients = clients
        self._served = _KeptByToken(self.asked, config.max_tokens_kept)
        self._templates = _KeptByToken(self._ask_template, config.max_tokens_kept)
        self._own_token = config.own_token()
        self._health = Kept(self._ask_health)

    async def served(self, token: str) -> Served:
        """Return the served model. Raises the error with which a router refuses the call, or UnavailableError."""
        return await self._served.get(token)

    async def template(self, token: str) -> TemplateSource:
        """Return the served model's chat template. Raises the error with which a router refuses the call."""
        return await self._templates.get(token)

    async def asked(self, token: str) -> Served:
        """Ask a router for the served model, without use of earlier answers.

        Raises UnavailableError if no node has joined.
        """
        try:
            with self._clients.lease(token) as client:
                status = await client.get_cluster(contracts=False)
        except UnauthenticatedError:
            self._clients.forget(token)
            raise
        model = status.model
        if model is None:
            raise UnavailableError("no node has joined the cluster yet", RETRY_S)
        return Served(
            name=self._config.served_name or model.name,
            root=next((each.node.model for each in status.nodes if each.node.model), model.name),
            max_model_len=model.max_model_len,
            max_prompt_bytes=model.max_prompt_bytes,
        )

    async def check_health(self) -> None:
        """Raise UnavailableError if the cluster cannot serve now. The routers are asked at most once a second, however
        many callers there are, and see the gateway's own token."""
        error = await self._health.get(HEALTH_FRESH_S)
        if error is not None:
            raise error

    async def _ask_template(self, token: str) -> TemplateSource:
        with self._clients.lease(token) as client:
            return await client.get_chat_template()

    async def _ask_health(self, _: UnavailableError | None) -> UnavailableError | None:
        try:
            with self._clients.lease(self._own_token) as client:
                status = await client.get_cluster(contracts=False, timeout_s=5)
        except UnauthenticatedError:
            return None  # A router answers. To learn more, the gateway needs a token of its own.
        except UnavailableError as error:
            return error
        missing = [role.value for role in status.missing_roles]
        return UnavailableError(f"no node is ready: {', '.join(missing)}", RETRY_S) if missing else None
