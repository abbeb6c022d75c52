"""What each client has of the cluster, for people: the samples that wait in this router's queue, and those on nodes.

A client is told of itself; an operator, of all. This module must not know gRPC, nor who is served next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from corun.rpc.auth import Caller
from corun.types import ClientStatus
from router.nodes.node import DecodeNode
from router.queue import SampleQueue


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
