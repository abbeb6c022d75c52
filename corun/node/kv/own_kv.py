"""Samples of a colocated node that take the KV of their own engine's prompts: copied, not read over NIXL.

Owns: which of a step's orders concern this engine itself, and the copy with its check. Must not know: what follows from
a verdict, readers, leases.

A copy is queued behind the steps that computed the prompts and before the one that needs it. Owners change only before
a step's copies, so they are checked as of now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corun.node.kv.digest import copy_blocks
from corun.node.kv.handle import names_in
from corun.node.kv.judging import Claim, Verdict, compare
from corun.node.kv.stamps import Rows, StampTable


def copy(
    claims: Sequence[Claim], regions: Sequence[Any], table: StampTable, digests: Callable[[Sequence[int]], Rows]
) -> list[Verdict]:
    """Copy prompts' blocks to their samples', in all regions (`corun.node.kv.digest`), and check them.

    All are copied by the same launches: there are two for each layer, so with one sample after the other a step that
    begins dozens of them would wait for the launches.
    """
    found: list[tuple[Claim, Rows | str]] = []
    theirs: list[int] = []
    ours: list[int] = []
    for claim in claims:
        if len(claim.theirs) != len(claim.ours) or max(claim.theirs) >= len(table.rows):
            found.append((claim, f"blocks {claim.theirs} were offered for {claim.ours}"))
        else:
            theirs.extend(claim.theirs)
            ours.extend(claim.ours)
            found.append((claim, table.rows[list(claim.theirs)]))
    if ours:
        copy_blocks(regions, theirs, ours)
    return compare(found, digests)


def take_reads(meta: Any, engine_id: str) -> dict[str, Any]:
    """Take the reads from this engine out of a step's orders, since vLLM would connect to itself; by request id."""
    own = {name: read for name, read in meta.reqs_to_recv.items() if read.remote.engine_id == engine_id}
    for name in own:
        del meta.reqs_to_recv[name]
    return own


def take_heartbeat(meta: Any, engine_id: str) -> str:
    """Take the heartbeat to this engine out of a step's orders. Return the prompts whose leases it renews, as vLLM
    writes them; empty if there is none."""
    own = meta.heartbeat_by_engine.get(engine_id)
    if own is None:
        return ""
    meta.heartbeat_by_engine = {name: beat for name, beat in meta.heartbeat_by_engine.items() if name != engine_id}
    return ",".join(names_in(name)[0] for name in own.req_ids)
