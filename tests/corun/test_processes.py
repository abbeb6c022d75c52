"""How a guard finds the processes that it has to end. What it does with them: test_supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corun import processes

FAMILY = """
import subprocess, sys, threading, time
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
subprocess.Popen(sleeper)
subprocess.Popen([sys.executable, "-c", ""])  # It ends, and nobody reaps it.
ready = threading.Event()
def of_a_thread():
    subprocess.Popen(sleeper)
    ready.set()
    time.sleep(60)
threading.Thread(target=of_a_thread, daemon=True).start()
ready.wait()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def family() -> Any:
    """A process id, and its three children as a look at every process of the machine finds them."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        seen = ((int(entry.name), processes.stat_fields(int(entry.name))) for entry in Path("/proc").glob("[0-9]*"))
        children = sorted(child for child, fields in seen if fields is not None and int(fields[1]) == parent.pid)
        assert len(children) == 3
        yield parent.pid, children
        for pid in (*children, parent.pid):
            os.kill(pid, signal.SIGKILL)


def test_children_of_every_thread_and_ended_ones_are_found_without_a_scan(
    family: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look-up in /proc can hold up, in the kernel, whoever reaps that process at this moment."""
    parent, expected = family
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda path: pytest.fail(f"{path} was scanned"))
        patch.setattr(processes, "stat_fields", lambda *_: pytest.fail("a process was looked up"))
        assert processes.children(parent) == expected
    monkeypatch.setattr(Path, "exists", lambda _: False)  # As on a kernel without its lists.
    assert processes.children(parent) == expected


def test_a_process_that_is_gone_has_no_children() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processes.children(gone.pid) == []


def test_children_are_ended_until_none_is_left() -> None:
    """In a process of its own, since it reaps all that it has."""
    code = f"""
import subprocess, sys, time
sys.path.insert(0, {str(Path(processes.__file__).parent)!r})
import processes, os
for _ in range(5): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
began = time.monotonic()
processes.end_children(os.getpid())
assert processes.children(os.getpid()) == []
assert time.monotonic() - began < 10
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_process_may_have_any_bytes_as_its_name() -> None:
    """The kernel cuts a name after 15 bytes, also in the middle of a character."""
    code = "open('/proc/self/comm', 'wb').write(('é' * 10).encode()); print('named', flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as named:
        assert named.stdout is not None
        assert named.stdout.readline() == "named\n"
        assert Path(f"/proc/{named.pid}/comm").read_bytes() == "ééééééé".encode() + b"\xc3\n"
        fields = processes.stat_fields(named.pid)
        named.kill()
    assert fields is not None
    assert int(fields[1]) == os.getpid()
