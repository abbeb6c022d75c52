"""The registry of the nodes: which nodes there are, and whether they may be used.

Owns: registration, heartbeats, loss, and choosing a pair of nodes for a sample. Which nodes may join is known in
`admission`, and how a node becomes ready in `preparation`. This module must not know queues or samples: its user is
told of changes (`Registry.on_change`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from corun.config.fields import RouterConfig
from corun.errors import (
    CancelledByPeerError,
    CorunError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    StaleGenerationError,
    UnavailableError,
)
from corun.rpc.channel import OPEN, Access
from corun.types import (
    GONE_AS_PLANNED,
    Freedom,
    FreedomStatus,
    NodeInfo,
    NodeLoad,
    NodeRef,
    NodeRole,
    NodeStatus,
    state_in_words,
)
from router.clock import AwakeClock, loop_time
from router.nodes import admission
from router.nodes.admission import Admission, ClusterContract, check_info
from router.nodes.node import DecodeNode, Node, Out, Placement, PrefillNode, PrefillPlacement
from router.nodes.node_client import DecodeClient, PrefillClient
from router.nodes.preparation import Preparation, by_id, spawn
from router.placement import DecodeRoom, Need, PrefillRoom, choose_idle_pair, choose_pair, choose_prefill
from router.prompts import Model

log = logging.getLogger(__name__)


class Registry:
    """The nodes of one router.

    router_id: the id of this process. No other process may have it, because decode nodes take routers with one id for
        the same router.
    """

    def __init__(self, config: RouterConfig, router_id: str, access: Access = OPEN) -> None:
        self.contract = ClusterContract(config.expected_fingerprint)
        self.mismatches = 0
        """The number of samples whose repeated run gave other bits, audits included, since the router started."""
        self.clock = AwakeClock()
        """The clock that measures how long nodes are silent."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change that may let a sample start."""
        self._config = config
        self._router_id = router_id
        self._access = access
        self._tells_why = not config.client_tokens_file
        """Whether errors say why a node is not in use. The reason may name other clients' requests, so it is left out
        if clients have tokens. Statuses always say why."""
        self._decodes: dict[str, DecodeNode] = {}
        self._prefills: dict[str, PrefillNode] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._watchers: list[Callable[[PrefillPlacement | None], None]] = []
        self._admission = Admission(self.contract, self.clock)
        self._found: _Usable | None = None  # None after a change of a node, until somebody asks.
        self._preparation = Preparation(self._decodes, self._prefills, self.lose, self._nodes_changed)
        self._waiting: set[asyncio.Future[None]] = set()  # One for each waiter, which a change of the registry wakes.
        self._unready: set[asyncio.Future[None]] = set()  # The same, but they are woken when a pair of nodes is ready.

    @property
    def model(self) -> Model | None:
        """The cluster's model; None until a tokenizer has been loaded."""
        return self._preparation.model

    def watch(self, watcher: Callable[[PrefillPlacement | None], None]) -> None:
        """Call `watcher` with every placement that `place` gives, and with None for what waits for room."""
        self._watchers.append(watcher)

    def register(self, info: NodeInfo) -> None:
        """Add a node, or refresh it and what it says of its freedoms. A new generation replaces the old one at once.

        Raises:
            InvalidArgumentError: the node's own description is not complete.
            ContractMismatchError: its contract differs from the cluster's; the error names the fields.
            UnavailableError: it failed its self-test, or its contract waits for that of another node.
            StaleGenerationError: this generation was replaced before.
            DataLossError: this generation may have given wrong bits.
            OverloadedError: the router already knows the most nodes that it may know.
        """
        check_info(info)
        everyone = self._decodes.keys() | self._prefills.keys() | self._admission.refusals().keys()
        if info.ref.node_id not in everyone and len(everyone) >= admission.MAX_NODES:
            text = f"{len(everyone)} nodes are known here, as many as may be"
            raise OverloadedError(text, admission.FORGET_AFTER_S)
        known = self._node(info.ref.node_id)
        self._admission.check_generation(info, known.info.ref.generation if known else "")
        if known is not None and known.info.ref == info.ref and not known.is_gone:
            known.heard_at = self.clock.time()
            known.describe(info)
            return
        if known is not None:
            self._replace(known, info.ref)
        try:
            self._admission.admit(info)
        finally:
            if info.finding:  # It is of the engine, whichever side tells it.
                for side in self._of_engine(info):
                    self.lose(side, f"its engine failed its self-test: {info.finding}")
        self._add(info)

    def heartbeat(self, ref: NodeRef, load: NodeLoad, *, draining: bool, stuck: str = "") -> None:
        """Keep a node in use, unless the node reports that it drains or is stuck.

        Raises:
            NotFoundError: the node has to register (again).
            DataLossError: this generation may have given wrong bits.
        """
        self._admission.check_trusted(ref)
        node = self._node(ref.node_id)
        if node is None or node.info.ref != ref or node.is_gone:
            raise NotFoundError(f"node {ref} is not registered here")
        stuck = stuck[: admission.MAX_TEXT_LENGTH]
        if stuck and stuck != node.detail:
            log.warning("node %s takes no work: %s", ref, stuck)
        node.report(load, draining=draining, stuck=stuck, now=self.clock.time())
        self._nodes_changed()

    def lose(self, node: Node[Any], reason: str) -> None:
        """Give a node up, and the other side of a colocated node with it, because they are one process. Its calls end,
        its leases fail, and its pairs are forgotten. It may register again."""
        if node.is_gone:
            return
        if node.is_leaving:
            reason = GONE_AS_PLANNED
            log.info("node %s is %s", node.info.ref, reason)
        else:
            log.warning("node %s is lost: %s", node.info.ref, reason)
        others = [side for side in self._of_engine(node.info) if not side.is_gone]
        self._give_up((node, *others), Out.LOST, reason)

    def quarantine(self, refs: Iterable[NodeRef], sample: str) -> None:
        """Quarantine the nodes of two runs of `sample` that gave different bits, both sides of colocated ones. None of
        them is used again before it has restarted and so tested itself. A node that has restarted since stays in use.
        If one of the generations that ran is in quarantine already, even if its node has restarted since, it explains
        this difference too, and the others stay in use."""
        self.mismatches += 1
        suspects = tuple(dict.fromkeys(refs))
        reason = f"gave other bits for {sample}"
        ran = [node for ref in suspects if (node := self._node(ref.node_id)) and node.info.ref == ref]
        nodes = list(dict.fromkeys(side for node in ran for side in (node, *self._of_engine(node.info))))
        if self._admission.quarantine(dict.fromkeys((*suspects, *(node.info.ref for node in nodes))), reason):
            self._give_up(nodes, Out.QUARANTINED, reason)

    def note_fault(self, node: Node[Any], error: CorunError) -> None:
        """Note that a call to a node failed. A node that did not answer gets no new work before its next heartbeat. A
        node that was replaced is lost. A node that answered with an error of its own stays in use."""
        if node.is_gone:
            return
        if isinstance(error, StaleGenerationError):
            self.lose(node, str(error))
        elif isinstance(error, (UnavailableError, DeadlineError, CancelledByPeerError)):
            node.put_out(Out.SUSPENDED, str(error))
            self._nodes_changed()

    def place(self, need: Need) -> PrefillPlacement | None:
        """Claim a pair of nodes for a sample now, or a prefill node for a score. Return None if it has to wait."""
        if need.is_score:
            name = choose_prefill(need, self._usable().prefill_rooms)
            placement = None if name is None else PrefillPlacement(self._prefills[name], need, self.changed)
        else:
            placement = self._claim(choose_pair(need, *self._rooms(), self._is_warm), need)
        # If no node in use could hold the sample, no room that becomes free would be enough.
        if placement is not None or need.total <= self.most_tokens():
            for watcher in self._watchers:
                watcher(placement)
        return placement

    def has_slot(self, need: Need) -> bool:
        """Return whether `place` would claim a pair now, with a slot that no other sample will take."""
        pair = choose_pair(need, *self._rooms(), self._is_warm)
        return pair is not None and self._decodes[pair[0]].room.free_slots > 0

    def place_idle(self, need: Need, spare_slots: int) -> Placement | None:
        """Claim an idle pair, away from the nodes of `need.avoid` if possible. Return None if there is none."""
        return self._claim(choose_idle_pair(need, *self._rooms(), self._is_warm, spare_slots), need)

    def scores_equal_generation(self, node: PrefillNode) -> bool:
        """Return whether certificates show that what this node scores has the bits of what is drawn: those of its own
        engine, and of the engines of all decode nodes, since any of them may draw."""
        held = FreedomStatus(name=Freedom.SCORES.value)
        engines = {each.info.engine_id for each in self._nodes() if held in each.info.freedoms}
        needed = {node.info.engine_id, *(each.info.engine_id for each in self._decodes.values() if not each.is_gone)}
        return needed <= engines - {""}

    def most_tokens(self) -> int:
        """Return the tokens of the largest sample that fits on some decode node in use when that node is empty; 0 if no
        decode node is in use."""
        return self._usable().most_tokens

    def awaited(self, num_tokens: int) -> str:
        """Return in words which decode nodes could hold a sample but cannot be used now, and why; empty if there are
        none. Lost and draining nodes are left out, because they may never come back."""
        used = set(self._usable().connected)
        unused = (node for node in by_id(self._decodes) if node not in used)
        stay = [node for node in unused if node.out is None or node.out[0] < Out.DRAINING]
        return self._explain(node for node in stay if node.room.could_hold(num_tokens))

    def could_hold(self, num_tokens: int) -> bool:
        """Return whether some decode node may have room for a sample, now or later."""
        return num_tokens <= self.most_tokens() or bool(self.awaited(num_tokens))

    def in_use(self) -> tuple[list[DecodeNode], list[PrefillNode]]:
        """Return the decode nodes that can be used now together with some prefill node, and the prefill nodes that take
        work, sorted by id."""
        usable = self._usable()
        return list(usable.connected), list(usable.prefills)

    def decode_nodes(self) -> tuple[NodeInfo, ...]:
        """Return the decode nodes that take work, sorted by id."""
        return tuple(node.info for node in self._usable().decodes)

    def missing(self) -> str:
        """Return in words what is missing before any sample can start; empty if nothing is missing."""
        usable = self._usable()
        if usable.connected:
            return ""
        gaps = []
        found: tuple[tuple[NodeRole, Mapping[str, Node[Any]], Sequence[Node[Any]]], ...]
        found = (
            (NodeRole.PREFILL, self._prefills, usable.prefills),
            (NodeRole.DECODE, self._decodes, usable.decodes),
        )
        for role, nodes, in_use in found:
            if not nodes:
                gaps.append(f"no {role.value} node has joined")
            elif not in_use:
                gaps.append(f"no {role.value} node is in use ({self._explain(nodes.values())})")
        if gaps:
            return "; ".join(gaps)
        return f"no decode node is connected to a prefill node yet ({self._explain(usable.decodes)})"

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until a condition holds. Return False if it does not by `deadline`, on the loop's clock. The condition
        must only change when the registry does."""
        return await self._until(condition, deadline, self._waiting)

    async def _until(self, condition: Callable[[], bool], deadline: float, waiting: set[asyncio.Future[None]]) -> bool:
        """Do what `until` does, among those who are woken together."""
        while not condition():
            if (left := deadline - loop_time()) <= 0:
                return False
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.add(change)
            try:
                await asyncio.wait((change,), timeout=left)
            finally:
                waiting.discard(change)
        return True

    async def wait_ready(self, deadline: float) -> Model:
        """Wait until a pair of nodes is ready, and return the model. Raises UnavailableError at `deadline`, on the
        loop's clock."""
        if not await self._until(self._is_ready, deadline, self._unready):
            raise UnavailableError(self.missing() or "no tokenizer could be loaded")
        assert self.model is not None
        return self.model

    @property
    def decodes(self) -> Mapping[str, DecodeNode]:
        """The live decode nodes, by id."""
        return self._decodes

    def statuses(self) -> tuple[NodeStatus, ...]:
        """Return the status of every node, sorted by id: prefill nodes, then decode nodes, then refused nodes."""
        now = self.clock.time()
        refused = [found for _, found in sorted(self._admission.refusals().items())]
        silent = (replace(status, last_heartbeat_ms=round(1000 * (now - at))) for status, at in refused)
        return (*(node.status(now) for node in self._nodes()), *silent)

    async def close(self) -> None:
        """Give every node up, after everything held there has been given back."""
        await asyncio.gather(*(node.client.close() for node in self._nodes() if not node.is_gone))
        self._give_up([node for node in self._nodes() if not node.is_gone], Out.LOST, "the router is closing")
        if self._closing:
            await asyncio.wait(set(self._closing))
        self.clock.stop()

    def changed(self) -> None:
        """Tell all who wait, and who uses the registry, that a sample may be able to start now. Requests may wait by
        the thousand for nodes while others end, so they hear nothing before there are some."""
        for waiting in (self._waiting, self._unready) if self._unready and self._is_ready() else (self._waiting,):
            for change in waiting:
                change.set_result(None)
            waiting.clear()
        self.on_change()

    def _nodes_changed(self) -> None:
        """Look at the nodes again, because some may be used now or not any more, and tell all."""
        self._found = None
        self.changed()

    def _give_up(self, nodes: Collection[Node[Any]], why: Out, reason: str) -> None:
        """Use these nodes no more. All are marked first, so that samples lost here do not go to another of them."""
        in_use = [node for node in nodes if not node.is_gone]
        for node in nodes:
            node.put_out(why, reason)
        self._found = None
        for node in in_use:
            self._drop(node, reason)

    def _drop(self, node: Node[Any], reason: str) -> None:
        if node.silence is not None:
            node.silence.cancel()
        self._preparation.stop(node)
        for other in self._nodes():
            other.peers.discard(node.node_id)
        node.client.drop(reason)
        task = spawn(node.client.close(), f"closing the channel to {node.info.ref}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        asyncio.get_running_loop().call_later(admission.FORGET_AFTER_S, self._forget, node)
        self._nodes_changed()

    def _is_ready(self) -> bool:
        return self.model is not None and bool(self._usable().connected)

    def _usable(self) -> _Usable:
        if self._found is None:
            self._found = _Usable.of(self._decodes, self._prefills)
        return self._found

    def _rooms(self) -> tuple[Mapping[str, DecodeRoom], Mapping[str, PrefillRoom]]:
        usable = self._usable()
        return usable.decode_rooms, usable.prefill_rooms

    def _is_warm(self, decode_id: str, prefill_id: str) -> bool:
        return prefill_id in self._decodes[decode_id].peers

    def _explain(self, nodes: Iterable[Node[Any]]) -> str:
        """Return the states of nodes in words."""
        details = ((node, node.detail if self._tells_why else "") for node in nodes)
        return "; ".join(f"{node.node_id} is {state_in_words(node.state, detail)}" for node, detail in details)

    def _claim(self, pair: tuple[str, str] | None, need: Need) -> Placement | None:
        return Placement(self._decodes[pair[0]], self._prefills[pair[1]], need, self.changed) if pair else None

    def _nodes(self) -> list[Node[Any]]:
        return [*by_id(self._prefills), *by_id(self._decodes)]

    def _of_engine(self, info: NodeInfo) -> list[Node[Any]]:
        """Return the other nodes with the engine of this one: the other side of a colocated node."""
        others = [node for node in self._nodes() if node.info.ref != info.ref]
        return [node for node in others if info.engine_id and node.info.engine_id == info.engine_id]

    def _node(self, node_id: str) -> Node[Any] | None:
        return self._decodes.get(node_id) or self._prefills.get(node_id)

    def _replace(self, known: Node[Any], ref: NodeRef) -> None:
        if known.info.ref != ref:
            self._admission.replace(known.info.ref)
            self.lose(known, f"generation {ref.generation} replaced it")
        self._forget(known)

    def _add(self, info: NodeInfo) -> None:
        node: Node[Any]
        now = self.clock.time()
        if info.role is NodeRole.DECODE:
            decode = DecodeClient(
                info, self._router_id, lambda reason: self.lose(node, reason), self.clock, self._access
            )
            node = self._decodes[info.ref.node_id] = DecodeNode(info, decode, now)
        else:
            prefill = PrefillClient(info, self.clock, self._access)
            node = self._prefills[info.ref.node_id] = PrefillNode(info, prefill, now)
        log.info("node %s has joined as %s at %s", info.ref, info.role.value, info.address)
        self._expect_heartbeat(node)
        self._preparation.start(node)

    def _expect_heartbeat(self, node: Node[Any]) -> None:
        """Lose a node if it has been silent for too long. Otherwise check again when that may first be so."""
        timeout_s = self._config.heartbeat_timeout_ms / 1000
        left = node.heard_at + timeout_s - self.clock.time()
        if left <= 0:
            self.lose(node, f"no heartbeat for {timeout_s:g} s")
        else:
            node.silence = asyncio.get_running_loop().call_later(left, self._expect_heartbeat, node)

    def _forget(self, node: Node[Any]) -> None:
        if self._decodes.get(node.node_id) is node:
            del self._decodes[node.node_id]
        if self._prefills.get(node.node_id) is node:
            del self._prefills[node.node_id]


class _Usable(NamedTuple):
    """The nodes that take work, sorted by id. Placing one sample asks for them several times."""

    decodes: list[DecodeNode]
    prefills: list[PrefillNode]
    connected: list[DecodeNode]
    """The decode nodes that can be used now together with some prefill node."""
    most_tokens: int
    """The tokens of the largest sample that fits on one of these when it is empty; 0 without any."""
    decode_rooms: dict[str, DecodeRoom]
    prefill_rooms: dict[str, PrefillRoom]

    @classmethod
    def of(cls, decodes: Mapping[str, DecodeNode], prefills: Mapping[str, PrefillNode]) -> _Usable:
        decoding = [node for node in by_id(decodes) if node.takes_work]
        prefilling = [node for node in by_id(prefills) if node.takes_work]
        prefill_rooms = {node.node_id: node.room for node in prefilling}
        connected = [node for node in decoding if not node.peers.isdisjoint(prefill_rooms)]
        return cls(
            decodes=decoding,
            prefills=prefilling,
            connected=connected,
            most_tokens=max((node.room.most_tokens for node in connected), default=0),
            decode_rooms={node.node_id: node.room for node in decoding},
            prefill_rooms=prefill_rooms,
        )
