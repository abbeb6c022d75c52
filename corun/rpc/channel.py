"""Channels to our processes: one set of options for every client, so that both ends agree on sizes and keepalive.

This module also owns what a client shows to a server: TLS certificates and a token. It must not know servers, nor any
service of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from corun.config.fields import MAX_MESSAGE_BYTES, MemberConfig, TlsConfig
from corun.rpc.auth import bearer, check_token
from corun.rpc.certificates import Identity, identity

Options = list[tuple[str, int | str]]

KEEPALIVE_MS = 15_000
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_METADATA_BYTES = 64 * 1024
# gRPC refuses a message beyond its own limit with a status that names no field. So that limit is wider than ours: we
# read and refuse the messages between the two limits.
HARD_LIMIT_FACTOR = 4
"""gRPC's size limit, as a multiple of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What one end of a link shows to the other."""

    tls: TlsConfig | None = None
    """The PEM files for TLS. None: no TLS."""
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.token:
            check_token("token", self.token)

    @classmethod
    def of_member(cls, config: MemberConfig) -> Access:
        """Return the access of a process of the cluster."""
        return cls(tls=config.tls, token=config.cluster_token())


OPEN = Access()
"""Access with neither TLS nor a token."""


class Channel:
    """An asyncio channel to one of our processes, whose calls carry a token.

    A gRPC channel reconnects with the certificates that it was made with. So it is made at the first call, and anew at
    the first call after the TLS files have changed. Calls in progress end on the old one. gRPC's own call credentials
    refuse a token without TLS, and its interceptors would put a task of their own between every stream and its reader.
    """

    def __init__(self, address: str, access: Access, options: Options) -> None:
        self.metadata = bearer(access.token)
        """The metadata that every call carries."""
        self._address = address
        self._options = options
        self._identity = None if access.tls is None else identity(access.tls)
        self._used: Identity | None = None
        self._made: list[grpc.aio.Channel] = []
        """The gRPC channels so far; the last one is for new calls. gRPC disconnects the others when they are idle."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current(), name)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def current(self) -> grpc.aio.Channel:
        """Return the gRPC channel for a new call. Must be called inside the running loop."""
        found = None if self._identity is None else self._identity.current()
        if not self._made or found is not self._used:
            if found is None:
                made = grpc.aio.insecure_channel(self._address, options=self._options)
            else:
                credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
                made = grpc.aio.secure_channel(self._address, credentials, options=self._options)
            self._made.append(made)
            self._used = found
        return self._made[-1]

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def _method(self, kind: str, made_with: Any, options: Any) -> Any:
        """Return a method that uses the gRPC channel that is current at the time of each call."""
        used: grpc.aio.Channel | None = None
        method: Any = None

        def call(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
            nonlocal used, method
            if (current := self.current()) is not used:
                used, method = current, getattr(current, kind)(*made_with, **options)
            return method(*args, metadata=(*metadata, *self.metadata), **kwargs)

        return call

    async def close(self, grace_s: float | None = None) -> None:
        """Disconnect after at most `grace_s` seconds, at once if it is None. Callers end their calls themselves."""
        for made in self._made:
            await made.close(grace_s)


def channel(
    address: str, *, access: Access = OPEN, name: str = "", max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Channel:
    """Return an asyncio channel to one of our processes. It connects when first used.

    name: the name that the server's certificate must carry, unless `access` gives one; empty: the host of `address`.

    Raises InvalidArgumentError if the TLS files of `access` cannot be used.
    """
    options: Options = [
        ("grpc.max_send_message_length", max_message_bytes),
        *link_options(max_message_bytes),
        # A restarted process is back soon, but gRPC's default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # Each channel has its own connection and backoff.
        ("grpc.enable_http_proxy", 0),  # A proxy for web traffic must not swallow calls inside a cluster.
    ]
    if access.tls is not None and (checked := access.tls.name or name):
        options.append(("grpc.ssl_target_name_override", checked))
    return Channel(address, access, options)


def link_options(max_message_bytes: int) -> Options:
    """Return the gRPC options that both ends of a link have."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes * HARD_LIMIT_FACTOR),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # Notices peers whose machine is gone.
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # A stream that is quiet for long must notice a dead peer.
    ]
