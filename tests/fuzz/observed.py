"""The target's process as its parent sees it: memory, file descriptors, log, life. Tests only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from corun.testing.model import write_tokenizer
from tests.secrets import Secrets

START_S = 120.0
SETTLE_S = 60.0
_OWN_OF_GRPC = re.compile(r"Traceback .*\n(?: +File \"src/python/grpcio/.*\n(?: {4,}.*\n)*)+grpc\S+ExecuteBatchError")
"""What gRPC prints by itself when a client is gone that it wanted to tell of an error of its own."""
_UNEXPECTED = re.compile(
    r"^(?:.* internal error .*|Traceback .*|.*Task exception was never retrieved.*)$", re.MULTILINE
)


class Target:
    """A running target process."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any], secrets: Secrets, log: Path) -> None:
        self.addresses: dict[str, str] = told["addresses"]
        self.nodes: dict[str, dict[str, str]] = told["nodes"]
        self.secrets = secrets
        self._process = process
        self._log = log

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return round(pages * 4096 / 2**20, 1)

    @property
    def files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    @property
    def log_mib(self) -> float:
        return round(self._log.stat().st_size / 2**20, 1)

    def tracebacks(self) -> list[str]:
        """Unexpected errors in the log: their ends, each kind once."""
        text = self._log.read_text(errors="replace")
        text = _OWN_OF_GRPC.sub("", text)
        found = [text[match.start() : match.start() + 3000] for match in _UNEXPECTED.finditer(text)]
        return sorted({_last_line(each) for each in found})

    async def held(self) -> list[str]:
        """What is held in the target."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        found: list[str] = json.loads(line)
        return found

    async def settled(self, files: int, slack: int = 8) -> list[str]:
        """What is still held, or open beyond `files`, after a while in which all should have been given back."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_S
        while (found := [*await self.held(), *self._open(files + slack)]) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return found

    def _open(self, most: int) -> list[str]:
        return [f"{self.files} files are open, not {most}"] if self.files > most else []

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), SETTLE_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def running(log_path: str = "", **settings: Any) -> AsyncIterator[Target]:
    """A target; `settings` are those of its routers, or broken=True. log_path: where its log is kept."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        secrets = Secrets.make(scratch / "secrets")
        log = Path(log_path) if log_path else scratch / "log"
        command = [sys.executable, "-m", "tests.fuzz.target", write_tokenizer(scratch), str(secrets.directory)]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, json.dumps(settings), stdin=-1, stdout=-1, stderr=stderr, limit=2**24
            )
        try:
            assert process.stdout is not None
            told = await asyncio.wait_for(process.stdout.readline(), START_S)
            assert told, log.read_text()[-3000:]
            target = Target(process, json.loads(told), secrets, log)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        try:
            yield target
        finally:
            await target.stop()


def _last_line(text: str) -> str:
    """What a traceback says at its end, or a line of the log without its time."""
    if not text.startswith("Traceback"):
        return re.sub(r"^\S+ \S+ ", "", text.splitlines()[0])
    return next((line for line in text.splitlines()[1:] if line and line[0] not in " \t"), text[:200])
