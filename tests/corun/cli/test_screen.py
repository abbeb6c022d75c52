"""`corun top` and `corun status --watch` on a real terminal, and what all commands write where there is none."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main
from corun.cli.watching import Watched
from corun.errors import CancelledByPeerError, CorunError, DeadlineError, OverloadedError
from corun.types import ClientStatus, ClusterStatus, NodeState
from tests.corun.cli.conftest import PROMPT, write_rows
from tests.corun.cli.terminal import Terminal
from tests.corun.fake_router import WAIT_S, FakeRouter

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGWINCH"), reason="this system has no terminals of Unix")
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|38|48)[;m]")
A = ClientStatus(name="a", weight=3, leased_samples=70, decoding_samples=70)
LEFT, SHOWN = b"\x1b[?1049l", b"\x1b[?25h"


def busy(status: ClusterStatus) -> ClusterStatus:
    """A cluster with two decode nodes more, one of them lost."""
    prefill, decode = status.nodes
    load = replace(decode.load, used_slots=90, leases=120, used_kv_blocks=9)
    names = {"a-decode-with-a-name-as-pods-have-them-7c9f8b6d5-x2x4z": NodeState.READY, "gone-1": NodeState.LOST}
    more = [
        replace(decode, load=load, state=state, node=replace(decode.node, ref=replace(decode.node.ref, node_id=name)))
        for name, state in names.items()
    ]
    clients = (ClientStatus(name="b", leased_samples=23, decoding_samples=23), A)
    nodes = (prefill, decode, *more)
    return replace(status, nodes=nodes, queued_samples=4000, refused_requests=3, clients=clients)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
@pytest.mark.parametrize("command", ["top", "status --watch 0.2"])
def test_it_fits_the_terminal_and_ctrl_c_leaves_it_as_it_was(
    fake: FakeRouter, command: str, size: tuple[int, int]
) -> None:
    fake.status = busy(fake.status)
    columns, lines = size
    with Terminal(*command.split(), "--router", fake.address, columns=columns, lines=lines) as terminal:
        text = terminal.until(lambda: "q quit" in terminal.text and "gone-1" in terminal.text)
        rows = text.splitlines()
        assert len(rows) == lines
        assert "router-a at 127.0.0.1:" in rows[0]
        assert rows[-1].endswith("q quit")
        assert terminal.colours("ready") == {"green"}
        assert terminal.colours("lost") == {"red"}
        assert COLOUR.search(terminal.written), "the control of what NO_COLOR does"
        assert terminal.modes() != terminal.before, "keys are read one by one"
        terminal.type("\x03")
        assert terminal.ended() == 130
        assert terminal.modes() == terminal.before
        assert terminal.written.rindex(LEFT) > terminal.written.rindex(b"q quit")
        assert terminal.written.rindex(SHOWN) > terminal.written.rindex(b"q quit")
        assert b"Traceback" not in terminal.written


def test_each_node_of_top_is_one_line_of_80_columns(fake: FakeRouter) -> None:
    fake.status = busy(fake.status)
    with Terminal("top", "--router", fake.address, "--interval", "0.2") as terminal:
        text = terminal.until(
            lambda: re.search(r"^decode-0 .* 0 +0 .*s$", terminal.text, flags=re.MULTILINE) is not None
        )
        head = next(line for line in text.splitlines() if line.startswith("node "))
        assert head.split() == ["node", "role", "state", "slots", "line", "KV", "tok/s▾", "step/s", "queue", "heard"]
        (long,) = [line for line in text.splitlines() if line.startswith("a-decode")]
        assert re.fullmatch(r"a-decode[-a-z]*… +decode +ready +90/100 +30 +\d+% +0 +0 +\d\.\ds", long), long
        assert "queue 4,000/4,096" in text
        assert terminal.colours("4,000/4,096") == {"brown"}, "samples wait"
        assert re.search(r"^nodes +3 ready, 1 lost$", text, flags=re.MULTILINE)
        assert "3 refused" in text
        assert [line.split() for line in text.splitlines() if line[:2] in ("a ", "b ")] == [
            ["a", "3", "70", "███████████░░░░", "75%"],
            ["b", "1", "23", "████░░░░░░░░░░░", "25%"],
        ]


def order(text: str) -> list[str]:
    """Return the first letters of the nodes, from top to bottom."""
    rows = text.splitlines()
    start = next(number for number, row in enumerate(rows) if re.match("node[ ▾]", row))
    return [row[:3] for row in rows[start + 1 : rows.index("", start)]]


def is_so(terminal: Terminal, hint: str, wanted: list[str] | None) -> bool:
    return hint in terminal.text and wanted in (None, order(terminal.text))


def test_keys_sort_reverse_scroll_and_end_it(fake: FakeRouter) -> None:
    fake.status = busy(fake.status)
    with Terminal("top", "--router", fake.address, "--sort", "slots") as terminal:
        terminal.until(lambda: "sort: slots" in terminal.text)
        assert order(terminal.text)[0] == "a-d"
        for keys, hint, wanted in (
            ("n", "sort: node", ["a-d", "dec", "gon", "pre"]),
            ("r", "sort: node", ["pre", "gon", "dec", "a-d"]),
            ("s", "sort: slots", None),
        ):
            terminal.type(keys)
            terminal.until(functools.partial(is_so, terminal, hint, wanted))
        terminal.resize(60, 9)
        terminal.signal(signal.SIGWINCH)
        terminal.until(lambda: "scroll" in terminal.screen.display[8] and "corun top" in terminal.text)
        terminal.type("\x1b[6~")
        terminal.until(lambda: "corun top" not in terminal.text)
        terminal.type("q")
        assert terminal.ended() == 0
        assert terminal.modes() == terminal.before


def test_sigterm_leaves_the_terminal_as_it_was(fake: FakeRouter) -> None:
    with Terminal("top", "--router", fake.address) as terminal:
        terminal.until(lambda: "q quit" in terminal.text)
        terminal.signal(signal.SIGTERM)
        assert terminal.ended() == 143
        assert terminal.modes() == terminal.before
        assert terminal.written.endswith(LEFT)


async def test_a_router_that_answers_no_more_is_waited_for() -> None:
    """One that is overloaded, or that ends its calls because it stops, answers again."""
    errors: list[CorunError] = [OverloadedError("busy", 1.0), CancelledByPeerError("stopping"), DeadlineError("late")]

    async def refuse(**_: Any) -> ClusterStatus:
        raise errors[0]

    watched = Watched(FakeRouter().status)
    client: Any = SimpleNamespace(get_cluster=refuse)
    while errors:
        await watched.ask(client)
        assert watched.trouble.endswith(str(errors.pop(0)))


@pytest.mark.parametrize("command", ["top", "status --watch 0.2"])
def test_a_router_that_is_away_is_said_and_waited_for(fake: FakeRouter, command: str) -> None:
    options = ("--router", fake.address, "--connect-timeout-s", "0.5")
    with Terminal(*command.split(), *options) as terminal:
        terminal.until(lambda: "decode-0" in terminal.text)
        fake.stop()
        text = terminal.until(lambda: "no answer for" in terminal.text)
        assert "decode-0" in text, "what was known stays"
        assert terminal.colours("no answer") == {"red"}
        fake.start(fake.address)
        terminal.until(lambda: "no answer for" not in terminal.text)


def test_no_color_means_none(fake: FakeRouter) -> None:
    with Terminal("top", "--router", fake.address, NO_COLOR="1") as terminal:
        terminal.until(lambda: "q quit" in terminal.text)
        terminal.type("q")
        assert terminal.ended() == 0
        assert not COLOUR.search(terminal.written)


def test_a_terminal_that_can_do_nothing_gets_a_plain_picture(fake: FakeRouter) -> None:
    with Terminal("top", "--router", fake.address, "--interval", "0.1", TERM="dumb") as terminal:
        assert terminal.ended() == 0
        assert b"\x1b" not in terminal.written
        assert b"decode-0" in terminal.written


COMMANDS: dict[str, tuple[str, ...]] = {
    "batch": ("INPUT", "-o", "OUTPUT"),
    "top": ("--interval", "0.1"),
    "status": (),
    "fingerprint": ("--explain",),
    "generate": (PROMPT, "--seed", "4"),
    "verify": ("--limit", "2"),
    "replay": ("OUTPUT",),
    "diff": ("OUTPUT", "OUTPUT"),
}
"""A command line of each command that writes for people. Later ones read what the first one writes."""


def test_no_command_controls_a_file_or_a_pipe(
    fake: FakeRouter, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    names = {"INPUT": str(rows), "OUTPUT": str(tmp_path / "out.jsonl")}
    for command, words in COMMANDS.items():
        router = () if command == "diff" else ("--router", fake.address)
        code = main([command, *(names.get(word, word) for word in words), *router])
        out, err = capsys.readouterr()
        assert (code, re.findall(r"[\x00-\x08\x0b-\x1f\x7f]", out + err)) == (0, []), (command, out, err)
        assert command == "batch" or out


def test_a_watched_status_in_a_pipe_is_one_picture_after_another(start: Callable[..., subprocess.Popen[str]]) -> None:
    with start("status", "--watch", "0.1") as process:
        assert process.stdout is not None
        heads: list[str] = []
        for line in process.stdout:
            heads += [line] if line.startswith("router router-a") else []
            if len(heads) == 3:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    with start("status", "--watch", "0.1", "--json") as process:
        assert process.stdout is not None
        assert [process.stdout.readline()[:12] for _ in range(3)] == ['{"serving": '] * 3
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


def test_a_bad_interval_is_refused(corun: Any) -> None:
    for argv, field in ((("top", "--interval", "0"), "interval"), (("status", "--watch", "0"), "watch")):
        done = corun(*argv)
        assert (done.code, done.err.startswith(f"corun: {field} = ")) == (2, True), done.err
