"""Child processes with one log each. All of them end with their owner's `with` block. Must not know what they run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from corun.errors import UnavailableError
from corun.processes import descendants, end_tree, stat_fields

_TAIL, _MAX_ERRORS, _ERROR_TAIL = 3000, 12, 300
"""The characters of a log's end, the errors before it, and the characters of each that an error carries."""
_POLL_S, _FINISH_POLL_S = 0.25, 0.05
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")
_ELSEWHERE = "See root cause above"
"""Marks an error line that is not the cause: vLLM's last error comes from the parent of the process that failed."""


@dataclass
class Processes:
    """Child processes by name. None of them is left after a `with` block over this object."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: dict[str, dict[int, str]] = field(init=False, default_factory=dict)
    """The last noted descendants of each process: they cannot be found any more once the process has died."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(
        self, name: str, module: str, *flags: str, stdin: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Run `python -m MODULE FLAGS…`. `stdin` and `env` are those of `subprocess.Popen`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                # The child stays in this session: Linux gives each session an equal share of a core, no matter how
                # many of its threads only spin, and the engines share cores here.
                [sys.executable, "-m", module, *flags],
                stdin=stdin,
                env=env,
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def tail(self, name: str) -> str:
        """Return the end of a log, and before it the errors of the rest: vLLM writes the cause long before the end."""
        text = self.log(name).rstrip()
        errors = dict.fromkeys(line[-_ERROR_TAIL:] for line in text[:-_TAIL].splitlines() if _ERROR.search(line))
        return "\n".join([*list(errors)[:_MAX_ERRORS], text[-_TAIL:]])

    def note(self, name: str) -> None:
        """Remember all that a process has started, so that it is ended with the process in any case."""
        self._started[name] = self._started.get(name, {}) | descendants(self.running[name].pid)

    def check(self) -> None:
        """Raise UnavailableError if a process has ended.

        The message has the exit code, the error if the process failed by itself, and the tail of its log.
        """
        for name, process in self.running.items():
            if (code := process.poll()) is not None:
                raise self._failed(name, f"ended with {code}", by_itself=code > 0)

    def wait(self, seconds: float) -> None:
        """Wait this many seconds. Raises UnavailableError if a process ends in that time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _POLL_S))

    def finish(self, names: Iterable[str], timeout_s: float) -> None:
        """Close the stdin of processes that have a pipe, and wait until all of them have ended by themselves.

        Raises UnavailableError as soon as one of them fails, or if they do not end in time.
        """
        waiting = list(names)
        for name in waiting:
            if (pipe := self.running[name].stdin) is not None:
                pipe.close()
        deadline = time.monotonic() + timeout_s
        while waiting:
            for name in [name for name in waiting if self.running[name].poll() is not None]:
                if code := self.running[name].returncode:
                    raise self._failed(name, f"ended with {code}")
                waiting.remove(name)
                del self.running[name]
                self._started.pop(name, None)
            if waiting and time.monotonic() > deadline:
                raise self._failed(waiting[0], f"did not end within {timeout_s:g} s")
            time.sleep(_FINISH_POLL_S if waiting else 0.0)

    def terminate(self, name: str, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and return the exit code, -9 if the process does not end in time.

        Whatever is left of it and its descendants is killed.
        """
        process, tree = self._let_go(name)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return _end(process, tree, 2.0)

    def kill(self, name: str, step_s: float = 2.0) -> int:
        """Kill a process (SIGKILL) and end all that it started; return its exit code. `step_s` is that of
        `corun.processes.end_tree`."""
        process, tree = self._let_go(name)
        return _end(process, tree, step_s)

    def owners(self) -> dict[int, str]:
        """Return the process name that each process id belongs to, for the processes and all that they started."""
        trees = {name: (process.pid, *descendants(process.pid)) for name, process in self.running.items()}
        return {pid: name for name, tree in trees.items() for pid in tree}

    def memory(self) -> dict[str, float]:
        """Return the resident memory of each process with all that it started, in MiB."""
        page = os.sysconf("SC_PAGE_SIZE")
        return {name: round(count * page / 2**20, 1) for name, count in self._sums(21).items()}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each process has used with all that it started and all their threads."""
        return {name: ticks / os.sysconf("SC_CLK_TCK") for name, ticks in self._sums(11, 12).items()}

    def _let_go(self, name: str) -> tuple[subprocess.Popen[bytes], dict[int, str]]:
        """Remove a process from this object; return it and all that it started."""
        self.note(name)
        return self.running.pop(name), self._started.pop(name)

    def _sums(self, *fields: int) -> dict[str, int]:
        """Return the sum of some fields of each process tree. Index 0 is field 3 of proc_pid_stat(5)."""
        sums = dict.fromkeys(self.running, 0)
        for pid, name in self.owners().items():
            if found := stat_fields(pid):
                sums[name] += sum(int(found[number]) for number in fields)
        return sums

    def _failed(self, name: str, how: str, *, by_itself: bool = True) -> UnavailableError:
        """Return an error with the line of the log that says why, or its last line if none looks like an error."""
        text = self.log(name).rstrip()
        found = [line for line in _ERROR.findall(text) if _ELSEWHERE not in line]
        error = f": {(found or text.splitlines() or ['no word'])[-1]}" if by_itself else ""
        return UnavailableError(f"{name} {how}{error}\n{self.tail(name)}")


def _end(process: subprocess.Popen[bytes], tree: Mapping[int, str], step_s: float) -> int:
    """End whatever is left of a process and its descendants; return its exit code."""
    process.kill()
    code = process.wait()
    end_tree(tree, step_s=step_s)
    if process.stdin is not None:
        process.stdin.close()
    return code
