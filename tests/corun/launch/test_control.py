"""How `corun scale` finds a running `corun up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from corun.cli import main
from corun.cli.scale import parse_counts
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.control import Note, latest


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "corun").mkdir(mode=0o700)
    return tmp_path / "corun"


def note(pid: int) -> Note:
    return Note(pid=pid, name=f"corun-up-{pid}", address="127.0.0.1:1", host="127.0.0.1", auth_mode="token")


def write(notes: Path, pid: int, at: float) -> Path:
    path = notes / f"{pid}.json"
    path.write_text(json.dumps(asdict(note(pid))))
    os.utime(path, (at, at))
    return path


def test_the_last_that_lives_is_meant(notes: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(notes, os.getpid(), at=2)
    write(notes, os.getppid(), at=1)
    of_ended = write(notes, ended.pid, at=3)
    assert latest() == note(os.getpid())
    assert not of_ended.exists()


def test_there_may_be_none(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert latest() is None
    assert main(["scale", "prefill=3"]) == 4
    assert "no corun up runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "address": "a", "new": true}'])
def test_notes_that_are_not_understood_are_passed_over(notes: Path, content: str) -> None:
    write(notes, os.getpid(), at=1)
    other = notes / f"{os.getppid()}.json"
    other.write_text(content)
    assert latest() == note(os.getpid())
    assert other.exists()  # Another version's, perhaps.


def test_notes_that_others_can_write_are_not_believed(notes: Path) -> None:
    write(notes, os.getpid(), at=1)
    notes.chmod(0o777)
    with pytest.raises(UnavailableError, match="only you can write to"):
        latest()


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
