"""How `corun scale` finds a running `corun up`, and when its change is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main
from corun.cli.up import parse_counts
from corun.config.cluster_file import ROLES, ClusterSpec, PoolSpec
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch import control, preflight
from corun.launch.control import Change, Note, ScaleStatus, _Board, in_words, latest
from corun.launch.members import ProcessSpec, members


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "corun").mkdir(mode=0o700)
    return tmp_path / "corun"


def write_note(notes: Path, pid: int, at: float = 1.0) -> Note:
    note = Note(pid=pid, name=f"corun-up-{pid}", address="127.0.0.1:1", host="127.0.0.1", auth_mode="token")
    path = notes / f"{pid}.json"
    path.write_text(json.dumps(asdict(note)))
    os.utime(path, (at, at))
    return note


def test_the_last_that_lives_is_meant(notes: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_note(notes, os.getppid(), at=1)
    last = write_note(notes, os.getpid(), at=2)
    write_note(notes, ended.pid, at=3)
    assert latest() == last
    assert not (notes / f"{ended.pid}.json").exists()


def test_there_may_be_none(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert latest() is None
    assert main(["scale", "prefill=3"]) == 4
    assert "no corun up runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("is_there", [False, True])
def test_the_runtime_directory_of_somebody_else_is_not_used(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of the user who called su or sudo."""
    base = Path("/proc/there-is-none")
    if is_there:
        (base := tmp_path / "theirs").mkdir()
        if os.getuid() == 0:
            os.chown(base, 12345, 12345)
        else:
            base = Path("/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    note = write_note(control._directory(), os.getpid())
    assert latest() == note
    assert (tmp_path / f"corun-{os.getuid()}" / f"{os.getpid()}.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "address": "a", "new": true}'])
def test_notes_that_are_not_understood_are_passed_over(notes: Path, content: str) -> None:
    note = write_note(notes, os.getpid())
    other = notes / f"{os.getppid()}.json"
    other.write_text(content)
    assert latest() == note
    assert other.exists()  # Another version's, perhaps.


def test_notes_that_others_can_write_are_not_believed(notes: Path) -> None:
    write_note(notes, os.getpid())
    notes.chmod(0o777)
    with pytest.raises(UnavailableError, match="only you can write to"):
        latest()


def cluster(prefill: int = 1, decode: int = 2) -> ClusterSpec:
    return ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas={"prefill": prefill, "decode": decode}),))


def nodes(spec: ClusterSpec, *names: str) -> frozenset[ProcessSpec]:
    return frozenset(member for member in members(spec) if member.name in names)


def scale(board: _Board, **counts: int) -> Change:
    change = board.change("", counts)
    assert isinstance(change, Change)
    return change


def test_a_change_is_done_once_its_nodes_are_as_wanted() -> None:
    board = _Board(cluster(), is_alone=False)
    change = scale(board, prefill=2, decode=1)
    assert change.text == "prefill 1 → 2, decode 2 → 1"
    assert not change.is_done(*board.read())  # `corun up` has not seen it.
    wanted = board.report(ScaleStatus(spec=cluster()))
    assert [wanted.pool().count(role) for role in ROLES] == [1, 2, 1, 0]
    assert not change.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted, unsettled=nodes(cluster(2, 2), "prefill-1", "decode-1")))
    assert not change.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted))
    assert change.is_done(*board.read())


def test_nodes_of_other_roles_and_those_that_failed_before_do_not_count() -> None:
    board = _Board(cluster(), is_alone=False)
    failed = dict.fromkeys(nodes(cluster(), "decode-1"), "exit code 1")
    board.report(ScaleStatus(spec=cluster(), failed=failed))
    prefill, decode = scale(board, prefill=2), scale(board, decode=3)
    wanted = board.report(ScaleStatus(spec=cluster(), failed=failed))
    board.report(ScaleStatus(spec=wanted, failed=failed, unsettled=nodes(wanted, "decode-2")))
    assert prefill.is_done(*board.read())
    assert not decode.is_done(*board.read())
    board.report(ScaleStatus(spec=wanted, failed=failed | dict.fromkeys(nodes(wanted, "decode-2"), "exit code 2")))
    with pytest.raises(UnavailableError, match="decode 2 → 3: decode-2 exit code 2"):
        decode.is_done(*board.read())
    assert prefill.is_done(*board.read())


