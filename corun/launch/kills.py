"""Kills of nodes that clients ask for: how a pool's gateway reaches the `corun up` that keeps the nodes running.

This module owns the Unix socket between the two and the rules for who may be killed when. One line of JSON goes each
way. The question is `{"kill": NODE}`, or `{}` to learn whether a node could be killed. The answer is `{"refused":
WHY}`, where an empty text means that nothing was refused. This module must not know how a process is killed.
"""

from __future__ import annotations

import json
import queue
import shutil
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError, shown

BETWEEN_S = 10.0
"""The time in seconds between two kills. The routers need some of it to notice the first one."""
_LINE_BYTES = 4096
_READ_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0


class Kills:
    """Takes questions on a Unix socket, from when it is made until `close`. Only this user can open the socket.

    wake: is set when a node is to be killed, so that `answer` is called soon.
    """

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        # The directory is under /tmp, since a socket's path must be short. Only its owner may enter it.
        self._directory = Path(tempfile.mkdtemp(prefix="corun-kills-", dir="/tmp"))
        self.path = self._directory / "socket"
        self._asked: queue.SimpleQueue[tuple[str, Future[str]]] = queue.SimpleQueue()
        self._killed_at = -BETWEEN_S
        self._server = _Server(str(self.path), self._ask)
        threading.Thread(target=self._server.serve_forever, name="kills", daemon=True).start()

    def answer(self, nodes: Sequence[str], used: Sequence[Collection[str]], kill: Callable[[str], None]) -> None:
        """Answer every question that has come.

        nodes: the nodes that should decode. used: for each router that answers, the nodes that it uses. kill: kills a
        node.
        """
        while True:
            try:
                node, answered = self._asked.get_nowait()
            except queue.Empty:
                return
            if not answered.set_running_or_notify_cancel():
                continue
            left_s = self._killed_at + BETWEEN_S - time.monotonic()
            refused = refusal(node, nodes, used, left_s)
            if node and not refused:
                kill(node)
                self._killed_at = time.monotonic()
            answered.set_result(refused)

    def close(self) -> None:
        """Answer no more questions."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ask(self, node: str) -> str:
        """Return why the node cannot be killed; empty if it was, or if none was named and one can be."""
        answered: Future[str] = Future()
        self._asked.put((node, answered))
        if node:
            self._wake.set()
        try:
            return answered.result(_ANSWER_TIMEOUT_S)
        finally:
            answered.cancel()  # Who hears that it is late must not see the node killed later.


def refusal(node: str, nodes: Sequence[str], used: Sequence[Collection[str]], left_s: float) -> str:
    """Return why a node cannot be killed now; empty if it can be. Streams need another node that takes them over, and
    no client may keep more than one node from the others. So all nodes must be there.

    node: the node's name; empty: any. left_s: the time in seconds until a kill may follow the last one.
    """
    missing = [name for name in nodes if not used or any(name not in of_router for of_router in used)]
    if len(nodes) < 2:
        return "there is no second node that decodes, where the streams could go on"
    if missing:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in use yet"
    if left_s > 0:
        return f"a node was killed a moment ago; wait for {left_s:.0f} s"
    if node and node not in nodes:
        return f"there is no node {shown(node)} that decodes, but {', '.join(nodes)}"
    return ""


class _Server(socketserver.UnixStreamServer):
    """Takes one question after the other."""

    def __init__(self, path: str, ask: Callable[[str], str]) -> None:
        super().__init__(path, _Handler)
        self.ask = ask

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: whoever asked is gone, and gets no answer."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _READ_TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        question = self.rfile.readline(_LINE_BYTES)
        try:
            refused = self.server.ask(_read(question))
        except InvalidArgumentError as error:
            refused = str(error)
        except LateError:
            refused = "corun up is busy"
        with suppress(OSError):
            self.wfile.write(json.dumps({"refused": refused}).encode() + b"\n")


def _read(question: bytes) -> str:
    try:
        node = json.loads(question).get("kill", "")
    except (ValueError, AttributeError):
        node = None
    if not isinstance(node, str):
        raise InvalidArgumentError("question", question[:64], "must be a line of JSON with the name of a node to kill")
    return node
