"""The extras of the distribution: what a command needs beyond a bare install, and how to get it.

The distribution's own name is in pyproject.toml alone. It is not `corun`, which is a stranger's on PyPI, so what users
are told installs from the repository or a wheel and never by name. This module must not know what a command does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from corun.errors import CorunError

ENGINES = ("cpu", "gpu")
"""Extras with an engine. The packages of `cpu` are in no registry in a form that pip resolves, so the lock files are
the way to them."""


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
