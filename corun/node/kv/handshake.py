"""NIXL handshakes: who takes part, what both ends must have in common, and why a handshake fails, in words.

Owns: the sockets, sealed with the cluster's token, the condition that replaces vLLM's own, and the wording. Must not
know: when handshakes are made, transfers. It gets vLLM's objects but does not import vLLM, so that a node can use its
constants before the environment is pinned.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import zmq
from zmq.utils import z85

UNDER_WAY = "under way"
"""The answer of a connector while a handshake has neither succeeded nor failed."""
MAX_REQUEST_BYTES = 64 * 1024
_KNOWN = {
    "NIXL compatibility hash mismatch": (
        "it has other weights, another vLLM, torch or driver, another device or another number of threads"
    ),
    "engine ID mismatch": "another engine answers there; it may have restarted a moment ago",
}
"""Our words for a failure, by a part of vLLM's own message (nixl/base_worker.py: `_nixl_handshake`)."""


def sealed(token: str) -> Callable[[int, str], AbstractContextManager[Any]]:
    """Return a function that makes sockets in place of vLLM's `zmq_ctx` (nixl/utils.py): a ROUTER listens, any other
    socket connects.

    They use CurveZMQ with keys derived from the token, so a process without the token can neither send nor read
    messages. This matters because a reply tells where a node's KV lies and how to reach it. All members share the keys;
    the public key is as secret as the token.
    """
    secret = z85.encode(hashlib.sha256(b"corun NIXL side channel 1\0" + token.encode()).digest())
    public = zmq.curve_public(secret)

    @contextmanager
    def open_socket(socket_type: int, address: str) -> Iterator[Any]:
        context = zmq.Context()
        try:
            socket = context.socket(socket_type)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.curve_publickey, socket.curve_secretkey = public, secret
            if socket_type == zmq.ROUTER:
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                socket.curve_server = True
                socket.bind(address)
            else:
                socket.curve_serverkey = public
                socket.connect(address)
            yield socket
        finally:
            context.destroy(linger=0)

    return open_socket


def condition(worker: Any, make_hash: Callable[[Any, str, bool], str], facts: Mapping[str, Any]) -> str:
    """Return a hash of what both ends of a handshake must have in common, as 64 hex digits.

    It covers vLLM's own factors (`make_hash`) except the model's path, the number of ranks, and `facts`, which tell
    what the path cannot, such as the digest of the weights as loaded. The worker must have registered its KV caches.
    Raises RuntimeError if vLLM does not make its hash as 0.26.0 does, so that we cannot know what is in it.
    """

    def made(config: Any) -> str:
        return make_hash(config, worker.backend_name, worker.transfer_topo.cross_layers_blocks)

    if made(worker.vllm_config) != worker.compat_hash:
        raise RuntimeError("vLLM makes its NIXL compatibility hash otherwise than 0.26.0: what it covers is not known")
    without_path = copy.copy(worker.vllm_config)
    without_path.model_config = copy.copy(without_path.model_config)
    without_path.model_config.model = ""
    text = json.dumps([made(without_path), worker.world_size, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def in_words(error: BaseException) -> str:
    """Return in words why a handshake or a first read failed, at most 300 characters of a message that is not ours."""
    if isinstance(error, zmq.Again):
        return (
            "it has not answered the NIXL handshake for 5 s: its NIXL port may be closed to this node, or its cluster "
            "token another one"
        )
    text = str(error) or type(error).__name__
    return next((words for part, words in _KNOWN.items() if part in text), text[:300])
