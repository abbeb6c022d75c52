"""A gateway's configuration: frozen, complete and checked when made. This module must not know HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from corun.client.request import DEFAULT_ADDRESS, DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S
from corun.client.routers import check_timeout, read_addresses
from corun.config.fields import CLIENT_TIMEOUT_S, MAX_MESSAGE_BYTES, TlsConfig, is_loopback
from corun.errors import InvalidArgumentError
from corun.rpc.auth import read_token

_COUNTS = {
    "max_requests": 2**20,
    "max_prompts": 2**16,
    "max_tokens_kept": 2**16,
    "max_body_bytes": 2**29,
    "max_bodies_bytes": 2**40,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """A gateway: where it listens, which cluster it calls, and how much it takes."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    reuse_port: bool = False
    """Share the port with other gateways on this machine: each process takes some of the connections."""
    https_cert: str = ""
    """PEM file of the certificate to show to HTTP clients; turns TLS on for them."""
    https_key: str = ""
    """PEM file of its private key."""
    insecure: bool = False
    """Serve on a public address without TLS."""
    router: str = DEFAULT_ADDRESS
    """host:port of the router; several routers of one cluster, with commas in between, are tried in turn."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest time for one request, in seconds."""
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    """Longest wait for a router to be reachable, in seconds."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the router's certificate; turns TLS on for the router."""
    tls_cert: str = ""
    """PEM file of the gateway's certificate, for a router that wants one."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_name: str = ""
    """Name that the router's certificate carries, if it is not the router's address."""
    token_file: str = ""
    """File of a client's token for the gateway's own health checks. Requests show the token they came with, never
    this one."""
    served_name: str = ""
    """Name of the model that clients see and ask for; empty: its id on the hub, or the name of its directory."""
    max_requests: int = 4096
    """Prompts in progress at once; more are refused with a retry delay."""
    max_prompts: int = 128
    """Prompts of one request."""
    max_tokens_kept: int = 256
    """Different tokens of clients whose connections to the router are kept."""
    max_body_bytes: int = MAX_MESSAGE_BYTES
    """Largest request, in bytes, however long the model: see docs/security.md."""
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Bytes of all requests in progress together; more are refused with a retry delay."""
    client_timeout_s: float = CLIENT_TIMEOUT_S
    """Longest that a client may take to send its request, or to take a part of the answer, in seconds."""
    drain_grace_s: float = 30.0
    """Time for running requests to end when the gateway is told to stop, in seconds."""

    def __post_init__(self) -> None:
        if not self.host:
            raise InvalidArgumentError("host", self.host, "must not be empty")
        _check_integer("port", self.port, 0, 65535)
        for name, most in _COUNTS.items():
            _check_integer(name, getattr(self, name), 1, most)
        for name in ("timeout_s", "connect_timeout_s", "client_timeout_s", "drain_grace_s"):
            check_timeout(name, getattr(self, name))
        _ = self.addresses, self.https, self.tls, self.own_token()  # Unusable files raise their errors here.
        if not (is_loopback(self.host) or self.https or self.insecure):
            limit = "is a public address, so it needs --https-cert, --https-key as well; or say --insecure"
            raise InvalidArgumentError("host", self.host, limit)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The host:port of each router."""
        return read_addresses(self.router)

    @property
    def https(self) -> TlsConfig | None:
        """The certificate and key for HTTP clients; None: no TLS."""
        if bool(self.https_cert) != bool(self.https_key):
            missing = "https_key" if self.https_cert else "https_cert"
            raise InvalidArgumentError(missing, "", "must be given: both, or neither")
        return TlsConfig(cert=self.https_cert, key=self.https_key) if self.https_cert else None

    @property
    def tls(self) -> TlsConfig | None:
        """The TLS files for calls to the router; None: no TLS."""
        files = {"ca": self.tls_ca, "cert": self.tls_cert, "key": self.tls_key, "name": self.tls_name}
        return TlsConfig(**files) if any(files.values()) else None

    def own_token(self) -> str:
        """Read the gateway's own token; empty if there is none."""
        return read_token("token_file", self.token_file) if self.token_file else ""


def _check_integer(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(field, value, f"must be an integer in [{low}, {high}]")
