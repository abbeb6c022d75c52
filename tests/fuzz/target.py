"""What is fuzzed: real routers and node services over fake engines, in a process of their own, and how it is watched.

    python -m tests.fuzz.target MODEL_DIR SECRETS_DIR SETTINGS

Prints a line of JSON with the addresses when all is ready, answers each line on stdin with a line of what is held, and
ends when stdin does. Logs go to stderr. Tests only.

- open: a router that asks for no token, with a node of each role: the surface of a client.
- guarded: the same behind tokens: what a client without one, or with a client's only, can reach.
- lone: a router without nodes, for the registry: who may register may also ruin, so the others' nodes are left alone.
- prefill, decode, colocated: nodes that have joined nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from corun.node import membership
from corun.rpc.server import raise_file_limit
from corun.testing.cluster import router_config
from corun.testing.model import write_tokenizer
from corun.types import NodeRole
from router.nodes import admission
from router.service import ClusterService
from tests.clusters import FakeCluster, cluster
from tests.machine import entries, resident_mib
from tests.secrets import Secrets

PATIENT: dict[str, Any] = {"heartbeat_interval_ms": 500, "heartbeat_timeout_ms": 60_000}
"""The machine may be slow; that a node is lost is not what is looked for here."""
STEP_MS = 1.0
SLOTS = 32
LEASE_TTL_MS = 5000
FORGET_AFTER_S = 20.0
"""What a router keeps of nodes that are gone would look like a leak, too."""
START_S = 120.0
SETTLE_S = 60.0
_OWN_OF_GRPC = re.compile(r"Traceback .*\n(?: +File \"src/python/grpcio/.*\n(?: {4,}.*\n)*)+grpc\S+ExecuteBatchError")
"""What gRPC prints by itself when a client is gone that it wanted to tell of an error of its own."""
_UNEXPECTED = re.compile(
    r"^(?:.* internal error .*|Traceback .*|.*Task exception was never retrieved.*)$", re.MULTILINE
)


class Target:
    """A running target process."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any], secrets: Secrets, log: Path) -> None:
        self.addresses: dict[str, str] = told["addresses"]
        self.nodes: dict[str, dict[str, str]] = told["nodes"]
        self.secrets = secrets
        self.log = log
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def rss_mib(self) -> float:
        return resident_mib(self._process.pid)

    @property
    def files(self) -> int:
        """Open file descriptors."""
        return entries("fd", self._process.pid)

    def errors(self) -> list[str]:
        """Unexpected errors in the log, each kind once: its line without the time, or how its traceback ends."""
        text, found = _OWN_OF_GRPC.sub("", self.log.read_text(errors="replace")), set()
        for match in _UNEXPECTED.finditer(text):
            first, *lines = text[match.start() : match.start() + 3000].splitlines()
            own = next((line for line in lines if line and line[0] not in " \t"), first)
            found.add(own if first.startswith("Traceback") else re.sub(r"^\S+ \S+ ", "", first))
        return sorted(found)

    async def settled(self, files: int, slack: int = 8) -> list[str]:
        """What is still held, or open beyond `files`, after a while in which all should have been given back."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_S
        while (found := await self._held(files + slack)) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return found

    async def _held(self, files: int) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        found: list[str] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), START_S))
        return found + [f"{self.files} files are open, not {files}"] * (self.files > files)


@contextlib.asynccontextmanager
async def running(log_path: str = "", **settings: Any) -> AsyncIterator[Target]:
    """A target; `settings` are those of its routers, or broken=True. log_path: where its log is kept."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        secrets = Secrets.make(scratch / "secrets")
        log = Path(log_path) if log_path else scratch / "log"
        command = [sys.executable, "-m", "tests.fuzz.target", write_tokenizer(scratch), str(secrets.directory)]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, json.dumps(settings), stdin=-1, stdout=-1, stderr=stderr, limit=2**24
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = await asyncio.wait_for(process.stdout.readline(), START_S)
            assert told, log.read_text()[-3000:]
            yield Target(process, json.loads(told), secrets, log)
        finally:
            process.stdin.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), SETTLE_S)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def serve(model: str, secrets: Secrets, settings: dict[str, Any]) -> None:
    tokens = {name: value for name, value in secrets.settings.items() if not name.startswith("tls")}
    async with (
        cluster(model, slots=SLOTS, **PATIENT, **settings) as open_router,
        cluster(model, **PATIENT, **settings, **tokens) as guarded,
        contextlib.AsyncExitStack() as stack,
    ):
        lone = FakeCluster(model, router_config(**PATIENT, **settings))
        stack.push_async_callback(lone.close)
        await lone.add_router()
        prefill = await lone.add_prefill("p", join=False)
        decode = await lone.add_decode("d", join=False, lease_ttl_ms=LEASE_TTL_MS)
        colocated = await lone.add_colocated("c", join=False, lease_ttl_ms=LEASE_TTL_MS)
        for node in (*open_router.nodes, *guarded.nodes):
            if node.info.slots:
                node.engine.step_ms = STEP_MS
        for node in (*open_router.nodes, *guarded.nodes, *lone.nodes):
            for engine in (side.engine for side in node.sides.values()):
                for name in {"prefilled", "released", "connected"} & vars(engine).keys():
                    setattr(engine, name, deque(maxlen=10))  # What fakes note of calls would look like a leak, too.
        for node in (prefill, colocated):
            node.sides[NodeRole.PREFILL].engine.kv_ttl_s = LEASE_TTL_MS / 1000
        nodes = {
            name: {
                "address": node.info.address,
                "generation": node.info.ref.generation,
                "contract": node.info.contract_json,
            }
            for name, node in {"prefill": prefill, "decode": decode, "colocated": colocated}.items()
        }
        clusters = {"open": open_router, "guarded": guarded, "lone": lone}
        print(json.dumps({"addresses": {name: each.address for name, each in clusters.items()}, "nodes": nodes}))
        sys.stdout.flush()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            print(json.dumps(_held(clusters)), flush=True)


def _held(clusters: dict[str, FakeCluster]) -> list[str]:
    found = [f"{name}: {what}" for name, fake in clusters.items() for what in fake.held()]
    found += [f"{node.leases} leases of {node.info.ref}" for node in clusters["lone"].nodes if node.leases]
    running = {name: fake.router._activity.running for name, fake in clusters.items()}
    return found + [f"{name}: {count} calls" for name, count in running.items() if count]


def _break() -> None:
    """A handler with a bug, for the negative control: all values of a field but the canaries' raise KeyError."""
    generate: Any = ClusterService.Generate

    async def broken(self: Any, request: Any, context: Any) -> Any:
        _ = {12: "fine"}[request.sampling_params.max_tokens]
        async with contextlib.aclosing(generate(self, request, context)) as responses:
            async for response in responses:
                yield response

    ClusterService.Generate = broken  # type: ignore[method-assign]


def main() -> None:
    model, secrets, settings = sys.argv[1], Secrets(Path(sys.argv[2])), json.loads(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_file_limit()
    membership.RETRY_S = 0.05
    admission.FORGET_AFTER_S = FORGET_AFTER_S
    if settings.pop("broken", False):
        _break()
    asyncio.run(serve(model, secrets, settings))


if __name__ == "__main__":
    main()