def test_who_is_overtaken_by_other_numbers_hears_it() -> None:
    board = _Board(cluster(), is_alone=False)
    first, other = scale(board, decode=3), scale(board, prefill=2)
    assert not first.is_done(*board.read())
    scale(board, decode=1)
    with pytest.raises(UnavailableError, match="decode 2 → 3: superseded by a later request, decode=1"):
        first.is_done(*board.read())
    assert not other.is_done(*board.read())


@pytest.mark.parametrize(
    ("pool", "counts", "message"),
    [
        ("", {"router": 2}, "cannot change while it serves"),
        ("", {"decode": 0}, "must be at least 1"),
        ("other", {"decode": 2}, "must be one of main"),
    ],
)
def test_numbers_that_are_refused_change_nothing(pool: str, counts: dict[str, int], message: str) -> None:
    board = _Board(cluster(), is_alone=False)
    refused = board.change(pool, counts)
    assert isinstance(refused, InvalidArgumentError)
    assert message in str(refused)
    assert board.read()[0] == cluster()


def test_nodes_that_this_machine_has_no_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "lacking_memory", lambda *_: "needs about 9.0 GiB of memory more")
    alone, spread = _Board(cluster(), is_alone=True), _Board(cluster(), is_alone=False)
    assert str(alone.change("", {"decode": 3})) == "counts = decode 2 → 3: needs about 9.0 GiB of memory more"
    assert alone.read()[0] == cluster()
    assert isinstance(spread.change("", {"decode": 3}), Change), "other machines' memory is not known"


def test_an_interrupted_wait_says_that_the_change_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = _Board(cluster(), is_alone=False)

    def get(question: Any) -> Any:
        if isinstance(question, Change):
            return question
        raise KeyboardInterrupt

    monkeypatch.setattr(control.runtime, "joined", lambda *_: nullcontext())
    remote = SimpleNamespace(change=SimpleNamespace(remote=board.change), read=SimpleNamespace(remote=board.read))
    monkeypatch.setattr(control, "_find_board", lambda name: remote)
    monkeypatch.setattr(control, "_get", get)
    assert main(["scale", "decode=3", "--ray-address", "auto"]) == 130
    assert capsys.readouterr().err == "corun up goes on with it: decode 2 → 3\n"


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
        (("prefill=many",), "must be"),
        (("prefill=" + "9" * 5000,), "must be"),  # Python reads no endless numbers.
        (("gateway=1",), "with a role of prefill, decode, colocated"),
        (("a.decode=-1",), "a.decode = -1: must be at least 0"),
        (("a.router=0",), "a.router = 0: must be at least 1"),
        (("a.decode=1", "b.decode=1"), "must be of one pool at a time"),
        (("decode=1", "decode=2"), "must give each role one number"),
    ],
)
def test_counts_that_are_none(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_counts(words)


def test_a_wait_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "prefill=1", "--timeout-s", "0"]) == 2
    assert "timeout_s = 0.0: must be in (0, 86400] seconds" in capsys.readouterr().err


def test_a_corun_up_that_ends_while_it_is_looked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, namespace: str) -> None:
        raise ValueError(f"Failed to look up actor with name '{name}'")

    listed = [{"name": "corun-up-1", "namespace": "corun"}]
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: listed)
    monkeypatch.setattr(control.runtime, "api", lambda: SimpleNamespace(util=util, get_actor=gone))
    with pytest.raises(UnavailableError, match="no corun up runs on that Ray"):
        control._find_board("")
