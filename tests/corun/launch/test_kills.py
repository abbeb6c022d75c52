"""Nodes are killed for clients only where their streams can go on, one at a time."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from corun.launch import kills
from corun.launch.kills import BETWEEN_S, Kills, refusal

NODES = ("decode-0", "decode-1")


@pytest.mark.parametrize(
    ("node", "nodes", "used", "left_s", "why"),
    [
        ("decode-1", NODES, [NODES], 0, ""),
        ("", NODES, [NODES], 0, ""),
        ("decode-0", NODES[:1], [NODES[:1]], 0, "there is no second node that decodes, where the streams could go on"),
        ("decode-0", NODES, [NODES, NODES[:1]], 0, "decode-1 is not in use yet"),
        ("decode-0", NODES, [], 0, "decode-0, decode-1 are not in use yet"),  # No router answers.
        ("decode-0", NODES, [NODES], 3.2, "a node was killed a moment ago; wait for 3 s"),
        ("router", NODES, [NODES], 0, "there is no node 'router' that decodes, but decode-0, decode-1"),
    ],
)
def test_who_can_be_killed(node: str, nodes: tuple[str, ...], used: Any, left_s: float, why: str) -> None:
    assert refusal(node, nodes, used, left_s) == why


@pytest.fixture
def asked() -> Iterator[Kills]:
    with closing(Kills(threading.Event())) as made:
        yield made


class Caller:
    """Asks in a thread of its own, as a gateway does in a process of its own."""

    def __init__(self, of: Kills, line: bytes) -> None:
        self._of, self._line = of, line
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self._of.path))
            connection.sendall(self._line + b"\n")
            self._answer = connection.makefile("rb").readline()

    def answer(self, kill: Callable[[str], None] = lambda node: None) -> Any:
        """The answer, which the loop of `corun up` gives."""
        while self._thread.is_alive():
            self._of.answer(NODES, [NODES], kill)
            self._thread.join(0.001)
        return json.loads(self._answer)


def test_a_node_is_killed_once_and_the_next_one_later(asked: Kills, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    assert Caller(asked, b"{}").answer(killed.append) == {"refused": ""}
    assert not asked._wake.is_set()
    assert Caller(asked, b'{"kill": "decode-1"}').answer(killed.append) == {"refused": ""}
    assert asked._wake.is_set()
    again = Caller(asked, b'{"kill": "decode-0"}').answer(killed.append)
    assert again["refused"].startswith("a node was killed a moment ago; ")
    assert killed == ["decode-1"]
    later = time.monotonic() + BETWEEN_S
    monkeypatch.setattr(kills.time, "monotonic", lambda: later)
    assert Caller(asked, b'{"kill": "decode-0"}').answer(killed.append) == {"refused": ""}
    assert killed == ["decode-1", "decode-0"]


@pytest.mark.parametrize("line", [b"", b"kill", b"[]", b'{"kill": 1}', b'{"kill": "' + b"x" * 5000 + b'"}'])
def test_what_is_no_question_kills_nothing(asked: Kills, line: bytes) -> None:
    killed: list[str] = []
    assert "must be a line of JSON" in Caller(asked, line).answer(killed.append)["refused"]
    assert killed == []


def test_a_caller_that_leaves_holds_nothing_up(asked: Kills) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(asked.path))
    assert Caller(asked, b"{}").answer()["refused"] == ""


def test_who_was_told_to_come_later_gets_no_kill_later(asked: Kills, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "_ANSWER_TIMEOUT_S", 0.05)
    killed: list[str] = []
    late = Caller(asked, b'{"kill": "decode-1"}')
    late._thread.join()
    asked.answer(NODES, [NODES], killed.append)
    assert (late.answer(), killed) == ({"refused": "corun up is busy"}, [])


def test_only_this_user_finds_the_socket_and_it_leaves_nothing() -> None:
    made = Kills(threading.Event())
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
    made.close()
    assert not made.path.parent.exists()
