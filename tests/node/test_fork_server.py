"""A process of the fork server has what it imported, and the environment of its parent at that moment, and both end
with that parent."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from corun.node.watchdog import end_with_parent
from corun.processes import living, started

CHECK = """
import os, sys
from multiprocessing import Pipe
from pathlib import Path
from corun.node.vllm import fork_server
from tests.node import test_fork_server

if __name__ == "__main__":
    fork_server.begin(Path(sys.argv[1]), ("colorsys", "no_such_module"))
    os.environ["SET_LATER"] = "yes"
    mine, its = Pipe()
    process = fork_server.Context().Process(target=test_fork_server.tell, args=(its,))
    process.start()
    its.close()
    print(*mine.recv(), os.getpid(), flush=True)
    process.join()
    print(process.exitcode)
"""
ENDED = """
import sys, time
from pathlib import Path
from corun.node.vllm import fork_server
from tests.node import test_fork_server

if __name__ == "__main__":
    fork_server.begin(Path(sys.argv[1]), ())
    fork_server.Context().Process(target=test_fork_server.last).start()
    time.sleep(60)
"""


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd()}


def tell(pipe: Connection) -> None:
    """Send what can be seen in a forked process."""
    parent = multiprocessing.parent_process()
    pipe.send(("colorsys" in sys.modules, os.environ.get("SET_LATER"), parent.pid if parent else None))


def last() -> None:
    """Say who this is, and wait for its parent's end."""
    end_with_parent()
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(60)


RESULTS = """
import os, sys
from pathlib import Path
from corun.node.vllm import fork_server

if __name__ == "__main__":
    fork_server.begin(Path(sys.argv[1]), ("colorsys",))
    here = 7
    print(fork_server.result_of(lambda: ("colorsys" in sys.modules, here, os.getppid() != os.getpid())))
    hangs = lambda: __import__("time").sleep(60)
    for function, timeout_s in ((lambda: 1 // 0, 60), (lambda: os._exit(3), 60), (hangs, 0.5)):
        try:
            fork_server.result_of(function, timeout_s)
        except RuntimeError as error:
            print(str(error).splitlines()[-1])
    print(fork_server.multiprocessing.active_children())
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as found:
        yield found


def test_a_process_has_what_was_imported_and_the_environment_of_now(tmp_path: Path, folder: str) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    command = [sys.executable, script, folder]
    found = subprocess.run(command, env=variables(), capture_output=True, text=True, check=True)
    first, code = found.stdout.splitlines()
    imported, environment, parent, pid = first.split()
    assert (imported, environment, code) == ("True", "yes", "0"), found.stderr
    assert parent == pid  # Which `end_with_parent` waits for.


def test_a_killed_parent_leaves_neither_it_nor_the_fork_server(tmp_path: Path, folder: str) -> None:
    """What stays is the socket, in the folder that is removed with a node's other sockets."""
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    own = {**variables(), "TMPDIR": str(tmp_path)}
    command = [sys.executable, script, folder]
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        both = started(map(int, parent.stdout.readline().split()))
        assert len(both) == 2
        parent.kill()
        deadline = time.monotonic() + 20
        while living(both) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not living(both)
    assert os.listdir(tmp_path) == [script.name]
    assert [name.partition("-")[0] for name in os.listdir(folder)] == ["listener"]


def test_a_function_is_called_in_a_process_of_its_own(tmp_path: Path, folder: str) -> None:
    """One without a name, as vLLM's are. It may fail, end its process, or not end."""
    script = tmp_path / "results.py"
    script.write_text(RESULTS)
    command = [sys.executable, script, folder]
    found = subprocess.run(command, env=variables(), capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "(True, 7, True)",
        "ZeroDivisionError: integer division or modulo by zero",
        "a process of the fork server ended without an answer",
        "a process of the fork server has not answered for 0.5 s",
        "[]",
    ], found.stderr
