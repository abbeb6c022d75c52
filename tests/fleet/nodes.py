"""`python -m tests.fleet.nodes`: a node around a fake engine, of the kind that its name says.

The processes share "KV" as files beside the model, while the fakes of one process share a table. Tests only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from corun.config.fields import ColocatedConfig, DecodeConfig, NodeConfig, PrefillConfig
from corun.config.flags import parse
from corun.node.life import Role, live_and_leave, log_to_stderr, node_ref, side_refs
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.testing.engines import FakeKv
from corun.testing.nodes import decode_role, prefill_role
from corun.types import NodeRole, new_generation

STEP_MS = 10.0
WRONG = "wrong-bits"
"""The name of a file. While it lies beside the model, decode nodes that start draw other bits."""
HELD = "held"
"""The name of a file. While it lies beside the model, no node is done with loading."""
KINDS: dict[str, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig, "colocated": ColocatedConfig}
"""The configs by the kind of node, as names of nodes begin."""


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


async def _live(config: NodeConfig, stop: asyncio.Event) -> None:
    kv, model = FakeKv(), Path(config.model)
    kv.held = Files(model / "kv")  # type: ignore[assignment]
    is_colocated, engine_id = isinstance(config, ColocatedConfig), f"engine-{new_generation()}"
    refs = side_refs(config) if is_colocated else {role: node_ref(config, role) for role in NodeRole}
    roles: list[Role] = []
    if isinstance(config, DecodeConfig):
        roles.append(decode_role(config, refs[NodeRole.DECODE], kv, engine_id=engine_id))
        roles[0].engine.step_ms = STEP_MS
        roles[0].engine.corrupt = (model / WRONG).exists()
    if isinstance(config, PrefillConfig):
        samples = roles[0].service if roles else None
        roles.insert(0, prefill_role(config, refs[NodeRole.PREFILL], kv, engine_id=engine_id, samples=samples))
    async with observed(config) as observation:
        while (model / HELD).exists():  # noqa: ASYNC110 - A file makes no event.
            await asyncio.sleep(0.05)
        await live_and_leave(config, roles, stop, observation)


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--node-id") + 1]
    config = parse(KINDS[name.partition("-")[0]])
    log_to_stderr()
    serve(lambda stop: _live(config, stop))
