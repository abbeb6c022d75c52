"""A process of the fork server has what it imported, and the environment of its parent at that moment."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

CHECK = """
import os, sys
from multiprocessing import Pipe
from corun.node.vllm import fork_server
from tests.node import test_fork_server

if __name__ == "__main__":
    fork_server.begin(("colorsys", "no_such_module"))
    os.environ["SET_LATER"] = "yes"
    mine, its = Pipe()
    process = fork_server.Context().Process(target=test_fork_server.tell, args=(its,))
    process.start()
    its.close()
    print(*mine.recv(), os.getpid())
    process.join()
    print(process.exitcode)
"""


def tell(pipe: Connection) -> None:
    """Send what can be seen in a forked process."""
    parent = multiprocessing.parent_process()
    pipe.send(("colorsys" in sys.modules, os.environ.get("SET_LATER"), parent.pid if parent else None))


def test_a_process_has_what_was_imported_and_the_environment_of_now(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    variables = {**os.environ, "PYTHONPATH": os.getcwd()}
    found = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, check=True)
    imported, environment, parent, pid = found.stdout.splitlines()[0].split()
    assert (imported, environment, found.stdout.splitlines()[1]) == ("True", "yes", "0"), found.stderr
    assert parent == pid  # Which `end_with_parent` waits for.
