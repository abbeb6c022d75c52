"""`python -m tests.fleet.nodes`: a node around a fake engine, of the role that its name says.

The processes share "KV" as files beside the model, while the fakes of one process share a table. Tests only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig
from corun.config.flags import parse
from corun.node.life import Role, live_and_leave, log_to_stderr, node_ref
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.testing.engines import FakeKv
from corun.testing.nodes import decode_role, prefill_role
from corun.types import NodeRole

STEP_MS = 10.0
WRONG = "wrong-bits"
"""The name of a file. While it lies beside the model, decode nodes that start draw other bits."""
HELD = "held"
"""The name of a file. While it lies beside the model, no node is done with loading."""


class Files:
    """What a FakeKv asks of its table from (engine id, request id) to prompts, with a file for each entry."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory

    def __contains__(self, key: tuple[str, str]) -> bool:
        return self._path(key).exists()

    def __setitem__(self, key: tuple[str, str], prompt: tuple[int, ...]) -> None:
        path = self._path(key)
        aside = self._directory.parent / f".{path.name}"
        aside.write_text(json.dumps(prompt))
        aside.replace(path)  # The file appears whole, because other processes read it.

    def items(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return the entries that still exist when they are read, because other processes take some meanwhile."""
        found = []
        for path in self._directory.iterdir():
            key = tuple(bytes.fromhex(part).decode() for part in path.name.split("-"))
            with suppress(FileNotFoundError):
                found.append((key, tuple(json.loads(path.read_text()))))
        return found

    def pop(self, key: tuple[str, str], default: Any) -> Any:
        """Take a prompt. If several processes take it at once, one gets it, and the others do not find it."""
        path = self._path(key)
        try:
            prompt = tuple(json.loads(path.read_text()))
            path.unlink()
        except FileNotFoundError:
            return default
        return prompt

    def _path(self, key: tuple[str, str]) -> Path:
        return self._directory / "-".join(part.encode().hex() for part in key)


async def _live(config: NodeConfig, role: NodeRole, stop: asyncio.Event) -> None:
    kv, model = FakeKv(), Path(config.model)
    kv.held = Files(model / "kv")  # type: ignore[assignment]
    ref = node_ref(config, role)
    made: Role
    if isinstance(config, DecodeConfig):
        made = decode_role(config, ref, kv)
        made.engine.step_ms = STEP_MS
        made.engine.corrupt = (model / WRONG).exists()
    else:
        assert isinstance(config, PrefillConfig)
        made = prefill_role(config, ref, kv)
    async with observed(config) as observation:
        while (model / HELD).exists():  # noqa: ASYNC110 - A file makes no event.
            await asyncio.sleep(0.05)
        await live_and_leave(config, [made], stop, observation)


if __name__ == "__main__":
    is_prefill = "prefill-" in sys.argv[sys.argv.index("--node-id") + 1]
    config: NodeConfig = parse(PrefillConfig if is_prefill else DecodeConfig)
    log_to_stderr()
    serve(lambda stop: _live(config, NodeRole.PREFILL if is_prefill else NodeRole.DECODE, stop))
