"""Reading a config from a command line: its flags, whose defaults a `cluster.toml` may give.

This module must not know which fields there are.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from corun.config.cluster_file import CONFIGS, read
from corun.config.fields import MemberConfig, NodeConfig
from corun.errors import CorunError, InvalidArgumentError, Shown
from corun.models import checked

C = TypeVar("C", bound=MemberConfig)


def parse(cls: type[C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> C:
    """Read a config from a command line (`sys.argv[1:]` if None), and check that its files and its model can be used.

    A bad one exits with 2 and a usage error.

    `--config cluster.toml` and `--pool NAME` make that file's values for this kind of process the defaults.
    """
    import tyro  # It is slow to import, and not needed if configs are made in code.  # noqa: PLC0415

    arguments = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    arguments.add_argument("--config", default="")
    arguments.add_argument("--pool", default="")
    try:
        file, flags = arguments.parse_known_args(argv)
        _refuse_secrets(cls, flags)
        text = (
            f"{inspect.getdoc(cls)}\n\n--config FILE [--pool NAME] takes the defaults of all options from a "
            "cluster.toml; the pool may be left out where the file has only one."
        )
        words: dict[str, Any] = {"args": flags, "prog": prog, "description": text}
        if file.pool and not file.config:
            raise InvalidArgumentError("pool", file.pool, "must come with --config, the file that has the pool")
        if file.config:
            words["default"] = _defaults(cls, file.config, file.pool)
        found: C = tyro.cli(cls, **words)
        found.check_files()
        return replace(found, model=checked(found.model)) if isinstance(found, NodeConfig) else found
    except CorunError as error:
        print(f"{prog or cls.__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _defaults(cls: type[C], path: str, pool: str) -> C:
    """Return the config that a cluster file gives for this kind of process.

    What only other kinds need, such as their secrets, need not exist.
    """
    found = read(path).pool(pool)
    role = next(name for name, each in CONFIGS.items() if each is cls)
    found.check_files(role)
    return cls(**found.settings(role))


def _refuse_secrets(cls: Any, argv: Sequence[str]) -> None:
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
    for known in fields(cls):
        if known.metadata.get("secret") and known.name in given:
            limit = f"must not be on a command line, which everyone can read: use {known.name}_file"
            raise InvalidArgumentError(known.name, Shown("a secret"), limit)
