"""Keep one process running: start it under a guard, start it again when it dies, give up when restarts do not help.

This module owns the process, its log file and the count of its deaths. It must not know what it runs, nor who asks for
it (a Ray actor, in `corun.launch.fleet`).
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from corun import processes
from corun.observe import stages

USAGE_ERROR = 2
"""The exit code of a process whose configuration is wrong: another start would end the same way."""
KILLED = 128 + signal.SIGKILL
"""The exit code of a guard whose process was killed."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
"""The delay after the first quick death, which doubles with each further one, and the longest delay."""
SETTLED_S = 60.0
"""The lifetime from which on a death does not count as quick."""
MAX_QUICK_DEATHS = 3
"""The number of quick deaths in a row after which the process is given up."""

_TAIL_LINES, _TAIL_BYTES = 12, 4096


class ProcessState(enum.Enum):
    """What a supervised process is doing."""

    RUNNING = "running"
    WAITING = "waiting"
    """The process has no place yet, or it died and will be started again after a delay."""
    FAILED = "failed"
    """The process died too often, or can never start. It is not started again."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """A snapshot of a supervised process."""

    state: ProcessState
    pid: int = 0
    """The pid of the guard, which is the root of the process tree; 0 while there is none."""
    deaths: int = 0
    """The number of deaths since the supervisor started."""
    detail: str = ""
    """How the process last died, with the last lines of its log unless it was killed; empty if it never died."""
    doing: str = ""
    """The stage of its start that the process reports; empty: it reports none."""

    @property
    def may_run(self) -> bool:
        """True if the process runs or will be restarted. One that was never placed starts only once its actor runs."""
        return self.state is ProcessState.RUNNING or (self.state is ProcessState.WAITING and self.deaths > 0)


class Supervisor:
    """Starts `argv` when it is made, and keeps it running until `stop`. Its thread lives as long as the process may.

    grace_s: the time in seconds between asking the process to end and killing it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        grace_s: float = 40.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = [sys.executable, "-I", processes.__file__, str(os.getpid()), str(grace_s), *argv]
        self._log = log
        self._log_start = 0  # The log offset where the output of the current process begins.
        self._stages = stages.Reader(log)
        self._env = dict(os.environ if env is None else env)
        self._lock = threading.Lock()
        self._status = ProcessStatus(state=ProcessState.WAITING)
        self._stopping = threading.Event()
        self._is_killed = False  # Whether `kill` ended the current process.
        self._process: subprocess.Popen[bytes] | None = None
        # The parent-death signal is tied to the thread that made the child, so one thread makes every child.
        threading.Thread(target=self._keep_running, name=f"supervise-{name}", daemon=True).start()

    def status(self) -> ProcessStatus:
        """Return what the process is doing now."""
        status = self._status
        if status.state is not ProcessState.RUNNING:
            return status
        return replace(status, doing=self._stages.stage(self._log_start))

    def stop(self) -> None:
        """Ask the process to end and return at once. Asking again kills it, and so does asking while it starts: an
        engine that loads hears no signal, and has no work to finish. `status` tells when the process has ended."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
                if self._stages.stage(self._log_start) not in ("", stages.LAST):
                    # Two signals of one kind may arrive as one, so the second is of another kind.
                    self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process, as `kill -9` does, if it runs. It is started again.

        This death says nothing about the process, so it does not count towards giving the process up.
        """
        with self._lock:
            commands = () if self._process is None else processes.children(self._process.pid)
            for pid in commands:  # The guard stays, and ends what the process leaves behind.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._is_killed = True

    def _keep_running(self) -> None:
        try:
            self._run()
        except OSError as error:
            died = replace(self._status, deaths=self._status.deaths + 1)
            self._status = replace(died, state=ProcessState.FAILED, pid=0, detail=f"cannot be started: {error}")

    def _run(self) -> None:
        quick_deaths = 0
        while True:
            try:
                if (process := self._start()) is None:
                    break
            except OSError as error:  # A disk may be full for a moment. The first start fails for a reason that stays.
                if not self._status.deaths or quick_deaths >= MAX_QUICK_DEATHS:
                    raise
                quick_deaths += 1
                self._status = replace(self._status, detail=f"cannot be started: {error}")
                self._stopping.wait(_delay_s(quick_deaths))
                continue
            started = time.monotonic()
            code = self._wait(process)
            if self._stopping.is_set():
                break
            lived_s = time.monotonic() - started
            quick_deaths = quick_deaths + 1 if lived_s < SETTLED_S else 0
            killer = signal.SIGKILL if code == KILLED else max(0, -code)
            cause = f"killed by signal {killer:d}" if killer else f"exit code {code}"
            if self._is_killed:
                quick_deaths, cause = 0, "killed on request"
            # Whoever is killed cannot write why.
            said = "" if killer == signal.SIGKILL else _tail(self._log, self._log_start)
            is_hopeless = code == USAGE_ERROR or quick_deaths >= MAX_QUICK_DEATHS
            self._status = replace(
                self._status,
                state=ProcessState.FAILED if is_hopeless else ProcessState.WAITING,
                pid=0,
                deaths=self._status.deaths + 1,
                detail=f"{cause} after {lived_s:.0f} s\n{said}".rstrip(),
            )
            if is_hopeless:
                return
            self._stopping.wait(_delay_s(quick_deaths))
        self._status = replace(self._status, state=ProcessState.STOPPED, pid=0)

    def _prepare(self) -> None:
        """Make what a start needs. Each start does: the directory may have been cleared, since logs are below /tmp."""
        self._log.parent.mkdir(parents=True, exist_ok=True)

    def _start(self) -> subprocess.Popen[bytes] | None:
        self._prepare()
        with self._lock, self._log.open("ab") as log:
            if self._stopping.is_set():
                return None
            self._log_start = log.seek(0, os.SEEK_END)  # Taken before the process writes.
            self._is_killed = False
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
            self._status = replace(self._status, state=ProcessState.RUNNING, pid=self._process.pid)
            return self._process

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # The guard normally leaves no process behind; this covers a guard that was itself killed. The guard is not
            # reaped yet, so the number of its process group cannot be reused.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None
            return process.wait()


def _delay_s(quick_deaths: int) -> float:
    """Return the wait in seconds before the next start."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** max(0, quick_deaths - 1)))


def _tail(log: Path, start: int) -> str:
    """Return the last lines that a process wrote to its log from the offset `start` on; empty if the log is gone."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:])
    return ""
