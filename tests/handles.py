"""A handle of KV that nobody holds, for tests of what is done with handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corun.receipt import prompt_digest
from corun.types import KvHandle, NodeRef


def a_handle(prompt: Sequence[int], **fields: Any) -> KvHandle:
    """Return the handle of a prompt that has one block. fields: other values than these."""
    values: dict[str, Any] = {
        "prefill_node": NodeRef(node_id="p0", generation="a" * 16),
        "engine_id": "p0-engine",
        "request_id": "prefill-1",
        "block_ids": ((4,),),
        "host": "127.0.0.1",
        "port": 7000,
        "tp_size": 1,
        "num_tokens": len(prompt),
        "prompt_digest": prompt_digest(prompt),
        "reader": NodeRef(node_id="d0", generation="d" * 16),
    }
    return KvHandle(**{**values, **fields})
