"""What nodes tell each other about a prompt's KV: a handle's binding, the owners' names of the blocks, readers' names.

Owns: the digest that a handle carries, the names that stamps are made of, which handoffs are checked bit by bit, and
the keys and marks of vLLM's parameters and messages. Must not know: where KV lies or how it moves.

Digest and stamps are not secret, and routers are trusted not to forge them. They make sure that a stale or mixed-up
reference, which would give another prompt's KV, cannot be taken for a valid one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from corun.types import KvHandle, NodeRef

STAMPS_PARAM = "corun_stamps"
"""The key in `kv_transfer_params` of both sides for the stamps of a prompt's blocks, 8 bytes each, in the prompt's
order (corun/node/kv/stamps.py). For a prefill they are what the blocks get that it computes itself; for a reader, what
all blocks must carry."""
OWNERS_PARAM = "corun_owners"
"""The key in the `kv_transfer_params` that a prefill ends with, for the pairs (request id, number of blocks) of the
prefills that computed its blocks, in the prompt's order."""
FREEDOMS_PARAM = "corun_freedoms"
"""The key in a prefill's `kv_transfer_params` for the names of what it may make use of: `corun.types.Freedom` and
`CACHED`. Without it, a prompt is computed as the contract says: whole, alone, in its own chunks."""
CACHED = "cached"
"""The name in `FREEDOMS_PARAM` that allows a prompt to take blocks from the prefix cache and to leave its own there."""
BEGAN_PARAM = "corun_began"
"""The key in a prefill's `kv_transfer_params`, and in those that it ends with, for when its first step was scheduled,
on the machine's monotonic clock."""
IDLE_PARAM = "corun_idle"
"""The key in a prefill's `kv_transfer_params` for whether nobody waits for it: on a shared GPU it does not go before
decode steps."""
STEPS_PARAM = "corun_steps"
"""The key in the `kv_transfer_params` that a checked prefill ends with, for its steps: its own tokens, the prompts, the
tokens of all of them, and the samples beside them, in each."""
TARGETS_PARAM = "corun_targets"
"""The key in a prefill's `kv_transfer_params` for the token ids to score. The logits of the prompt's last tokens, as
many as these, each score one. Nobody reads the KV of such a prompt."""
TOPS_PARAM = "corun_tops"
"""The key in a sample's `kv_transfer_params` for how many of the likeliest tokens it wants beside each of its own."""
AT_ONCE_PARAM = "corun_at_once"
"""The key in a sample's `kv_transfer_params` for whether its KV, which this engine holds, is copied in the step that
computes its first row, and not a step earlier."""
IN_PLACE_PARAM = "corun_in_place"
"""The key in a sample's `kv_transfer_params` for how many first blocks of its prompt it reads where they are.
The prompt was computed by this engine, which still holds its KV."""
TAIL_PARAM = "corun_tail"
"""The key in a sample's `kv_transfer_params` for whether it begins in the last step of its own prompt. It computes the
prompt's tokens behind the blocks that it reads in place once more, at most a block, and draws from the last of them."""
OWN_PROMPT_PARAM = "corun_own_prompt"
"""The key in the `kv_transfer_params` of a sample that comes with its prompt, for the prompt, until the sample is told
where the KV is: (request id of the prefill, id and generation of the prefill node)."""
CHECK_PARAM = "corun_check"
"""The key in a prefill's `kv_transfer_params` for whether the blocks get digests."""
READER = "/"
"""The mark between a prefill's id and a reader's id in the messages from decode nodes to prefill nodes."""
SEPARATORS = f"{READER}:,"
"""All marks that separate names in these messages, so no prefill's id may contain them. All but `READER` are vLLM's
(nixl/pull_worker.py). A name that must differ from each such id begins with `READER`: `names_in` still finds it."""


def bound(handle: KvHandle) -> KvHandle:
    """Return `handle` with its binding."""
    return replace(handle, binding=binding(handle))


def binding(handle: KvHandle) -> str:
    """Return SHA-256 over a handle's request, both nodes' generations, engine, prompt digest, numbers of tokens, block
    ids and owners; 64 hex digits."""
    names = (handle.request_id, handle.engine_id, handle.prompt_digest, handle.num_tokens, handle.cached_tokens)
    nodes = (_words(handle.prefill_node), _words(handle.reader))
    owners = [(owner.request_id, owner.num_blocks) for owner in handle.owners]
    return hashlib.sha256(_bytes("corun.v1.kv_handle", *names, *nodes, handle.block_ids, owners)).hexdigest()


def owner(request_id: str, prefill_node: NodeRef) -> int:
    """Return the name of a prefill as the owner of KV blocks, a uint64.

    It tells who computed the blocks, not which node reads them: several decode nodes may (`prefill_node.sharing`), and
    later prompts that begin alike may hold them, too (`prefill_node.prefix_cache`).
    """
    text = _bytes("corun.v1.kv_owner", request_id, _words(prefill_node))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def is_checked(request_id: str, fraction: float) -> bool:
    """Return whether this prefill is in the `fraction` whose KV is compared by digest. It depends on nothing else."""
    text = _bytes("corun.v1.kv_check", request_id)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") < fraction * 2**48


def is_prompt(params: Mapping[str, Any] | None) -> bool:
    """Return whether these `kv_transfer_params` are those of a prompt, which is computed for a reader or to be scored;
    else they are a reader's."""
    return bool(params and (params.get("do_remote_decode") or TARGETS_PARAM in params))


def read_id(request_id: str, claim: str) -> str:
    """Return a reader's own id of a prefill's KV. vLLM keeps a set of such ids for each peer and renews the leases of
    the KV that they name (nixl/base_scheduler.py), so two readers must have different ids. claim: empty if there is one
    reader only."""
    return f"{request_id}{READER}{claim}" if claim else request_id


def names_in(read_id: str) -> tuple[str, str]:
    """Return the prefill's id and the reader's from what `read_id` made. A single reader has the prefill's own id."""
    request_id, _, reader = read_id.partition(READER)
    return request_id, reader or request_id


def _words(ref: NodeRef) -> tuple[str, str]:
    return ref.node_id, ref.generation


def _bytes(*values: object) -> bytes:
    """Return an unambiguous encoding: equal bytes mean equal values."""
    return json.dumps(values, separators=(",", ":")).encode()
