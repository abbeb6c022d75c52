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
from types import SimpleNamespace

import pytest

from corun.node.vllm import fork_server, start
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

LOOKED = """
import sys
from pathlib import Path
from corun.node.vllm import fork_server, start

if __name__ == "__main__":
    fork_server.begin(Path(sys.argv[1]), ("vllm.v1.engine.core",))
    from vllm.model_executor.models import registry
    for model in sys.argv[2:]:
        start.look_at_class(model)
    registry._run_in_subprocess = None
    seen = registry.ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls()
    print(seen.architecture, seen.is_text_generation_model)
    try:
        registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    except TypeError:
        print("vLLM did not know another class")
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


@pytest.mark.slow  # It imports vLLM twice.
def test_vllm_finds_what_a_forked_process_saw_of_a_models_class(tmp_path: Path, folder: str) -> None:
    script = tmp_path / "looked.py"
    script.write_text(LOOKED)
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysModel", "Qwen3ForCausalLM"]}')
    own = {**variables(), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    command = [sys.executable, script, folder, tmp_path, tmp_path / "no-model"]
    found = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    told = found.stdout.splitlines()[-2:]
    assert told == ["Qwen3ForCausalLM True", "vLLM did not know another class"], found.stderr
    assert "has to look at the model's class itself" not in found.stderr


class Looking:
    """A process that ends with a code, or cannot be started."""

    def __init__(self, exitcode: int | None, error: Exception | None) -> None:
        self.exitcode, self.error = exitcode, error

    def start(self) -> None:
        if self.error:
            raise self.error

    def join(self, timeout_s: float) -> None:
        assert timeout_s > 0


@pytest.mark.parametrize(
    ("exitcode", "error", "told"),
    [
        (0, None, ""),
        (1, None, "exit code 1"),
        (-14, None, "exit code -14"),  # Its alarm ended it.
        (None, None, "exit code None"),
        (None, EOFError(), "EOFError()"),
        (None, ConnectionRefusedError(111, "gone"), "ConnectionRefusedError(111, 'gone')"),
    ],
)
def test_a_start_goes_on_without_a_look_at_the_models_class(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exitcode: int | None,
    error: Exception | None,
    told: str,
) -> None:
    context = SimpleNamespace(Process=lambda target, args: Looking(exitcode, error))
    monkeypatch.setattr(fork_server, "Context", lambda: context)
    start.look_at_class("m")
    assert [record.getMessage().rpartition("itself: ")[2] for record in caplog.records] == [told] * bool(told)
