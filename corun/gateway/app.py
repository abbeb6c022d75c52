"""A whole gateway: how its parts fit together, its routes, and its life from listening to the last answer.

Lifecycle: made → `start` → `drain` → `stop`. This module must not know command lines.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.log import server_logger

import corun
from corun.config.fields import TlsConfig
from corun.errors import InvalidArgumentError, UnavailableError
from corun.gateway.bodies import was_not_asked, when_read
from corun.gateway.clients import Catalog, Clients, bearer_token
from corun.gateway.completions import Completions
from corun.gateway.config import GatewayConfig
from corun.gateway.failures import is_ours, translated
from corun.gateway.live import Live
from corun.gateway.pages import Pages
from corun.gateway.playground import Playground
from corun.gateway.requests import check_model
from corun.gateway.streams import send_short
from corun.rpc.certificates import Identity, identity
from corun.rpc.server import join_address, raise_file_limit, run_command

KEEPALIVE_S = 3630.0
"""The time in seconds that a connection may be idle. It is longer than clients and proxies keep a connection, so that
they close it and not the gateway."""
HANDSHAKE_S = 10.0
STOP_GRACE_S = 5.0
"""The time in seconds that requests have to end after they were cancelled."""

log = logging.getLogger(__name__)


class Gateway:
    """One gateway. Make it inside a running event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.clients = Clients(config)
        self._config = config
        self._catalog = Catalog(config, self.clients)
        completions = Completions(config, self.clients, self._catalog)
        self.activity, self.room, self._renders = completions.activity, completions.room, completions.renders
        self._started_at = int(time.time())
        self.pages = Pages()
        self.live = Live(config, self.clients, self.pages)
        playground = Playground(config, self.pages, self.clients, self._catalog, self.activity)
        app = web.Application(middlewares=[self._heard, translated])
        for path, handler in (
            ("/v1/completions", completions.post),
            ("/v1/chat/completions", completions.post_chat),
            ("/v1/responses", completions.post_response),
            ("/tokenize", completions.tokenize),
            ("/detokenize", completions.detokenize),
            ("/playground/kill", playground.post_kill),
        ):
            app.router.add_post(path, handler, expect_handler=when_read)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/version", _version)
        app.router.add_get("/page/{name}", self.pages.file)
        app.router.add_get("/", self.live.get)
        app.router.add_post("/", self.live.post)
        app.router.add_get("/live", self.live.stream, allow_head=False)
        app.router.add_get("/playground", playground.page)
        app.router.add_get("/playground/kill", playground.get_kill)
        server_logger.addFilter(is_ours)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # A request ends when its client is gone.
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=STOP_GRACE_S / 5,
        )
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        """The connections that have not sent a request yet, each with the timer that closes it."""
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that the gateway listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        scheme = "https" if self._config.https else "http"
        return f"{scheme}://{join_address(self._config.host, self.port)}"

    async def start(self) -> None:
        """Start to listen. Raises InvalidArgumentError if the port cannot be listened on.

        The gateway looks for the cluster only when a request comes, so the start order does not matter.
        """
        config = self._config
        await self._runner.setup()
        context = _ssl_context(config.https) if config.https else None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection,
                config.host,
                config.port,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context else None,
                reuse_port=config.reuse_port or None,
                backlog=1024,
            )
        except (OSError, UnicodeError) as error:  # A host may be one that cannot be a name.
            reason = (isinstance(error, OSError) and error.strerror) or error
            limit = f"cannot be listened on at {config.host}: {reason}"
            raise InvalidArgumentError("port", config.port, limit) from error
        log.info("the gateway listens on %s and calls %s", self.url, config.router)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, at most `drain_grace_s` seconds."""
        if self._server is not None:
            self._server.close()
        self.live.watch.end(self.activity.shutting_down())
        if not await self.activity.drain(self._config.drain_grace_s):
            log.warning("requests still run after %g s and are cancelled", self._config.drain_grace_s)

    async def stop(self) -> None:
        """Cancel the requests that still run, tell their clients, and close."""
        if self._server is not None:
            self._server.close()
        self.activity.end()
        self.live.watch.end(self.activity.shutting_down())
        await self.activity.drain(STOP_GRACE_S)
        for timer in self._silent.values():
            timer.cancel()
        await self._runner.cleanup()
        self._renders.close()
        await self.clients.close()

    def _connection(self) -> asyncio.BaseProtocol:
        """Make aiohttp's protocol for a connection, with a timer until its first request. aiohttp's keep-alive time
        limits only clients that are idle after a request."""
        server = self._runner.server
        assert server is not None
        protocol = server()

        def drop() -> None:
            del self._silent[protocol]
            protocol.force_close()

        loop = asyncio.get_running_loop()
        self._silent[protocol] = loop.call_later(self._config.client_timeout_s, drop)
        return protocol

    @web.middleware
    async def _heard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        answer: web.StreamResponse = await handler(request)
        if (self.activity.draining or was_not_asked(request)) and not answer.prepared:
            answer.force_close()
        if isinstance(answer, web.Response):  # aiohttp would wait for ever until a client takes it.
            with suppress(ConnectionError):  # aiohttp looks whether the client is gone, too.
                await send_short(request, answer, self._config.client_timeout_s)
        return answer

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [await self._card(request)]})

    async def _model(self, request: web.Request) -> web.Response:
        card = await self._card(request)
        check_model(request.match_info["name"], card["id"], card["root"])
        return web.json_response(card)

    async def _card(self, request: web.Request) -> dict[str, Any]:
        token = bearer_token(request.headers.get("Authorization"))
        served = await self._catalog.asked(token)  # Always ask: the router must check the token.
        return {
            "id": served.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "corun",
            "root": served.root,
            "parent": None,
            "max_model_len": served.max_model_len,
            "permission": [],
        }

    async def _get_health(self, request: web.Request) -> web.Response:
        if self.activity.draining:
            raise UnavailableError("the gateway is shutting down")
        await self._catalog.check_health()
        return web.json_response({"status": "ok"})


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Start a gateway, serve until `stop` is set, then drain and stop it."""
    gateway = Gateway(config)
    try:
        await gateway.start()
        await stop.wait()
        await gateway.drain()
    finally:
        await gateway.stop()


def main(config: GatewayConfig) -> None:
    """Run a gateway in the main thread until SIGTERM or SIGINT. Raise the error that keeps it from starting."""
    config.check_files()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_file_limit()
    run_command(lambda stop: serve(config, stop))


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": corun.__version__})


def _ssl_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return an SSL context that uses renewed certificate files from the next handshake on."""
    files = identity(tls)
    made: tuple[Identity, ssl.SSLContext] | None = None

    def current() -> ssl.SSLContext:
        nonlocal made
        found = files.current()
        if made is None or made[0] != found:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert, tls.key)
            made = found, context
        return made[1]

    def renew(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = current()

    first = current()
    first.sni_callback = renew
    return first
