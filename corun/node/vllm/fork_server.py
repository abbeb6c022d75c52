"""Starts processes that are forked from one that has imported vLLM already, such as an engine's core.

Importing vLLM takes a node and then its engine's core 8 to 20 s each on a GPU host. Here a fork server of
`multiprocessing` imports while the node does. Only on a GPU: on a CPU vLLM chooses libraries to preload
(platforms/cpu.py) for processes that start later.

Owns: what the fork server imports, and how vLLM comes to use it. Must not import vLLM or torch: it runs before them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

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


def is_begun() -> bool:
    return forkserver._forkserver._forkserver_pid is not None  # type: ignore[attr-defined]


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


@contextmanager
def used_by(module: Any) -> Iterator[None]:
    """Let vLLM's `v1.engine.utils` make engines' cores with the fork server. Where none was begun, change nothing.

    vLLM has no setting for it: `VLLM_WORKER_MULTIPROC_METHOD` knows fork and spawn. The workers of several ranks are
    started by the core, with that method.
    """
    if not is_begun():
        yield
        return
    original = module.get_mp_context
    module.get_mp_context = Context
    try:
        yield
    finally:
        module.get_mp_context = original
