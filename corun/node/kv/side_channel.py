"""The NIXL handshake's sockets, sealed with the cluster's token.

Owns: how these sockets are made, with CurveZMQ and keys derived from the token. A process without the token can neither
send nor read messages. This matters because a reply tells where a node's KV lies and how to reach it. Must not know:
what is sent, vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import zmq
from zmq.utils import z85

MAX_REQUEST_BYTES = 64 * 1024
_PURPOSE = b"corun NIXL side channel 1\0"


def keys(token: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key, which all members share; the public key is as secret as the token."""
    secret: bytes = z85.encode(hashlib.sha256(_PURPOSE + token.encode()).digest())
    return zmq.curve_public(secret), secret


def sealed(token: str) -> Callable[[int, str], AbstractContextManager[Any]]:
    """Return a function that makes sockets in place of vLLM's `zmq_ctx` (nixl/utils.py): a ROUTER listens, any other
    socket connects."""
    public, secret = keys(token)

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
