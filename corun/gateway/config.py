"""A gateway's configuration: frozen, complete and checked when made. This module must not know HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field

from corun.client.routers import TIMEOUT, CallerOptions, read_addresses
from corun.config.fields import CLIENT_TIMEOUT_S, MAX_MESSAGE_BYTES, HttpConfig, integer
from corun.rpc.auth import read_token


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig(CallerOptions, HttpConfig):
    """A gateway: where it listens, which cluster it calls, and how much it takes."""

    reuse_port: bool = False
    """Share the port with other gateways on this machine: each process takes some of the connections."""
    insecure: bool = False
    """Serve on a public address without TLS."""
    token_file: str = ""
    """File of a client's token for the gateway's own health checks. Requests show the token they came with, never
    this one."""
    served_name: str = ""
    """Name of the model that clients see and ask for; empty: its id on the hub, or the name of its directory."""
    supervisor: str = ""
    """Unix socket of the corun up that keeps the nodes running, which gives it to its gateways; for `allow_kills`."""
    max_requests: int = field(default=4096, metadata=integer(1, 2**20))
    """Prompts in progress at once; more are refused with a retry delay."""
    chat_max_tokens: int = field(default=4096, metadata=integer(1, 2**31 - 2))
    """Output tokens of a chat that names no limit, if the model's length leaves so many. Room for all of them is
    reserved."""
    max_prompts: int = field(default=128, metadata=integer(1, 2**16))
    """Prompts of one request."""
    max_tokens_kept: int = field(default=256, metadata=integer(1, 2**16))
    """Different tokens of clients whose connections to the router are kept."""
    max_body_bytes: int = field(default=MAX_MESSAGE_BYTES, metadata=integer(1, 2**29))
    """Largest request, in bytes, however long the model: see docs/security.md."""
    max_bodies_bytes: int = field(default=256 * 1024 * 1024, metadata=integer(1, 2**40))
    """Bytes of all requests in progress together; more are refused with a retry delay."""
    client_timeout_s: float = field(default=CLIENT_TIMEOUT_S, metadata=TIMEOUT)
    """Longest that a client may take to send its request, or to take a part of the answer, in seconds."""
    drain_grace_s: float = field(default=30.0, metadata=TIMEOUT)
    """Time for running requests to end when the gateway is told to stop, in seconds."""

    def check_together(self) -> None:
        read_addresses(self.router)  # This raises now if they are none.
        self.check_public(self.insecure)

    def check_files(self) -> None:
        """Raise InvalidArgumentError unless every file that this config names can be used."""
        _ = self.https, self.arguments(""), self.own_token()

    def own_token(self) -> str:
        """Read the gateway's own token; empty if there is none."""
        return read_token("token_file", self.token_file) if self.token_file else ""
