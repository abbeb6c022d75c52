"""Command lines against a fake router, and files of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main
from tests.corun.fake_router import FakeRouter

PROMPT = "Once upon a time"


@pytest.fixture
def corun(fake: FakeRouter, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command line against the fake and returns code, stdout and stderr."""

    def run(*argv: object) -> SimpleNamespace:
        code = main([*map(str, argv), "--router", fake.address])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def start(fake: FakeRouter) -> Callable[..., subprocess.Popen[str]]:
    """A function that starts a command line against the fake in a process of its own."""

    def begin(*argv: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "corun", *map(str, argv), "--router", fake.address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
