"""The directory of reproduction files. Files are written in threads, whole or not at all, and their number is limited.

This module must not know what is in a file (`corun.records.reproduction`) or why it is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from corun.records.reproduction import Reproduction
from corun.records.rows import to_line

MAX_FILES = 100
"""The most files in the directory. If there are more, the oldest are deleted."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Reproductions:
    """Writes reproduction files to one directory. If the directory's name is empty, it writes none."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None
        self._writing: set[asyncio.Task[None]] = set()

    def keep(self, reproduction: Reproduction) -> None:
        """Write a file in the background. Errors of the file system are logged."""
        if self._directory is not None:
            task = asyncio.ensure_future(self._write(self._directory, reproduction))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Wait for the files that are being written, at most `CLOSE_TIMEOUT_S` seconds."""
        if self._writing:
            await asyncio.wait(set(self._writing), timeout=CLOSE_TIMEOUT_S)

    async def _write(self, directory: Path, reproduction: Reproduction) -> None:
        try:
            path = await asyncio.to_thread(_write_file, directory, to_line(reproduction.to_row()) + "\n")
        except OSError as error:
            log.error("no reproduction of %s could be written: %s", reproduction.first.request_id, error)
        else:
            log.error("run it again: corun verify --reproduction %s", path)


def _write_file(directory: Path, text: str) -> Path:
    # Names sort by time. Only their owner may read the files, because they contain prompts.
    path = directory / f"audit-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}.json"
    handle, new = tempfile.mkstemp(prefix=".audit-", dir=directory)  # The file gets mode 0600.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
    for old in sorted(directory.glob("audit-*.json"))[:-MAX_FILES]:
        old.unlink(missing_ok=True)
    return path
