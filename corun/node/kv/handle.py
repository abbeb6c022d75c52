"""What nodes tell each other about a prompt's KV: a handle's binding, the owner's name of the blocks, readers' names.

Owns: the digest that a handle carries, the stamps that its blocks carry, which handoffs are checked bit by bit, and the
keys and marks of vLLM's parameters and messages. Must not know: where KV lies or how it moves.

Digest and stamps are not secret, and routers are trusted not to forge them. They make sure that a stale or mixed-up
reference, which would give another prompt's KV, cannot be taken for a valid one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from corun.types import KvHandle, NodeRef

OWNER_PARAM = "corun_owner"
"""The key in `kv_transfer_params` of both sides for the owner's name that the prompt's blocks carry, a uint64."""
CHECK_PARAM = "corun_check"
"""The key in a prefill's `kv_transfer_params` for whether the blocks get digests."""
READER = "/"
"""The mark between a prefill's id and a reader's id in the messages from decode nodes to prefill nodes."""
SEPARATORS = f"{READER}:,"
"""All marks that separate names in these messages, so no name may contain them. All but `READER` are vLLM's
(nixl/pull_worker.py)."""


def bound(handle: KvHandle) -> KvHandle:
    """Return `handle` with its binding."""
    return replace(handle, binding=binding(handle))


def binding(handle: KvHandle) -> str:
    """Return SHA-256 over a handle's request, both nodes' generations, engine, prompt digest, number of tokens and
    block ids; 64 hex digits."""
    names = (handle.request_id, handle.engine_id, handle.prompt_digest, handle.num_tokens)
    nodes = (_words(handle.prefill_node), _words(handle.reader))
    return hashlib.sha256(_bytes("corun.v1.kv_handle", *names, *nodes, handle.block_ids)).hexdigest()


def owner(request_id: str, prefill_node: NodeRef, prompt_digest: str) -> int:
    """Return the owner's name of a prompt's KV blocks, a uint64: block i of the prompt is stamped `owner + i` mod 2^64.

    It tells which prompt's KV the blocks hold, not which node reads it: several decode nodes may read it
    (`prefill_node.sharing`).
    """
    text = _bytes("corun.v1.kv_owner", request_id, _words(prefill_node), prompt_digest)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def owner_of(handle: KvHandle) -> int:
    """Return `owner` of the KV that a handle claims."""
    return owner(handle.request_id, handle.prefill_node, handle.prompt_digest)


def is_checked(request_id: str, fraction: float) -> bool:
    """Return whether this prefill is in the `fraction` whose KV is compared by digest. It depends on nothing else."""
    text = _bytes("corun.v1.kv_check", request_id)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") < fraction * 2**48


def read_id(request_id: str, claim: str) -> str:
    """Return a reader's own id of a prefill's KV. vLLM keeps a set of such ids for each peer and renews the leases of
    the KV that they name (nixl/base_scheduler.py), so two readers must have different ids. claim: empty if there is one
    reader only."""
    return f"{request_id}{READER}{claim}" if claim else request_id


def _words(ref: NodeRef) -> tuple[str, str]:
    return ref.node_id, ref.generation


def _bytes(*values: object) -> bytes:
    """Return an unambiguous encoding: equal bytes mean equal values."""
    return json.dumps(values, separators=(",", ":")).encode()
