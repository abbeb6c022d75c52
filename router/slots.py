"""What the slots of decode nodes do, for people: which sample is where, how far it is, and who may know it.

A sample's place is chosen when somebody looks, and kept on its lease, so samples that nobody watches cost nothing. A
client is told what it asked for itself; an operator, all. This module must not know gRPC.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from corun.rpc.auth import Caller
from corun.types import NodeStatus, SlotSamples
from router.clock import loop_time
from router.nodes.node import DecodeNode
from router.nodes.node_client import RemoteLease


def with_samples(
    statuses: Sequence[NodeStatus], nodes: Mapping[str, DecodeNode], viewer: Caller
) -> tuple[NodeStatus, ...]:
    """Return the statuses with the samples of every decode node that is in use."""
    now = loop_time()
    found = []
    for status in statuses:
        node = nodes.get(status.node.ref.node_id)
        shown = node is not None and node.info.ref == status.node.ref and not node.is_gone
        found.append(replace(status, samples=samples_of(node, viewer, now)) if node and shown else status)
    return tuple(found)


def samples_of(node: DecodeNode, viewer: Caller, now: float) -> SlotSamples:
    """Return the samples of one node as the viewer may see them. Nobody is told a prompt or an output."""
    leases = list(node.client.leases)
    place(leases, node.info.slots)
    rows = []
    for index, lease in enumerate(leases):
        task, output = lease.sample
        if viewer.is_operator or task.caller.name == viewer.name:
            known = task.request_id, task.index, task.seed, output.position, task.params.max_tokens
            rows.append((index, *known))
    told, request_ids, indices, seeds, num_tokens, max_tokens = zip(*rows, strict=True) if rows else ((),) * 6
    return SlotSamples(
        places=tuple([lease.place or 0 for lease in leases]),
        decoding=tuple([lease.first_row_at is not None for lease in leases]),
        ages_ms=tuple([max(0, int(1000 * (now - lease.granted_at))) for lease in leases]),
        others=node.room.foreign_leases,
        told=told,
        request_ids=request_ids,
        sample_indices=indices,
        seeds=seeds,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    )


def place(leases: Collection[RemoteLease], slots: int) -> None:
    """Give each lease without a place the lowest that is free. A sample that decodes has one of the slots: if it was in
    line, it changes places with nobody, or with one that does not decode yet."""
    held = {lease.place: lease for lease in leases if lease.place is not None}
    free = 0
    for lease in leases:
        if lease.place is None:
            while free in held:
                free += 1
            lease.place = free
            held[free] = lease
    late = [lease for lease in leases if lease.first_row_at is not None and (lease.place or 0) >= slots]
    for lease in late:
        ready = (number for number in range(slots) if number not in held or held[number].first_row_at is None)
        number, left = next(ready, None), lease.place
        if number is None or left is None:
            continue  # The node has more samples than it said that it has slots for.
        other = held.pop(number, None)
        del held[left]
        held[number], lease.place = lease, number
        if other is not None:
            held[left], other.place = other, left
