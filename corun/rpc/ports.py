"""TCP ports that this process keeps free for servers that begin to listen later, in it or in others.

A port that is only looked up may be given to another process before its server listens; Ray's processes, for example,
take free ports for seconds. A kept port is bound with SO_REUSEADDR, but not listened on. So the system gives it to no
process that asks for any free port, while a server that also sets SO_REUSEADDR, as those of gRPC, aiohttp and ZMQ do,
can listen on it.
"""

from __future__ import annotations

import atexit
import socket


def bound(host: str, port: int = 0) -> socket.socket:
    """Return a socket that keeps the port, or any free one for 0, until it is closed.

    Raises OSError if a server listens there, OverflowError if the number is no port's, and TypeError if the host cannot
    be a name.
    """
    kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, port))
    except (OSError, OverflowError, TypeError):
        kept.close()
        raise
    return kept


def reserve(host: str, port: int = 0) -> int:
    """Keep the port, or any free one for 0, until this process ends, and return it. Raises what `bound` raises."""
    kept = bound(host, port)
    atexit.register(kept.close)  # The reference keeps the socket open until the process ends.
    reserved: int = kept.getsockname()[1]
    return reserved
