"""Whole node processes around fake engines: `corun up` starts them for a role in tests of the fleet.

The processes share "KV" as files beside the model, while the fakes of one process share a table. Tests only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from corun.config.fields import NodeConfig
from corun.node.life import Role, live_and_leave, log_to_stderr, node_ref
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.testing.engines import FakeKv
from corun.testing.nodes import decode_role, prefill_role
from corun.types import NodeRole

STEP_MS = 10.0
WRONG = "wrong-bits"
"""The name of a file. While it lies beside the model, decode nodes that start draw other bits."""


class Files(MutableMapping[tuple[str, str], tuple[int, ...]]):
    """A mapping of (engine id, request id) to prompts, with a file for each."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory

    def __getitem__(self, key: tuple[str, str]) -> tuple[int, ...]:
        try:
            return tuple(json.loads(self._path(key).read_text()))
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: tuple[str, str], prompt: tuple[int, ...]) -> None:
        path = self._path(key)
        aside = self._directory.parent / f".{path.name}"
        aside.write_text(json.dumps(prompt))
        aside.replace(path)  # The file appears whole, because other processes read it.

    def __delitem__(self, key: tuple[str, str]) -> None:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for path in self._directory.iterdir():
            engine, request = (bytes.fromhex(part).decode() for part in path.name.split("-"))
            yield engine, request

    def __len__(self) -> int:
        return len(list(self._directory.iterdir()))

    def items(self) -> Any:
        """Return the entries that still exist when they are read, because other processes take some meanwhile."""
        return [(key, prompt) for key in self if (prompt := self.get(key)) is not None]

    def pop(self, key: tuple[str, str], *default: Any) -> Any:
        """Take a prompt. If several processes take it at once, one gets it, and the others do not find it."""
        try:
            prompt = self[key]
            del self[key]
        except KeyError:
            if default:
                return default[0]
            raise
        return prompt

    def _path(self, key: tuple[str, str]) -> Path:
        return self._directory / "-".join(part.encode().hex() for part in key)


async def _live(config: NodeConfig, role: NodeRole, stop: asyncio.Event) -> None:
    kv, model = FakeKv(), Path(config.model)
    kv.held = Files(model / "kv")  # type: ignore[assignment]
    ref = node_ref(config, role)
    made: Role
    if role is NodeRole.DECODE:
        made = decode_role(config, ref, kv)
        made.engine.step_ms = STEP_MS
        made.engine.corrupt = (model / WRONG).exists()
    else:
        made = prefill_role(config, ref, kv)
    async with observed(config) as observation:
        await live_and_leave(config, made, stop, observation)


def main(config: NodeConfig, role: NodeRole) -> None:
    log_to_stderr()
    serve(lambda stop: _live(config, role, stop))
