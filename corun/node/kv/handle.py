"""The binding of a KV handle: which prompt's KV it names, on which generation of which node, for which reader.

Owns: the digest that a handle carries, the stamps that its blocks carry, and which handoffs are checked bit by bit.
Must not know: where KV lies or how it moves.

Digest and stamps are not secret, and routers are trusted not to forge them. They make sure that a stale or mixed-up
reference, which would give another prompt's KV, cannot be taken for a valid one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from corun.types import KvHandle, NodeRef

_BINDING_TAG = "corun.v1.kv_handle"
_OWNER_TAG = "corun.v1.kv_owner"
_CHECK_TAG = "corun.v1.kv_check"


def bound(handle: KvHandle) -> KvHandle:
    """Return `handle` with its binding."""
    return replace(handle, binding=binding(handle))


def binding(handle: KvHandle) -> str:
    """Return SHA-256 over a handle's request, both nodes' generations, engine, prompt digest, number of tokens and
    block ids; 64 hex digits."""
    names = (handle.request_id, handle.engine_id, handle.prompt_digest, handle.num_tokens)
    nodes = (_words(handle.prefill_node), _words(handle.reader))
    return hashlib.sha256(_bytes(_BINDING_TAG, *names, *nodes, handle.block_ids)).hexdigest()


def owner(request_id: str, prefill_node: NodeRef, prompt_digest: str) -> int:
    """Return the owner's name of a prompt's KV blocks, a uint64: block i of the prompt is stamped `owner + i` mod 2^64.

    It tells which prompt's KV the blocks hold, not which node reads it: several decode nodes may read it
    (`prefill_node.sharing`).
    """
    text = _bytes(_OWNER_TAG, request_id, _words(prefill_node), prompt_digest)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def owner_of(handle: KvHandle) -> int:
    """Return `owner` of the KV that a handle claims."""
    return owner(handle.request_id, handle.prefill_node, handle.prompt_digest)


def is_checked(request_id: str, fraction: float) -> bool:
    """Return whether this prefill is in the `fraction` whose KV is compared by digest. It depends on nothing else."""
    text = _bytes(_CHECK_TAG, request_id)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") < fraction * 2**48


def _words(ref: NodeRef) -> tuple[str, str]:
    return ref.node_id, ref.generation


def _bytes(*values: object) -> bytes:
    """Return an unambiguous encoding: equal bytes mean equal values."""
    return json.dumps(values, separators=(",", ":")).encode()
