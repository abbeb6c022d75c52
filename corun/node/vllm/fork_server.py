"""Starts an engine's processes by forking one that has imported vLLM already.

Importing vLLM takes 8 to 20 s on a GPU host: in the node, then in the process in which vLLM looks at a model's class
for the first time, and then in its engine's core. Here a fork server of `multiprocessing` imports while the node does,
and the other two come out of it. Only on a GPU: on a CPU vLLM chooses libraries to preload (platforms/cpu.py) for
processes that start later.

Owns: what the fork server imports, and how vLLM comes to use it. Must not import vLLM or torch: it runs before them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # vLLM requires it.

T = TypeVar("T")
LOOK_TIMEOUT_S = 120.0
"""The longest time in which vLLM looks at a model's class."""

IMPORTED = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.executor.uniproc_executor",
    "corun.node.vllm.worker",
    "corun.node.kv.connector",
)
"""What the fork server imports. Nothing of it may start CUDA, since no CUDA works in a process that is forked then."""


def begin(folder: Path, imported: Sequence[str] = IMPORTED) -> None:
    """Start this process's fork server, which imports these modules. What cannot be imported is left out.

    folder: where it listens, which only this user may enter. `multiprocessing` would make one that a node leaves
    behind, since nodes end without Python's own way out.
    """
    # Before 3.10.9 and 3.11.1 it listened where all users could reach it (CVE-2022-42919).
    setattr(util, "abstract_sockets_supported", False)  # noqa: B010  # typeshed has it as a constant.
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(list(imported))
    forkserver.ensure_running()


class _Process(ForkServerProcess):
    """A process with the environment of its parent at its start; the fork server's is older."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class Context(ForkServerContext):
    """The context of `multiprocessing` that vLLM is given."""

    Process = _Process


def result_of(function: Callable[[], T], timeout_s: float = LOOK_TIMEOUT_S) -> T:
    """Return what a function returns in a process of the fork server. The function need not have a name.

    Raises RuntimeError if it fails there, or takes longer than `timeout_s`.
    """
    context = Context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(cloudpickle.dumps(function), sender))
    process.start()
    sender.close()  # So that the end of the process is seen.
    try:
        if not receiver.poll(timeout_s):
            raise RuntimeError(f"a process of the fork server has not answered for {timeout_s:g} s")
        failed, found = receiver.recv()
    except EOFError:
        raise RuntimeError("a process of the fork server ended without an answer") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if failed:
        raise RuntimeError(f"a process of the fork server failed:\n{failed}")
    result: T = found
    return result


def _send_result(function: bytes, sender: Connection) -> None:
    try:
        sender.send(("", pickle.loads(function)()))
    except Exception:
        sender.send((traceback.format_exc(), None))


def use_for(engines: Any, models: Any) -> None:
    """Let vLLM start processes with the fork server from now on. Where none was begun, change nothing.

    engines: vLLM's `v1.engine.utils`, which makes engines' cores. vLLM has no setting for it:
    `VLLM_WORKER_MULTIPROC_METHOD` knows fork and spawn. The workers of several ranks are started by the core, with that
    method. models: its `model_executor.models.registry`, which looks at a model's class in a process that imports vLLM
    once more, unless it finds in its cache what it saw before.
    """
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        return
    engines.get_mp_context = Context
    models._run_in_subprocess = lambda function: result_of(partial(_with_plugins, function))


def _with_plugins(function: Callable[[], T]) -> T:
    """Return what a function of vLLM returns in a process with vLLM's plugins, as in the one it would start itself."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return function()
