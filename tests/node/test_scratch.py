"""The folders of engines' sockets: each node has one, and none is left of a node that has ended or was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corun.node import scratch

HOLD = """
import sys
from pathlib import Path
from corun.node import scratch
print(scratch.socket_folder(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as path:  # A test's own path is too long for a socket.
        yield Path(path)
        scratch.leave()


@contextmanager
def other_node(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder; it ends with its stdin."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(base)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.communicate()


def test_a_killed_nodes_folder_goes_when_another_starts_and_a_living_ones_stays(base: Path) -> None:
    with other_node(base) as (_, held):
        with other_node(base) as (killed, abandoned):
            (abandoned / "socket").write_text("")
            killed.kill()
        assert abandoned.exists()
        found = scratch.socket_folder(base)
        assert found is not None
        assert sorted(found.parent.iterdir()) == sorted([found, held])
    assert not held.exists(), "a node that ends removes its own"


def test_leaving_removes_the_folder_and_what_is_in_it(base: Path) -> None:
    found = scratch.socket_folder(base)
    assert found is not None
    assert found.stat().st_mode & 0o777 == 0o700
    (found / "socket").write_text("")
    scratch.leave()
    assert list(found.parent.iterdir()) == []


def test_a_path_that_is_too_long_for_a_socket_is_not_used(base: Path) -> None:
    found = scratch.socket_folder(base / ("x" * scratch.LONGEST))
    assert found is not None
    assert not found.is_relative_to(base)
    assert len(bytes(found)) <= scratch.LONGEST


def test_a_socket_of_vllms_fits_into_the_longest_path(base: Path) -> None:
    folder = base / ("x" * (scratch.LONGEST - len(bytes(base)) - 1))
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / str(uuid.uuid4())))
        with pytest.raises(OSError, match="too long"):
            made.bind(str(folder / f"{uuid.uuid4()}x"))


def test_where_nothing_can_be_locked_nothing_is_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert scratch.socket_folder(base) is None
    assert list(scratch.own_folder(base).iterdir()) == []


def test_without_a_folder_of_ones_own_there_is_none(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: base.stat().st_uid + 1)
    assert scratch.socket_folder(base) is None
