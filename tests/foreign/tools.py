"""Programs of others that tests install and run. A machine that lacks what they need skips such a test and says why."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

INSTALL_S = 400.0
RUN_S = 240.0
_AWAY = (
    # npm, pip and uv, when a registry does not answer.
    *("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "E403", "E502", "E503"),
    *("Temporary failure in name resolution", "Failed to fetch", "dns error", "Connection refused", "timed out"),
)


def install(words: Sequence[str | Path], where: Path, what: str) -> None:
    """Run an installer. Skip the test if the registry cannot be reached; any other failure is one."""
    try:
        done = subprocess.run(words, cwd=where, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} was not installed within {INSTALL_S:g} s")
    said = done.stdout + done.stderr
    if done.returncode and any(word in said for word in _AWAY):
        pytest.skip(f"{what} cannot be installed, as its registry does not answer: {said.strip()[-300:]}")
    assert done.returncode == 0, said


@contextlib.asynccontextmanager
async def running(
    *words: str | Path, where: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program with pipes, and kill it in the end if it still runs."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, cwd=where, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def printed(*words: str | Path, where: Path, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return the exit code of a program, and what it wrote to both of its outputs."""
    async with running(*words, where=where, env=env) as process:
        output, errors = await asyncio.wait_for(process.communicate(), RUN_S)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def environment(folder: Path, *requirements: str, borrows_torch: bool = False) -> Path:
    """Return the Python of a new virtual environment with these packages. Skip the test if no index gives them.

    borrows_torch: take torch from our own environment, as its packages for GPUs are several GB.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=INSTALL_S)
    python = folder / "bin" / "python"
    override = folder / "override.txt"
    override.write_text("torch ; python_version < '3'\n" if borrows_torch else "", encoding="utf-8")
    uv = (sys.executable, "-m", "uv", "pip", "install", "--python", python, "--override", override)
    install([*uv, *requirements], folder, requirements[0])
    if borrows_torch:  # What stands in a .pth file comes after the environment's own packages.
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python
