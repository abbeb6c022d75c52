"""An environment belongs to one checkout: another one takes it only when it is told to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make command")


class Checkout:
    """The Makefile in a directory of its own, and an environment that other ones share, in which nothing is real."""

    def __init__(self, directory: Path) -> None:
        (directory / "locks").mkdir(parents=True)
        (directory / "locks" / "cpu.txt").touch()
        (directory / "pyproject.toml").touch()
        shutil.copy(ROOT / "Makefile", directory)
        self.directory, self.venv = directory, directory.parent / "venv"

    def make(self, *words: str) -> tuple[int, str]:
        words = ("make", *words, f"VENV={self.venv}")
        done = subprocess.run(words, cwd=self.directory, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Checkout, Checkout]:
    """Two checkouts with one environment, which belongs to the first."""
    bin_directory = tmp_path / "venv" / "bin"
    bin_directory.mkdir(parents=True)
    for name in ("uv", "python"):
        tool = bin_directory / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*"\n')
        tool.chmod(0o700)
    (version,) = re.findall(r"^UV_VERSION := (\S+)$", MAKEFILE, flags=re.MULTILINE)
    (tmp_path / "venv" / f".uv-{version}").touch()
    mine, other = Checkout(tmp_path / "mine"), Checkout(tmp_path / "other")
    assert mine.make("setup")[0] == 0
    return mine, other


def test_an_environment_of_another_checkout_is_refused_and_kept(checkouts: tuple[Checkout, Checkout]) -> None:
    mine, other = checkouts
    before = sorted(mine.venv.iterdir())
    for verb in ("test", "test-all", "check", "demo", "chat", "chaos", "fuzz", "docs", "docs-site", "release-check"):
        code, said = other.make(verb)
        assert code != 0
        assert f"{mine.venv} belongs to the checkout {mine.directory}" in said
        assert "uv pip" not in said
    assert sorted(mine.venv.iterdir()) == before
    code, said = mine.make("test")
    assert (code, "uv pip" in said) == (0, False)


def test_a_target_without_a_lock_is_refused_before_anything_is_made(checkouts: tuple[Checkout, Checkout]) -> None:
    mine, _ = checkouts
    before = sorted(mine.venv.iterdir())
    code, said = mine.make("setup", "TARGET=cuda")
    assert (code, "TARGET must be cpu or gpu, not cuda" in said, "uv" in said) == (2, True, False)
    assert sorted(mine.venv.iterdir()) == before


def test_setup_takes_it_and_says_so(checkouts: tuple[Checkout, Checkout]) -> None:
    mine, other = checkouts
    code, said = other.make("setup")
    assert (code, f"==> {mine.venv} was of the checkout {mine.directory}; now it is of this one" in said) == (0, True)
    assert "uv pip install" in said
    assert other.make("test")[0] == 0
    assert f"{mine.venv} belongs to the checkout {other.directory}" in mine.make("check")[1]


def test_a_checkout_that_is_gone_owns_nothing(checkouts: tuple[Checkout, Checkout]) -> None:
    mine, other = checkouts
    shutil.rmtree(mine.directory)
    assert other.make("test")[0] == 0


UV_SAYS = """Resolved 257 packages in 1.20s
Downloading tiktoken (1.2MiB)
Downloading torch (506.0MiB)
Downloading numba (998.2KiB)
 Downloaded tiktoken
Prepared 257 packages in 42.17s
 - setuptools==65.5.0
 + agent-detector==2.0.0
 ~ anyio==4.16.0
"""


def test_setup_shows_no_list_of_packages_and_fails_where_they_do(checkouts: tuple[Checkout, Checkout]) -> None:
    mine, _ = checkouts
    for stamp in mine.venv.glob(".corun-*"):
        stamp.unlink()
    (mine.venv / "bin" / "uv").write_text(f"#!/bin/sh\ncat >&2 << END\n{UV_SAYS}END\nexit 3\n")
    code, said = mine.make("setup")
    shown = [line for line in UV_SAYS.splitlines() if line in said]
    assert shown == [
        "Resolved 257 packages in 1.20s",
        "Downloading torch (506.0MiB)",
        "Prepared 257 packages in 42.17s",
    ]
    assert code == 2
    assert not list(mine.venv.glob(".corun-*"))
