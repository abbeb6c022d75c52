"""The live page over HTTP: the page with the cluster's state as tables, and the stream of what changes.

This module must not know how the state is asked for, or what the page looks like.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from corun.errors import CorunError, UnauthenticatedError
from corun.gateway.clients import Clients, bearer_token
from corun.gateway.config import GatewayConfig
from corun.gateway.definitions import DEFINITIONS
from corun.gateway.errors import STATUSES, event_of
from corun.gateway.failures import typed
from corun.gateway.pages import Pages
from corun.gateway.streams import EventStream
from corun.gateway.view import EMPTY, SLOT_STATES, View, waiting
from corun.gateway.watch import Watch

MAX_FORM_BYTES = 2048
"""The most bytes of the form with a token, which has at most 512 characters."""

KINDS = {letter: "none" if letter == EMPTY else letter for letter in SLOT_STATES}
"""The class of a slot's square in the page."""
MAX_PAGES = 16
"""The most pages that are kept."""


class Live:
    """Answers for the live page."""

    def __init__(self, config: GatewayConfig, clients: Clients, pages: Pages) -> None:
        self.watch = Watch(clients)
        self._newest: OrderedDict[tuple[str, bool], tuple[View, str]] = OrderedDict()
        """The newest pages, by token and whether it was in a form. To write one of 1000 slots takes about 6 ms, so it
        is written once for a view, however often it is asked for."""
        self._timeout_s = config.client_timeout_s
        self._pages = pages

    async def get(self, request: web.Request) -> web.Response:
        """Return the page with the state that the request's token may see, or the form that asks for one."""
        return await self._page(bearer_token(request.headers.get("Authorization")))

    async def post(self, request: web.Request) -> web.Response:
        """Return the page for a token in a form. This is for browsers without scripts: a token is in no address."""
        try:
            fields = await asyncio.wait_for(_read_form(request), self._timeout_s)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the form did not arrive in {self._timeout_s:g} s") from None
        return await self._page(bearer_token(f"Bearer {fields.get('token', '')}"), posted=True)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the state as server-sent events, each a view as JSON. A stream that has begun ends with an error as
        an event."""
        token = bearer_token(request.headers.get("Authorization"))
        stream = EventStream(request, self._timeout_s)
        try:
            async with aclosing(self.watch.events(token)) as events:
                async for event in events:
                    await stream.send(f"data: {event}\n\n")
        except CorunError as error:
            if not stream.begun:
                raise
            return await stream.end(event_of(typed(error)))
        raise AssertionError("events end with an error only")

    async def _page(self, token: str, *, posted: bool = False) -> web.Response:
        """Return the page. posted: the token was in a form, so a browser that loads the page again loses it."""
        try:
            view = await self.watch.view(token)
        except UnauthenticatedError:
            why = "The routers do not know this token." if token or posted else ""
            return self._render(waiting("A token is needed."), status=401, refused=True, why=why)
        except CorunError as error:
            return self._render(waiting(str(error), "bad"), status=STATUSES[error.code][0])
        key = token, posted
        if (known := self._newest.get(key)) is not None and known[0] is view:
            return self._pages.response(known[1])
        answer = self._render(view, refresh=not posted)
        self._newest[key] = view, str(answer.text)
        self._newest.move_to_end(key)
        if len(self._newest) > MAX_PAGES:
            self._newest.popitem(last=False)
        return answer

    def _render(
        self, view: View, *, status: int = 200, refresh: bool = False, refused: bool = False, why: str = ""
    ) -> web.Response:
        values: dict[str, Any] = {"view": view, "definitions": DEFINITIONS, "slot_states": SLOT_STATES, "kinds": KINDS}
        values |= {"refresh": refresh, "refused": refused, "why": why}
        return self._pages.render("index.html", status=status, here="live", **values)


async def _read_form(request: web.Request) -> dict[str, str]:
    """Read the fields of a small form."""
    if request.content_type != "application/x-www-form-urlencoded":
        raise web.HTTPUnsupportedMediaType(text="the header Content-Type must be application/x-www-form-urlencoded")
    body = bytearray()
    async for data in request.content.iter_any():
        body += data
        if len(body) > MAX_FORM_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_FORM_BYTES, len(body))
    return dict(parse_qsl(body.decode("ascii", "replace")))
