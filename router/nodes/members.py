"""Nodes as a router sees them, and a sample's claim on a pair of them.

Owns: a node's state and its wording, and the bookkeeping of claims. This module must not know how nodes are found,
warmed or chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from corun.types import NodeInfo, NodeLoad, NodeRef, NodeRole, NodeState, NodeStatus, state_in_words
from router.nodes.node_client import DecodeClient, NodeClient, PrefillClient
from router.placement import PREFILLS_IN_FLIGHT, Need
from router.slots import DecodeRoom, PrefillRoom

C = TypeVar("C", bound=NodeClient)


class Member(Generic[C]):
    """One generation of one node, from its registration until it is lost."""

    def __init__(self, info: NodeInfo, client: C, now: float) -> None:
        self.info = info
        self.client = client
        self.load = NodeLoad()
        self.heartbeat_at = now
        self.heard_at = 0.0
        """The time of the last registration or heartbeat, on the clock that stands still with the router
        (`router.lag`)."""
        self.draining = False
        self.is_open = False
        """Whether the node's own preparation is done. It may still need a connection to a node of the other role."""
        self.is_warm = False
        """Whether the node has a connection to a live node of the other role."""
        self.lost = ""
        """Why the node was given up; empty if it was not."""
        self.quarantined = ""
        """Why this generation is never used again; empty if it may be used."""
        self.suspended = ""
        """Why the node gets no new work before its next heartbeat; empty if it may get work."""
        self.stuck = ""
        """Why the node says that it takes no work at all now; empty if it takes work."""
        self.trouble = "being prepared"
        """The reason why the node is not ready yet, shown if there is no other reason."""
        self.silence: asyncio.TimerHandle | None = None

    @property
    def node_id(self) -> str:
        return self.info.ref.node_id

    @property
    def takes_work(self) -> bool:
        out = self.lost or self.quarantined or self.suspended or self.stuck or self.draining
        return self.is_open and not out

    @property
    def was_to_end(self) -> bool:
        """Whether the node drains only because it was told to end."""
        return self.draining and not (self.stuck or self.quarantined)

    @property
    def state(self) -> NodeState:
        if self.quarantined:
            return NodeState.REFUSED
        if self.lost:
            return NodeState.LOST
        if self.draining:
            return NodeState.DRAINING
        return NodeState.READY if self.takes_work and self.is_warm else NodeState.JOINING

    @property
    def detail(self) -> str:
        if self.state is NodeState.READY:
            return ""
        out = self.quarantined or self.lost or self.stuck or ("takes no new work" if self.draining else "")
        return out or self.suspended or self.trouble

    def report(self, load: NodeLoad, *, draining: bool, stuck: str, now: float) -> None:
        self.load = load
        self.draining = draining
        self.stuck = stuck
        self.suspended = ""
        self.heartbeat_at = now

    def status(self, now: float) -> NodeStatus:
        return NodeStatus(
            node=self.info,
            load=self.load,
            state=self.state,
            detail=self.detail,
            last_heartbeat_ms=round(1000 * (now - self.heartbeat_at)),
        )


class DecodeMember(Member[DecodeClient]):
    """A decode node and its room."""

    def __init__(self, info: NodeInfo, client: DecodeClient, now: float) -> None:
        super().__init__(info, client, now)
        self.room = DecodeRoom(slots=info.slots, kv_blocks=info.kv_blocks, block_size=info.block_size)

    def report(self, load: NodeLoad, *, draining: bool, stuck: str, now: float) -> None:
        super().report(load, draining=draining, stuck=stuck, now=now)
        # Before the new stream opens, the load may include what an earlier session of this router held; the stream ends
        # that.
        if self.is_open:
            self.room.report(load)


class PrefillMember(Member[PrefillClient]):
    """A prefill node and its backlog."""

    def __init__(self, info: NodeInfo, client: PrefillClient, now: float) -> None:
        super().__init__(info, client, now)
        self.room = PrefillRoom(max_in_flight=PREFILLS_IN_FLIGHT)

    def report(self, load: NodeLoad, *, draining: bool, stuck: str, now: float) -> None:
        super().report(load, draining=draining, stuck=stuck, now=now)
        self.room.report(load)


class Seat:
    """A sample's claim on a slot of one decode node and on a turn at one prefill node, until each is given back.

    The claim is only the router's own count; the decode node confirms it with a lease. Giving a part back twice does
    nothing.
    """

    def __init__(self, decode: DecodeMember, prefill: PrefillMember, need: Need, changed: Callable[[], None]) -> None:
        self.decode = decode
        self.prefill = prefill
        self._need = need
        self._changed = changed
        self._holds_slot = True
        self._holds_turn = True
        self._raised = decode.room.take(need.total)
        prefill.room.take(need.num_prompt, need.kv_key)

    @property
    def refs(self) -> tuple[NodeRef, NodeRef]:
        return self.prefill.info.ref, self.decode.info.ref

    @property
    def holds_slot(self) -> bool:
        return self._holds_slot

    @property
    def is_prefilling(self) -> bool:
        return self._holds_turn

    def prefilled(self) -> None:
        """Give the prefill turn back, because the prefill node has computed the KV."""
        self.leave(is_computed=True)

    def leave(self, *, is_computed: bool = False) -> None:
        """Give the prefill turn back, whatever the result of the prefill."""
        if self._end_turn(is_computed=is_computed):
            self._changed()

    def refuse(self) -> None:
        """Give the claim back after the decode node had no room, and close the node's room estimate. This notifies no
        listener, because the sample must queue again first."""
        self._end_turn()
        if self._holds_slot:
            self._holds_slot = False
            self.decode.room.refuse(self._need.total, self._raised)

    def free(self) -> None:
        """Give the slot back, because it is free again."""
        if self._holds_slot:
            self._holds_slot = False
            self.decode.room.give(self._need.total)
            self._changed()

    def close(self) -> None:
        """Give back the whole claim."""
        self.leave()
        self.free()

    def _end_turn(self, *, is_computed: bool = False) -> bool:
        held, self._holds_turn = self._holds_turn, False
        if held:
            self.prefill.room.give(self._need.num_prompt, self._need.kv_key, is_computed=is_computed)
        return held


def gap(role: NodeRole, members: Collection[Member[Any]], *, why: bool) -> str:
    """Return why no node of a role can be used; empty if one can. why: include the nodes' details."""
    if not members:
        return f"no {role.value} node has joined"
    if any(member.takes_work for member in members):
        return ""
    return f"no {role.value} node is in use ({explain(members, why=why)})"


def explain(members: Iterable[Member[Any]], *, why: bool) -> str:
    """Return the states of nodes in words. why: include the nodes' details."""
    return "; ".join(
        f"{member.node_id} is {state_in_words(member.state, member.detail if why else '')}" for member in members
    )
