"""How a registered node becomes ready: the tokenizer, its channel, and a connection to each node of the other role.

This module must not know why a node is in use or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from corun.contract import Contract
from corun.errors import ContractMismatchError, CorunError, UnavailableError
from corun.models import served_name
from corun.types import NodeInfo, NodeRole
from router.nodes.node import DecodeNode, Node, PrefillNode
from router.prompts import Model
from router.text import VERSION, Tokenizer

OPEN_TIMEOUT_S = 10.0
"""The longest time to connect to a node: the channel of a prefill node, the first message on a decode node's stream."""
CONNECT_TIMEOUT_S = 30.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0

M = TypeVar("M", bound=Node[Any])

log = logging.getLogger(__name__)


class Preparation:
    """The work that makes the nodes of a router ready.

    decodes, prefills: the registry's nodes by id. lose: gives a node up. changed: called when a node has become ready.
    """

    def __init__(
        self,
        decodes: Mapping[str, DecodeNode],
        prefills: Mapping[str, PrefillNode],
        lose: Callable[[Node[Any], str], None],
        changed: Callable[[], None],
    ) -> None:
        self.model: Model | None = None
        """The cluster's model; None until a tokenizer has been loaded."""
        self._decodes = decodes
        self._prefills = prefills
        self._lose = lose
        self._changed = changed
        self._connecting: dict[tuple[str, str], asyncio.Future[None]] = {}
        """The tasks that connect pairs, by the ids of the decode and the prefill node. They stay when they are done."""
        self._loading = asyncio.Lock()

    def start(self, node: Node[Any]) -> None:
        """Begin to make a node ready."""
        node.preparing = spawn(self._prepare(node), f"preparing node {node.info.ref}")

    def stop(self, node: Node[Any]) -> None:
        """End the work for a node that was given up, and forget its pairs."""
        pairs = [pair for pair in self._connecting if node.node_id in pair]
        for work in (node.preparing, *map(self._connecting.pop, pairs)):
            if work is not None:
                work.cancel()

    async def _prepare(self, node: Node[Any]) -> None:
        await _until_done(f"{node.node_id} is not ready", lambda: self._load_tokenizer(node.info), node)
        try:
            await node.client.open(OPEN_TIMEOUT_S)
        except CorunError as error:
            self._lose(node, str(error))
            return
        node.is_open = True
        other = NodeRole.PREFILL if node.info.role is NodeRole.DECODE else NodeRole.DECODE
        node.lacks = f"not connected to a {other.value} node yet"
        for decode in by_id(self._decodes):
            for prefill in by_id(self._prefills):
                pair = decode.node_id, prefill.node_id
                if pair not in self._connecting and all(n.is_open and not n.is_gone for n in (decode, prefill)):
                    connecting = self._connect(decode, prefill)
                    self._connecting[pair] = spawn(connecting, f"connecting {pair[0]} to {pair[1]}")
        self._changed()

    async def _connect(self, decode: DecodeNode, prefill: PrefillNode) -> None:
        """Make the NIXL connection of a pair, before the pair gets its first sample."""
        peer = prefill.info.nixl
        assert peer is not None  # Registration has checked this.
        what = f"{decode.node_id} cannot connect to {prefill.node_id}"
        await _until_done(what, lambda: decode.client.connect(peer, CONNECT_TIMEOUT_S), decode, prefill)
        decode.peers.add(prefill.node_id)
        prefill.peers.add(decode.node_id)
        log.info("%s is connected to %s", decode.info.ref, prefill.info.ref)
        self._changed()

    async def _load_tokenizer(self, info: NodeInfo) -> None:
        """Load the tokenizer from a node's model directory. Any node will do, because all nodes have the same one."""
        contract = Contract.from_json(info.contract_json).model
        async with self._loading:
            if self.model is not None:
                return
            if contract.tokenizers != VERSION:
                reason = f"text may become other tokens here: install tokenizers=={contract.tokenizers} for the router"
                raise ContractMismatchError(reason, {"model.tokenizers": (contract.tokenizers, VERSION)})
            tokenizer = await asyncio.to_thread(Tokenizer.load, info.model)
            if tokenizer.digest != (expected := contract.tokenizer_digest):
                raise UnavailableError(f"the tokenizer in {info.model} is not the one of the contract, {expected}")
            self.model = Model(
                tokenizer=tokenizer,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                name=served_name(info.model),
                folder=info.model,
            )


def by_id(nodes: Mapping[str, M]) -> list[M]:
    """Return nodes sorted by id."""
    return [node for _, node in sorted(nodes.items())]


async def _until_done(what: str, attempt: Callable[[], Awaitable[None]], *nodes: Node[Any]) -> None:
    """Call `attempt` with growing delays until it succeeds or this task is cancelled. After each failed try, `nodes`
    lack it, in words that begin with `what`. They are logged when they differ from those before."""
    delay, said = FIRST_RETRY_S, ""
    while True:
        try:
            return await attempt()
        except CorunError as error:
            reason = f"{what}: {error}"
        for node in nodes:
            node.lacks = reason
        if reason != said:
            log.warning("%s", reason)
        said = reason
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_RETRY_S)


def spawn(work: Awaitable[None], what: str) -> asyncio.Future[None]:
    """Run `work` as a task, and log its unexpected exceptions."""

    def report(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", what, exc_info=error)

    task = asyncio.ensure_future(work)
    task.add_done_callback(report)
    return task
