"""The command `corun`: one verb per command, one line per error, and exit codes that scripts can use.

This module owns the list of commands, their help, and the exit code of each error. It must not know what a command
does.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Union, cast

import tyro

import corun
from corun.cli.batch import Batch
from corun.cli.chat import Chat
from corun.cli.colours import coloured
from corun.cli.diff import Diff
from corun.cli.fingerprint import Fingerprint
from corun.cli.generate import Generate
from corun.cli.models import Model
from corun.cli.replay import Replay
from corun.cli.status import Status
from corun.cli.tools import Certs, Gateway
from corun.cli.top import Top
from corun.cli.up import Scale, Up
from corun.cli.verify import Verify
from corun.client.routers import NoRouterError
from corun.contract import CONTRACT_VERSION
from corun.errors import (
    INTERRUPTED,
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InvalidArgumentError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

OK, FAILURE, USAGE, MISMATCH, UNAVAILABLE, BROKEN_PIPE = 0, 1, 2, 3, 4, 141

_DESCRIPTION = """A prefill-decode LLM serving cluster whose output is bitwise reproducible.

examples:
  corun up                                             start a cluster with the built-in tiny model
  corun up --model smollm2                             with a small model that talks, fetched once
  corun chat                                           talk with it in the terminal
  corun generate "Once upon a time" --seed 42          stream one prompt
  corun batch prompts.jsonl -o results.jsonl           run a file of prompts; run it again to resume
  corun verify results.jsonl                           run results again and compare every bit

corun COMMAND --help says more. Exit codes: 0 ok, 1 failure, 2 usage or bad input, 3 bits or contracts differ,
4 cluster unavailable or overloaded, 130 interrupted."""

_EXIT_CODES: dict[type[CorunError], int] = {
    InvalidArgumentError: USAGE,
    ContractMismatchError: MISMATCH,
    DataLossError: MISMATCH,
    UnauthenticatedError: USAGE,
    PermissionDeniedError: USAGE,
    UnavailableError: UNAVAILABLE,
    OverloadedError: UNAVAILABLE,
}
_HINTS: dict[type[CorunError], str] = {
    NoRouterError: "start a cluster with corun up, or name a running one with --router HOST:PORT",
    UnauthenticatedError: "--token-file FILE or CORUN_TOKEN_FILE names the file of your token",
    DeadlineError: "--timeout-s is the longest time for it",
}
"""What a user of the commands can do about an error, in words that a caller of the client does not have."""
_STYLE = (tyro.conf.FlagCreatePairsOff,)

PLUGINS = "corun.commands"
"""The group of entry points that add commands. Each entry point names a dict like `COMMANDS`. The benchmark is added in
this way: it imports the processes, so nothing here may import it."""


COMMANDS: dict[str, type[Any]] = {
    "up": Up,
    "scale": Scale,
    "gateway": Gateway,
    "generate": Generate,
    "chat": Chat,
    "batch": Batch,
    "status": Status,
    "top": Top,
    "verify": Verify,
    "replay": Replay,
    "diff": Diff,
    "fingerprint": Fingerprint,
    "model": Model,
    "certs": Certs,
}
"""The built-in commands by name."""


@functools.cache
def commands() -> dict[str, type[Any]]:
    """Return every command by its name of one or two words: the built-in commands, then those of plugins."""
    plugged = [plugin.load() for plugin in metadata.entry_points(group=PLUGINS)]
    return {name: command for table in (COMMANDS, *plugged) for name, command in table.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. `--help` and usage errors raise SystemExit, as in argparse."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # Otherwise gRPC prints a line for every lost connection.
    _prepare_streams()
    try:
        code: int = parse(sys.argv[1:] if argv is None else argv).run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # Rich makes a broken pipe an exit with 1 (rich/console.py: `on_broken_pipe`).
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The reader of our output has gone, as in `corun batch … | head`. This is no error, and nobody reads a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except CorunError as error:
        hint = next((f"; {hint}" for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
        code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), FAILURE)
        return _fail(f"{error}{hint}", code)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), USAGE)
    return code


def _prepare_streams() -> None:
    """Give this process the standard streams that were closed when it began. Python has None for them, and prints on
    stdout what is meant for a stderr that is None.

    What stdout cannot write, as half a surrogate pair or a character that its encoding lacks, is written as an escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # It stays open.  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def parse(argv: Sequence[str]) -> Any:
    """Return the parsed command of a command line. It has a method `run`, which returns the exit code.

    Raises SystemExit for help, for `--version` and for usage errors.
    """
    known = commands()
    for name, rest in ((" ".join(argv[:2]), argv[2:]), (" ".join(argv[:1]), argv[1:])):
        is_group = any(other.startswith(f"{name} ") for other in known)
        if name not in known or (is_group and rest and not rest[0].startswith("-")):
            continue  # A word after the first word of several commands names none of them.
        command = known[name]
        if getattr(command, "PASSES_ON", False) and not {"-h", "--help"} & set(rest):
            return command(tuple(rest))
        description = inspect.getdoc(command) or ""
        return tyro.cli(command, prog=f"corun {name}", description=description, args=rest, config=_STYLE)
    if list(argv) == ["--version"]:
        print(f"corun {corun.__version__} (contract {CONTRACT_VERSION})")
        raise SystemExit(OK)
    if argv and not argv[0].startswith("-"):
        raise SystemExit(_fail(_mistyped(argv), USAGE))
    # Show help, or the usage error of a command line that names no command.
    kinds = tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=(kind.__doc__ or "").partition("\n")[0])]
        for name, kind in known.items()
    )
    tyro.cli(cast(Any, Union)[kinds], prog="corun", description=_DESCRIPTION, args=argv, config=_STYLE)
    raise SystemExit(USAGE)


def _mistyped(argv: Sequence[str]) -> str:
    """Return the error message for words that name no command."""
    group, word = (f"{argv[0]} ", argv[1]) if argv[0] in commands() else ("", argv[0])
    known = [
        name.removeprefix(group) for name in commands() if name.startswith(group) and " " not in name[len(group) :]
    ]
    if near := difflib.get_close_matches(word, known, n=1):
        return f"'{group}{word}' is no command; perhaps you meant: corun {group}{near[0]}"
    return f"'{group}{word}' is no command: it must be one of {', '.join(known)}"


def _fail(message: str, code: int) -> int:
    print(f"{coloured('corun:', 'red', stderr=True)} {' '.join(message.split())}", file=sys.stderr)
    return code
