"""A package index on this machine with one file, which can break off, forget, lie, or be away."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from corun.models import smollm2


@dataclass
class Index:
    """What the index has, what it does next, and what it was asked."""

    content: bytes
    break_after: list[int] = field(default_factory=list)
    """After how many bytes each of the next answers ends; then answers are whole."""
    knows_ranges: bool = True
    short_by: int = 0
    """How many bytes at the file's end it has lost. Its answers say the length that they have."""
    ranges_are_empty: bool = False
    """Whether what is asked for from some byte on has no byte."""
    status: int = 200
    asked: list[str] = field(default_factory=list)
    """The paths that were asked for, with the range behind that of the file."""
    url: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@contextmanager
def serving(index: Index) -> Iterator[Index]:
    page = f'<a href="../../files/{smollm2.FILENAME}#sha256={index.sha256}">{smollm2.FILENAME}</a>'.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            index.asked.append(f"{self.path} {wanted}".strip())
            if not self.path.startswith("/files/"):
                is_here = self.path == f"/simple/{smollm2.PROJECT}/"
                self.answer(index.status if is_here else 404, page, {"Content-Type": "text/html"})
                return
            start = int(wanted[6:-1]) if wanted and index.knows_ranges else 0
            last = len(index.content) - 1
            end = start if start and index.ranges_are_empty else len(index.content) - index.short_by
            more = {"Content-Range": f"bytes {start}-{last}/{last + 1}"} if start else {}
            self.answer(206 if start else 200, index.content[start:end], more)

        def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.path.startswith("/files/") and index.break_after:
                content = content[: index.break_after.pop(0)]
            self.wfile.write(content)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index.url = f"http://127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
