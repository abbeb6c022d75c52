"""Ask the `corun up` that started this gateway to kill a node, over its Unix socket (`corun.launch.kills`).

This module owns who may ask, and the wait for the answer. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from corun.errors import InvalidArgumentError, OverloadedError, PermissionDeniedError, Shown, UnavailableError
from corun.gateway.config import GatewayConfig

TIMEOUT_S = 15.0
RETRY_S = 5.0
_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Killable:
    """Which nodes a client may have killed."""

    nodes: Sequence[str] = ()
    """The nodes that decode."""
    refused: str = ""
    """Why none can be killed now; empty: any of them can."""


class Kills:
    """Kills nodes for clients, if the operator allows it and there is somebody who starts them again."""

    def __init__(self, config: GatewayConfig) -> None:
        self._path = config.supervisor
        self.denied = ""
        """Why no client may ever kill a node here; empty: clients may."""
        if not config.allow_kills:
            self.denied = "the operator has not allowed it (corun up --http PORT --allow-kills)"
        elif not config.supervisor:
            self.denied = "corun up did not start this gateway, so nobody would start the node again"
        self._asking: asyncio.Future[Killable] | None = None

    async def killable(self) -> Killable:
        """Return the nodes that may be killed now. Those who ask at the same time get one answer.

        Raises UnavailableError if `corun up` does not answer.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask({}))
        return await asyncio.shield(self._asking)

    async def kill(self, node: str) -> None:
        """Kill a node. Its streams go on at another one.

        Raises PermissionDeniedError if clients may not, OverloadedError if it cannot be now, UnavailableError if
        `corun up` does not answer, and InvalidArgumentError for an unknown node.
        """
        if self.denied:
            raise PermissionDeniedError("node", node, f"cannot be killed: {self.denied}")
        found = await self._ask({"kill": node})
        if found.refused and node not in found.nodes:
            raise InvalidArgumentError("node", node, found.refused)
        if found.refused:
            raise OverloadedError(f"{node} cannot be killed now: {found.refused}", RETRY_S)

    async def _ask(self, question: dict[str, str]) -> Killable:
        try:
            line = await asyncio.wait_for(self._exchange(json.dumps(question).encode() + b"\n"), TIMEOUT_S)
            answer = json.loads(line)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            reason = Shown(str(error) or "it is too slow")
            raise UnavailableError(f"corun up does not answer: {reason}", RETRY_S) from error
        return Killable(nodes=tuple(answer["nodes"]), refused=answer["refused"])

    async def _exchange(self, question: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_LINE_BYTES)
        try:
            writer.write(question)
            return await reader.readline()
        finally:
            writer.close()
