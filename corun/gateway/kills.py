"""Have the node killed that runs a client's request, to show that its stream goes on with the same bits.

This module owns who may ask for it, and the wait for the `corun up` that started this gateway, which kills the node and
starts it again (`corun.launch.kills` has its end of the Unix socket between them). It must not know HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time

from corun.client.client import AsyncClient
from corun.errors import NotFoundError, OverloadedError, PermissionDeniedError, Shown, UnavailableError, shown
from corun.gateway.clients import Kept
from corun.gateway.config import GatewayConfig
from corun.types import ClusterStatus

BETWEEN_S = 1.0
"""The shortest time in seconds between two tries, of all clients together."""
TIMEOUT_S = 15.0
RETRY_S = 5.0
_LINE_BYTES = 64 * 1024


class Kills:
    """Kills nodes for clients, if the operator allows it and there is somebody who starts them again."""

    def __init__(self, config: GatewayConfig) -> None:
        self._path = config.supervisor
        self.denied = ""
        """Why no client can ever have a node killed here; empty: clients can."""
        if not config.allow_kills:
            self.denied = "the operator has not allowed it (corun up --http PORT --allow-kills)"
        elif not config.supervisor:
            self.denied = "this gateway was not started by corun up, so nobody would start the node again"
        self._state = Kept(lambda _: self._ask({}))
        self._tried_at = -BETWEEN_S

    async def refused(self) -> str:
        """Return why no node can be killed now; empty: one can be. Those who ask at the same time get one answer."""
        if self.denied:
            return self.denied
        try:
            return await self._state.get(0.0)
        except UnavailableError as error:
            return str(error)

    async def kill(self, request_id: str, client: AsyncClient) -> str:
        """Kill the node on which a request of this client decodes, and return the node's id.

        Raises PermissionDeniedError if nobody may, NotFoundError if no such request of the client decodes now,
        OverloadedError if no node can be killed now, and UnavailableError if `corun up` does not answer.
        """
        if self.denied:
            raise PermissionDeniedError("request_id", request_id, f"must run on: {self.denied}")
        if (left_s := self._tried_at + BETWEEN_S - time.monotonic()) > 0:
            raise OverloadedError("somebody asked for a kill a moment ago", left_s)
        self._tried_at = time.monotonic()
        node = running_on(request_id, await client.get_cluster(samples=True, contracts=False))
        if refused := await self._ask({"kill": node}):
            raise OverloadedError(f"{node} cannot be killed now: {refused}", RETRY_S)
        return node

    async def _ask(self, question: dict[str, str]) -> str:
        try:
            line = await asyncio.wait_for(self._exchange(json.dumps(question).encode() + b"\n"), TIMEOUT_S)
            return str(json.loads(line)["refused"])
        except (OSError, ValueError, KeyError, asyncio.TimeoutError) as error:
            reason = Shown(str(error) or "it is too slow")
            raise UnavailableError(f"corun up does not answer: {reason}", RETRY_S) from error

    async def _exchange(self, question: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_LINE_BYTES)
        try:
            writer.write(question)
            return await reader.readline()
        finally:
            writer.close()


def running_on(request_id: str, status: ClusterStatus) -> str:
    """Return the id of the node on which a request decodes. Raises NotFoundError if there is none.

    status: what the router tells a client, which has the ids of the client's own requests only.
    """
    for node in status.nodes:
        if node.samples is not None and request_id in node.samples.request_ids:
            return node.node.ref.node_id
    raise NotFoundError(f"no request {shown(request_id)} of yours is on a node that decodes now")
