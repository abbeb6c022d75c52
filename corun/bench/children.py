"""Child processes with a log each, all of which end with their parent's block. Must not know what they are."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corun.errors import UnavailableError
from corun.processes import descendants, end_tree

TAIL = 3000
"""Characters of a log that an error carries."""
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")
_ELSEWHERE = "See root cause above"
"""vLLM's last error is that of the parent of the process that failed."""


@dataclass
class Processes:
    """Processes of one cluster; all of them are gone after `stop`."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, module: str, *flags: str) -> None:
        self.commands[name] = (module, *flags)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                # In this session: Linux gives each session an equal share of a core, however many of its threads
                # only spin, and the engines share cores here.
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=log,
            )

    def restart(self, name: str) -> None:
        """One that has ended."""
        self.start(name, *self.commands[name])

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """Raises UnavailableError if one has ended: how, its error if it failed by itself, and its log's end."""
        for name, process in self.running.items():
            if (code := process.poll()) is not None:
                text = self.log(name).rstrip()
                error = f": {_error(text)}" if code > 0 else ""
                raise UnavailableError(f"{name} ended with {code}{error}\n{text[-TAIL:]}")

    def terminate(self, name: str, timeout_s: float = 60.0) -> int:
        """SIGTERM, then the exit code; a process that does not end in time is killed with its descendants."""
        process = self.running.pop(name)
        tree = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        finally:
            self.kill(process, tree)

    def kill(self, process: subprocess.Popen[bytes], tree: Mapping[int, str]) -> None:
        """Ends whatever is left of a process and its descendants."""
        process.kill()
        process.wait()
        end_tree(tree, step_s=2.0)

    def stop(self) -> dict[str, int]:
        return {name: self.terminate(name) for name in list(self.running)}


def _error(log: str) -> str:
    """The line that says why a process failed; its last one where no line looks like it."""
    found = [line for line in _ERROR.findall(log) if _ELSEWHERE not in line]
    return (found or log.splitlines() or ["no word"])[-1]
