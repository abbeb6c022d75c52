"""The playground: a page that runs one prompt alone and in a crowd and compares the bits, and the kill of a node.

The page is a client of the gateway's public API like any other; only the kill has a path of its own. This module owns
the page's address, what its scripts may connect to, and who may ask for a kill. It must not know how a node is killed,
nor what the page does.
"""

from __future__ import annotations

from aiohttp import web

from corun.config.fields import ORIGIN
from corun.errors import InvalidArgumentError
from corun.gateway.activity import Prompts
from corun.gateway.bodies import Limits, read_body
from corun.gateway.clients import Catalog, Clients, bearer_token
from corun.gateway.config import GatewayConfig
from corun.gateway.kills import Kills
from corun.gateway.pages import Pages
from corun.gateway.requests import check_known, read_json, text
from corun.params import check_request_id

LOOPBACK = ("http://127.0.0.1:*", "http://localhost:*")
"""The servers that the page may always call, as its policy writes them: those on the viewer's own machine."""
EXAMPLE = "http://127.0.0.1:8001/v1"
"""The address that the page shows as an example of another server."""
UNKNOWN = "http://HOST:PORT"
"""What the page's commands have where a client names no usable host."""
_BODY_BYTES = 4096


class Playground:
    """Serves the playground's page and what it needs beyond the public API."""

    def __init__(
        self, config: GatewayConfig, pages: Pages, clients: Clients, catalog: Catalog, activity: Prompts
    ) -> None:
        self._config, self._pages, self._clients, self._catalog = config, pages, clients, catalog
        self._activity = activity
        self._kills = Kills(config)
        self._origins = tuple(filter(None, config.foreign_origins.split(",")))

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page. It has no secret, so it needs no token and no cluster; its calls do."""
        url = f"{request.scheme}://{request.host}"
        return self._pages.render(
            "playground.html",
            connect=" ".join(("'self'", *LOOPBACK, *self._origins)),
            url=url if ORIGIN.fullmatch(url) else UNKNOWN,  # Readers give it to a shell.
            origins=self._origins,
            denied=self._kills.denied,
            example=EXAMPLE,
        )

    async def get_kill(self, request: web.Request) -> web.Response:
        """Answer why no node can be killed now."""
        with self._activity.request():
            await self._catalog.served(bearer_token(request.headers.get("Authorization")))
            return web.json_response({"refused": await self._kills.refused()})

    async def post_kill(self, request: web.Request) -> web.Response:
        """Kill the node on which a request of the client decodes."""
        token = bearer_token(request.headers.get("Authorization"))
        with self._activity.request(), self._activity.told():
            served = await self._catalog.served(token)
            limits = Limits(size=_BODY_BYTES, structure=_BODY_BYTES, max_model_len=served.max_model_len)
            body = await read_body(request, limits, lambda count: None, self._config.client_timeout_s)
            fields = read_json(body)
            check_known(fields, ("request_id",), {})
            request_id = check_request_id(text(fields, "request_id") or "")
            if not request_id:
                raise InvalidArgumentError("request_id", request_id, "must be that of a request of yours that runs")
            with self._clients.lease(token) as client:
                return web.json_response({"killed": await self._kills.kill(request_id, client)})
