"""What a router tells people of its cluster, and who may know what: nodes, the samples in their slots, clients.

A client is told of itself and of the nodes that serve it; an operator, of all. A sample's place in the slots is chosen
when somebody looks, and kept on its lease, so samples that nobody watches cost nothing. This module must not know gRPC,
nor who is served next.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath

from corun.contract import Contract
from corun.errors import InvalidArgumentError
from corun.rpc.auth import Caller
from corun.types import ClientStatus, ClusterStatus, NodeInfo, NodeStatus, SlotSamples
from router.clock import loop_time
from router.nodes.node import DecodeNode
from router.nodes.node_client import RemoteLease
from router.queue import SampleQueue

HIDDEN = "(hidden)"
FOR_OPERATORS = "only an operator's token shows why"


def for_client(status: ClusterStatus) -> ClusterStatus:
    """Return the status as a client that is no operator sees it: the nodes that serve it, and how busy they are.

    Why a node is not in use and which sample differed are left out, because both may name another client's request. So
    are the locations of models and nodes, and the values of environment variables.
    """
    audit = status.audit
    nodes = (
        replace(each, node=_node_for_client(each.node), detail=FOR_OPERATORS if each.detail else "")
        for each in status.nodes
    )
    return replace(
        status,
        nodes=tuple(nodes),
        audit=replace(audit, last_mismatch=FOR_OPERATORS if audit.last_mismatch else ""),
    )


def _node_for_client(node: NodeInfo) -> NodeInfo:
    model = PurePath(node.model).name if PurePath(node.model).is_absolute() else node.model
    finding = HIDDEN if node.finding else ""
    freedoms = tuple(replace(one, refused=HIDDEN if one.refused else "") for one in node.freedoms)
    contract = _contract_for_client(node.contract_json)
    told = replace(node, model=model, finding=finding, contract_json=contract, freedoms=freedoms)
    return replace(told, address="", nixl=None, engine_id="")


@functools.lru_cache(maxsize=64)  # Nodes of one role have the same one, and it takes 0.2 ms or more.
def _contract_for_client(contract_json: str) -> str:
    """Return a contract without the values of its variables, so that its hash differs from the real one; empty if it
    cannot be read."""
    with suppress(InvalidArgumentError):
        known = Contract.from_json(contract_json)
        environment = tuple(f"{name.partition('=')[0]}={HIDDEN}" for name in known.model.environment)
        return replace(known, model=replace(known.model, environment=environment)).canonical_json()
    return ""


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


def clients_of(queue: SampleQueue, nodes: Collection[DecodeNode], viewer: Caller) -> tuple[ClientStatus, ...]:
    """Return the clients that have samples here, by name. The router's own samples, as audits, are nobody's."""
    callers, waiting, leased, decoding = dict[str, Caller](), Counter[str](), Counter[str](), Counter[str]()
    for caller in queue.callers():
        callers[caller.name] = caller
        waiting[caller.name] += 1
    for lease in (lease for node in nodes for lease in node.client.leases):
        task, _ = lease.sample
        caller = task.caller
        callers[caller.name] = caller
        leased[caller.name] += 1
        decoding[caller.name] += lease.first_row_at is not None
    return tuple(
        ClientStatus(
            name=name,
            weight=callers[name].weight,
            waiting_samples=waiting[name],
            leased_samples=leased[name],
            decoding_samples=decoding[name],
        )
        for name in sorted(callers)
        if name and (viewer.is_operator or name == viewer.name)
    )
