"""Nodes as a router sees them, and a sample's claim on a pair of them, or a score's claim on one.

Owns: a node's state and its wording, and the bookkeeping of claims. This module must not know how nodes are found,
warmed or chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Generic, TypeVar

from corun.types import GONE_AS_PLANNED, Freedom, FreedomStatus, NodeInfo, NodeLoad, NodeRef, NodeState, NodeStatus
from router.nodes.node_client import DecodeClient, NodeClient, PrefillClient
from router.placement import (
    BEGINNING,
    PREFILLS_IN_FLIGHT,
    STEPS_IN_FLIGHT,
    DecodeRoom,
    Need,
    PrefillRoom,
    is_one_engine,
)

C = TypeVar("C", bound=NodeClient)


class Out(IntEnum):
    """Why a node takes no work. A later one outweighs an earlier one."""

    SUSPENDED = 1
    """It did not answer a call. It gets no new work before its next heartbeat."""
    STUCK = 2
    """It says that its engine does not work."""
    DRAINING = 3
    """It says that it is about to end."""
    LOST = 4
    """It was given up."""
    QUARANTINED = 5
    """It may have given wrong bits, so this generation is never used again."""


_STATES = {Out.DRAINING: NodeState.DRAINING, Out.LOST: NodeState.LOST, Out.QUARANTINED: NodeState.REFUSED}
_LEAVING = "takes no new work"
UNTOLD_STEP_TOKENS = 4096
"""The most prompt tokens of a step of a prefill node whose version does not say."""


class Node(Generic[C]):
    """One generation of one node, from its registration until it is lost."""

    room: DecodeRoom | PrefillRoom

    def __init__(self, info: NodeInfo, client: C, now: float) -> None:
        self.info = info
        self.client = client
        self.load = NodeLoad()
        self.heard_at = now
        """The time of the last registration or heartbeat, on the clock that stands still with the router
        (`router.clock`)."""
        self.out: tuple[Out, str] | None = None
        """Why the node takes no work, in words, although it may be prepared; None if it takes work."""
        self.is_open = False
        """Whether the node's own preparation is done. It may still need a connection to a node of the other role."""
        self.peers: set[str] = set()
        """The ids of the live nodes of the other role to which the node is connected."""
        self.lacks = "being prepared"
        """What the node needs while it has no peers, in words."""
        self.preparing: asyncio.Future[None] | None = None
        self.silence: asyncio.TimerHandle | None = None

    @property
    def node_id(self) -> str:
        return self.info.ref.node_id

    @property
    def takes_work(self) -> bool:
        return self.is_open and self.out is None

    @property
    def is_gone(self) -> bool:
        """Whether the node was given up, for whatever reason."""
        return self.out is not None and self.out[0] >= Out.LOST

    @property
    def is_leaving(self) -> bool:
        """Whether the node drains, or is gone, only because it was told to end."""
        return self.out in ((Out.DRAINING, _LEAVING), (Out.LOST, GONE_AS_PLANNED))

    @property
    def no_source(self) -> str:
        """Why nobody can read KV from the node any more; empty if its KV may be read."""
        if self.out is None or self.out[0] is Out.SUSPENDED or (self.is_leaving and not self.is_gone):
            return ""
        return self.out[1]

    @property
    def state(self) -> NodeState:
        if self.out is not None:
            return _STATES.get(self.out[0], NodeState.JOINING)
        return NodeState.READY if self.takes_work and self.peers else NodeState.JOINING

    @property
    def detail(self) -> str:
        """Why the node is not ready, or what it does not take although it is; empty if it takes all work."""
        if self.out is not None:
            return self.out[1]
        return self.limit if self.state is NodeState.READY else self.lacks

    @property
    def limit(self) -> str:
        """What a target of latency keeps from the node, in words; empty if it is nothing."""
        return ""

    def describe(self, info: NodeInfo) -> None:
        """Take what the node says of itself when it registers again: it may have lost a freedom, and nothing else."""
        self.info = replace(self.info, freedoms=info.freedoms, certificate=info.certificate)

    def put_out(self, why: Out, reason: str) -> None:
        """Give the node no work from now on. It does nothing if a weightier reason holds."""
        if self.out is None or why >= self.out[0]:
            self.out = why, reason

    def report(self, load: NodeLoad, *, draining: bool, stuck: str, now: float) -> None:
        """Take what a heartbeat says."""
        self.load = load
        self.heard_at = now
        # Before the new stream to a decode node opens, the load may include what an earlier session of this router held
        # there; the stream ends that.
        if self.is_open:
            self.room.report(load)
        if draining:
            self.out = Out.DRAINING, stuck or _LEAVING
        else:
            self.out = (Out.STUCK, stuck) if stuck else None

    def status(self, now: float) -> NodeStatus:
        return NodeStatus(
            node=self.info,
            load=self.load,
            state=self.state,
            detail=self.detail,
            last_heartbeat_ms=round(1000 * (now - self.heard_at)),
        )


