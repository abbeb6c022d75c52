"""The gateway's web pages: their templates, their files, and what a browser may do in them.

A page is a template in `page/` that extends `frame.html`; style sheets and scripts are plain files beside it. There is
no build step, and nothing comes from elsewhere. This module must not know what a page shows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

FOLDER = Path(__file__).parent / "page"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The types of the files that are sent as they are, by the endings of their names. All others are templates."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src {connect}; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of a page: only the gateway's own files, no script or style in the page itself."""


class Pages:
    """Renders the pages and serves their files."""

    def __init__(self) -> None:
        loader = jinja2.FileSystemLoader(FOLDER)
        self._templates = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, auto_reload=False
        )
        self._templates.globals["has_playground"] = "playground.html" in loader.list_templates()
        self._files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}

    def render(self, name: str, *, status: int = 200, connect: str = "'self'", **values: Any) -> web.Response:
        """Return the page of a template. connect: where its scripts may connect to, as the policy writes it."""
        return self.response(self._templates.get_template(name).render(values), status=status, connect=connect)

    def response(self, text: str, *, status: int = 200, connect: str = "'self'") -> web.Response:
        """Return a page that was rendered before."""
        headers = {**HEADERS, "Cache-Control": "no-store", "Content-Security-Policy": POLICY.format(connect=connect)}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(text=text, content_type="text/html", status=status, headers=headers)

    async def file(self, request: web.Request) -> web.Response:
        """Send one of the files. A browser keeps it, and asks each time whether it has changed."""
        name = request.match_info["name"]
        if (data := self._files.get(name)) is None:
            raise web.HTTPNotFound
        tag = hashlib.sha256(data).hexdigest()[:32]
        headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": f'"{tag}"'}
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, content_type=TYPES[Path(name).suffix], charset="utf-8", headers=headers)
