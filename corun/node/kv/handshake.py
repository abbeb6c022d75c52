"""NIXL handshakes: what both ends must have in common, and why a handshake fails, in words.

Owns: the condition that replaces vLLM's own, and the wording. Must not know: when handshakes are made, transfers. It
gets vLLM's objects but does not import vLLM, so that a node can use its constants before the environment is pinned.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import zmq

UNDER_WAY = "under way"
"""The answer of a connector while a handshake has neither succeeded nor failed."""
_MAX_CHARS = 300
"""The largest number of characters that are kept of an error message that is not ours."""
_KNOWN = {
    "NIXL compatibility hash mismatch": (
        "it has other weights, another vLLM, torch or driver, another device or another number of threads"
    ),
    "engine ID mismatch": "another engine answers there; it may have restarted a moment ago",
}
"""Our words for a failure, by a part of vLLM's own message (nixl/base_worker.py: `_nixl_handshake`)."""


def condition(worker: Any, make_hash: Callable[[Any, str, bool], str], facts: Mapping[str, Any]) -> str:
    """Return a hash of what both ends of a handshake must have in common, as 64 hex digits.

    It covers vLLM's own factors except the model's path, the number of ranks, and `facts`, which tell what the path
    cannot, such as the digest of the weights as loaded.

    Args:
        worker: vLLM's connector worker, with its KV caches registered.
        make_hash: vLLM's own hash function.

    Raises:
        RuntimeError: vLLM does not make its hash as 0.26.0 does, so we cannot know what is in it.
    """

    def made(config: Any) -> str:
        return make_hash(config, worker.backend_name, worker.transfer_topo.cross_layers_blocks)

    if made(worker.vllm_config) != worker.compat_hash:
        raise RuntimeError("vLLM makes its NIXL compatibility hash otherwise than 0.26.0: what it covers is not known")
    text = json.dumps([made(_without_path(worker.vllm_config)), worker.world_size, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def in_words(error: BaseException) -> str:
    """Return in words why a handshake or a first read failed."""
    if isinstance(error, zmq.Again):
        return (
            "it has not answered the NIXL handshake for 5 s: its NIXL port may be closed to this node, or its cluster "
            "token another one"
        )
    text = str(error) or type(error).__name__
    return next((words for part, words in _KNOWN.items() if part in text), text[:_MAX_CHARS])


def _without_path(config: Any) -> Any:
    """Return a copy of a `VllmConfig` whose model has no path; the original stays as it is."""
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model = ""
    return config