class DecodeNode(Node[DecodeClient]):
    """A decode node and its room."""

    room: DecodeRoom

    def __init__(self, info: NodeInfo, client: DecodeClient, now: float) -> None:
        super().__init__(info, client, now)
        self.room = DecodeRoom(
            slots=info.slots, kv_blocks=info.kv_blocks, block_size=info.block_size, engine_id=info.engine_id
        )

    @property
    def limit(self) -> str:
        return "takes prompts only: first tokens would come later than the target" if self.room.prompts_only else ""

    @property
    def is_full(self) -> bool:
        """Whether all slots were in use at the last heartbeat, so that a started sample may wait in line for one."""
        return self.load.used_slots >= self.info.slots


class PrefillNode(Node[PrefillClient]):
    """A prefill node and its backlog."""

    room: PrefillRoom

    def __init__(self, info: NodeInfo, client: PrefillClient, now: float) -> None:
        super().__init__(info, client, now)
        self.room = PrefillRoom(max_in_flight=PREFILLS_IN_FLIGHT, engine_id=info.engine_id)
        self.describe(info)

    @property
    def limit(self) -> str:
        slow = "gets prompts last: its steps with prompts in them last longer than the target"
        return slow if self.room.is_slow else ""

    def report(self, load: NodeLoad, *, draining: bool, stuck: str, now: float) -> None:
        if load.tokens != self.load.tokens:
            self.client.computed_at = now
        super().report(load, draining=draining, stuck=stuck, now=now)

    def describe(self, info: NodeInfo) -> None:
        super().describe(info)
        packs, cuts = (FreedomStatus(name=one.value) in info.freedoms for one in (Freedom.PACKED, Freedom.CHUNKS))
        self.room.max_tokens = STEPS_IN_FLIGHT * (info.step_tokens or UNTOLD_STEP_TOKENS) if packs else 0
        # Where prompts may not be cut, the cache has whole chunks only: few prompts begin with equal ones.
        self.room.max_beginnings = info.kv_blocks * info.block_size // BEGINNING if cuts else 0


class PrefillPlacement:
    """A claim on room in the backlog of one prefill node, until it is given back: the whole claim of a score.

    The claim is only the router's own count. Giving it back twice does nothing.
    """

    def __init__(self, prefill: PrefillNode, need: Need, changed: Callable[[], None]) -> None:
        self.prefill = prefill
        self.is_prefilling = True
        """Whether it still counts in the prefill node's backlog."""
        self.need = need
        self._changed = changed
        prefill.room.take(need.num_prompt, need.kv_key)

    def leave(self, *, is_computed: bool = False) -> None:
        """Leave the prefill node's backlog. is_computed: the node has computed the KV."""
        if self._end_prefill(is_computed=is_computed):
            self._changed()

    def close(self) -> None:
        """Give back the whole claim."""
        self.leave()

    def _end_prefill(self, *, is_computed: bool = False) -> bool:
        was_prefilling, self.is_prefilling = self.is_prefilling, False
        if was_prefilling:
            need = self.need
            self.prefill.room.give(need.num_prompt, need.kv_key, is_computed=is_computed, beginnings=need.beginnings)
        return was_prefilling


class Placement(PrefillPlacement):
    """A sample's claim: also on a place and KV of one decode node, which confirms it with a lease. Giving a part back
    twice does nothing."""

    def __init__(self, decode: DecodeNode, prefill: PrefillNode, need: Need, changed: Callable[[], None]) -> None:
        super().__init__(prefill, need, changed)
        self.decode = decode
        self.holds_room = True
        self.cached_tokens = 0
        """The number of prompt tokens that the prefill node had in its prefix cache, once it has answered."""
        self._is_ending = False
        self._raised = decode.room.take(need)

    @property
    def refs(self) -> tuple[NodeRef, NodeRef]:
        return self.prefill.info.ref, self.decode.info.ref

    @property
    def is_one_engine(self) -> bool:
        """Whether one engine computes the prompt and runs the sample."""
        return is_one_engine(self.decode.room, self.prefill.room)

    def note_ending(self) -> None:
        """Note, once, that the sample ends soon (`router.placement.ENDING`)."""
        self._is_ending = True
        self.decode.room.note_ending()

    def refuse(self) -> None:
        """Give the claim back after the decode node had no room, and close the node's room estimate. This tells
        nobody, because the sample must queue again first."""
        self._end_prefill()
        if self.holds_room:
            self.holds_room = False
            self.decode.room.refuse(self.need, self._raised)

    def free(self) -> None:
        """Give the place and its KV back, because they are free again."""
        if self.holds_room:
            self.holds_room = False
            self.decode.room.give(self.need, was_ending=self._is_ending)
            self._changed()

    def close(self) -> None:
        """Give back the whole claim."""
        super().close()
        self.free()
