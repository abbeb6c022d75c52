"""How `corun scale` finds a running `corun up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main
from corun.cli.scale import parse_counts
from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.control import Change, Note, ScaleStatus, _Board, _write, in_words, latest
from corun.launch.members import ProcessSpec, members


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "corun").mkdir(mode=0o700)
    return tmp_path / "corun"


def note(pid: int) -> Note:
    return Note(pid=pid, name=f"corun-up-{pid}", address="127.0.0.1:1", host="127.0.0.1", auth_mode="token")


def write_note(notes: Path, pid: int, at: float) -> Path:
    path = notes / f"{pid}.json"
    path.write_text(json.dumps(asdict(note(pid))))
    os.utime(path, (at, at))
    return path


def test_the_last_that_lives_is_meant(notes: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_note(notes, os.getpid(), at=2)
    write_note(notes, os.getppid(), at=1)
    of_ended = write_note(notes, ended.pid, at=3)
    assert latest() == note(os.getpid())
    assert not of_ended.exists()


def test_there_may_be_none(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert latest() is None
    assert main(["scale", "prefill=3"]) == 4
    assert "no corun up runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "address": "a", "new": true}'])
def test_notes_that_are_not_understood_are_passed_over(notes: Path, content: str) -> None:
    write_note(notes, os.getpid(), at=1)
    other = notes / f"{os.getppid()}.json"
    other.write_text(content)
    assert latest() == note(os.getpid())
    assert other.exists()  # Another version's, perhaps.


def test_notes_that_others_can_write_are_not_believed(notes: Path) -> None:
    write_note(notes, os.getpid(), at=1)
    notes.chmod(0o777)
    with pytest.raises(UnavailableError, match="only you can write to"):
        latest()


def cluster(prefill: int = 1, decode: int = 1) -> ClusterSpec:
    return ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas={"prefill": prefill, "decode": decode}),))


def nodes(spec: ClusterSpec, *names: str) -> frozenset[ProcessSpec]:
    return frozenset(member for member in members(spec) if member.name in names)


class Handle:
    """An actor that answers at once."""

    def __init__(self, board: _Board) -> None:
        for name in ("read", "want", "report"):
            setattr(self, name, SimpleNamespace(remote=getattr(board, name)))


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> _Board:
    monkeypatch.setattr("corun.launch.control._get", lambda answer: answer)
    return _Board(cluster(1, 2))


def write(board: _Board, **counts: int) -> Change:
    handle: Any = Handle(board)
    return _write(handle, "", counts)


def test_a_change_is_done_once_its_nodes_are_as_wanted(board: _Board) -> None:
    change = write(board, prefill=2, decode=1)
    assert change.text == "prefill 1 → 2, decode 2 → 1"
    assert not change.is_done(*board.read())  # `corun up` has not seen it.
    wanted = board.report(ScaleStatus(spec=cluster(1, 2)))
    assert wanted == cluster(2, 1)
    assert not change.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted, unsettled=nodes(cluster(2, 2), "prefill-1", "decode-1")))
    assert not change.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted))
    assert change.is_done(*board.read())


def test_nodes_of_other_roles_and_those_that_failed_before_do_not_count(board: _Board) -> None:
    failed = dict.fromkeys(nodes(cluster(1, 2), "decode-1"), "exit code 1")
    board.report(ScaleStatus(spec=cluster(1, 2), failed=failed))
    prefill, decode = write(board, prefill=2), write(board, decode=3)
    wanted = board.report(ScaleStatus(spec=cluster(1, 2), failed=failed))
    board.report(ScaleStatus(spec=wanted, failed=failed, unsettled=nodes(wanted, "decode-2")))
    assert prefill.is_done(*board.read())
    assert not decode.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted, failed=failed | dict.fromkeys(nodes(wanted, "decode-2"), "exit code 2")))
    with pytest.raises(UnavailableError, match="decode 2 → 3: decode-2 exit code 2"):
        decode.is_done(*board.read())
    assert prefill.is_done(*board.read())


def test_who_is_overtaken_by_other_numbers_hears_it(board: _Board) -> None:
    first, other = write(board, decode=3), write(board, prefill=2)
    assert not first.is_done(*board.read())
    write(board, decode=1)
    with pytest.raises(UnavailableError, match="decode 2 → 3: superseded by a later request, decode=1"):
        first.is_done(*board.read())
    assert not other.is_done(*board.read())
    assert not board.want(cluster(1, 2), cluster(9, 9))  # It was read before the others wrote.
    assert board.read()[0] == cluster(2, 1)


def test_numbers_that_are_refused_change_nothing(board: _Board) -> None:
    for counts, message in (({"router": 2}, "cannot change while it serves"), ({"decode": 0}, "must be at least 1")):
        with pytest.raises(InvalidArgumentError, match=message):
            write(board, **counts)
    assert board.read()[0] == cluster(1, 2)


def test_the_pool_is_named_where_there_are_several() -> None:
    two = ClusterSpec(pools=tuple(PoolSpec(name=name, common={"model": "m"}) for name in ("a", "b")))
    assert in_words(two, "b", {"decode": 2}) == "pool b: decode 1 → 2"


def test_counts() -> None:
    assert parse_counts(("prefill=3",)) == ("", {"prefill": 3})
    assert parse_counts(("a.prefill=3", "a.decode=1")) == ("a", {"prefill": 3, "decode": 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "must name a role"),
        (("prefill",), r"counts = 'prefill': must be \[POOL.\]ROLE=N"),
        (("prefill=",), "must be"),
        (("prefill=many",), "must be"),
        (("gateway=1",), "with a role of router, prefill, decode"),
        (("prefill=0",), "prefill = 0: must be at least 1"),
        (("a.decode=-1",), "a.decode = -1: must be at least 1"),
        (("a.decode=1", "b.decode=1"), "must be of one pool at a time"),
    ],
)
def test_counts_that_are_none(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_counts(words)


def test_a_wait_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "prefill=1", "--timeout-s", "0"]) == 2
    assert "timeout_s = 0.0: must be in (0, 86400] seconds" in capsys.readouterr().err
