"""What is fuzzed, in a process of its own: real routers and node services over fake engines.

    python -m tests.fuzz.target MODEL_DIR SECRETS_DIR

Prints a line of JSON with the addresses when all is ready, answers each line on stdin with a line of what is held, and
ends when stdin does. Logs go to stderr. Tests only.

- open: a router that asks for no token, with a node of each role: the surface of a client.
- guarded: the same behind tokens: what a client without one, or with a client's only, can reach.
- lone: a router without nodes, for the registry: who may register may also ruin, so the others' nodes are left alone.
- prefill, decode: nodes that have joined nowhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import deque
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from corun.node import membership
from corun.rpc.server import raise_file_limit
from corun.testing.cluster import router_config
from router.nodes import registry
from router.service import ClusterService
from tests.clusters import FakeCluster, cluster
from tests.secrets import Secrets

PATIENT: dict[str, Any] = {"heartbeat_interval_ms": 500, "heartbeat_timeout_ms": 60_000}
"""The machine may be slow; that a node is lost is not what is looked for here."""
STEP_MS = 1.0
SLOTS = 32
LEASE_TTL_MS = 5000
FORGET_AFTER_S = 20.0
"""What a router keeps of nodes that are gone would look like a leak, too."""


async def serve(model: str, secrets: Secrets, settings: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        open_router = await stack.enter_async_context(cluster(model, slots=SLOTS, **PATIENT, **settings))
        tokens = {name: value for name, value in secrets.settings.items() if not name.startswith("tls")}
        guarded = await stack.enter_async_context(cluster(model, **PATIENT, **settings, **tokens))
        lone = FakeCluster(model, router_config(**PATIENT, **settings))
        stack.push_async_callback(lone.close)
        await lone.add_router()
        prefill = await lone.add_prefill("p", join=False)
        decode = await lone.add_decode("d", join=False, lease_ttl_ms=LEASE_TTL_MS)
        for fake in (open_router, guarded):
            for node in fake.nodes:
                if node.info.slots:
                    node.engine.step_ms = STEP_MS
        for node in (*open_router.nodes, *guarded.nodes, prefill, decode):
            _forget_calls(node.engine)
        prefill.engine.kv_ttl_s = LEASE_TTL_MS / 1000
        nodes = {node.info.role.value: _described(node) for node in (prefill, decode)}
        clusters = {"open": open_router, "guarded": guarded, "lone": lone}
        addresses = {name: fake.address for name, fake in clusters.items()}
        print(json.dumps({"addresses": addresses, "nodes": nodes}), flush=True)
        await _answer(clusters)


def _forget_calls(engine: Any) -> None:
    """The fakes note all they are asked, which would look like a leak."""
    for name in ("prefilled", "released", "connected"):
        if hasattr(engine, name):
            setattr(engine, name, deque(maxlen=10))


def _described(node: Any) -> dict[str, str]:
    return {"address": node.info.address, "generation": node.info.ref.generation, "contract": node.info.contract_json}


async def _answer(clusters: dict[str, FakeCluster]) -> None:
    """Says what is held for every line that is asked."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(_held(clusters)), flush=True)


def _held(clusters: dict[str, FakeCluster]) -> list[str]:
    found = [f"{name}: {what}" for name, fake in clusters.items() for what in fake.held()]
    found += [f"{node.used_slots} slots of {node.info.ref}" for node in clusters["lone"].nodes if node.used_slots]
    running = {name: fake.router._activity._running for name, fake in clusters.items()}
    return found + [f"{name}: {count} calls" for name, count in running.items() if count]


def _break() -> None:
    """A handler with a bug, for the negative control: all values of a field but the canaries' raise KeyError."""
    generate = ClusterService.Generate

    async def broken(self: Any, request: Any, context: Any) -> Any:
        _ = {12: "fine"}[request.sampling_params.max_tokens]
        async with aclosing(generate(self, request, context)) as responses:
            async for response in responses:
                yield response

    ClusterService.Generate = broken  # type: ignore[method-assign]


def main() -> None:
    model, secrets, settings = sys.argv[1], Secrets(Path(sys.argv[2])), json.loads(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_file_limit()
    membership.RETRY_S = 0.05
    registry.FORGET_AFTER_S = FORGET_AFTER_S
    if settings.pop("broken", False):
        _break()
    asyncio.run(serve(model, secrets, settings))


if __name__ == "__main__":
    main()
