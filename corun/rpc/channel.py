"""Channels to our processes: one set of options for every client, so that both ends agree on sizes and keepalive.

This module also owns what a client shows to a server: TLS certificates and a token. It must not know servers, nor any
service of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio

from corun.config.fields import MAX_MESSAGE_BYTES, MemberConfig, TlsConfig
from corun.rpc.auth import bearer, check_token
from corun.rpc.certificates import Identity
from corun.rpc.renewed_channel import AsyncRenewedChannel, RenewedChannel

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


def channel(
    address: str, *, access: Access = OPEN, name: str = "", max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Return an asyncio channel to one of our processes. It connects when first used. Make it inside a running loop.

    name: the name that the server's certificate must carry, unless `access` gives one; empty: the host of `address`.
    """
    options = _options(access, max_message_bytes, name)
    link: Any
    if access.tls is None:
        link = grpc.aio.insecure_channel(address, options=options)
    else:
        link = AsyncRenewedChannel(
            access.tls, lambda found: grpc.aio.secure_channel(address, _credentials(found), options=options)
        )
    return cast(grpc.aio.Channel, _TokenChannel(link, access.token)) if access.token else link


def sync_channel(address: str, *, access: Access = OPEN, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """Return a channel for blocking calls to one of our processes. It connects when first used."""
    options = _options(access, max_message_bytes)
    link: Any
    if access.tls is None:
        link = grpc.insecure_channel(address, options=options)
    else:
        link = RenewedChannel(
            access.tls, lambda found: grpc.secure_channel(address, _credentials(found), options=options)
        )
    return cast(grpc.Channel, _TokenChannel(link, access.token)) if access.token else link


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Return the gRPC options of a client's channel."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes * HARD_LIMIT_FACTOR),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # A stream that is quiet for long must notice a dead peer.
        # A restarted process is back soon, but gRPC's default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # Each channel has its own connection and backoff.
        ("grpc.enable_http_proxy", 0),  # A proxy for web traffic must not swallow calls inside a cluster.
    ]


def _options(access: Access, max_message_bytes: int, name: str = "") -> Options:
    options = channel_options(max_message_bytes)
    if access.tls is not None and (checked := access.tls.name or name):
        options.append(("grpc.ssl_target_name_override", checked))
    return options


def _credentials(found: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)


class _TokenChannel:
    """A channel, blocking or not, whose calls carry a token.

    gRPC's own call credentials refuse a channel without TLS. Its interceptors would put a task of their own between
    every stream and its reader.
    """

    def __init__(self, link: Any, token: str) -> None:
        self._link = link
        self._metadata = bearer(token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *error: Any) -> None:
        self._link.close()

    async def __aenter__(self) -> _TokenChannel:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._link.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> _TokenMethod:
        return _TokenMethod(self._link.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> _TokenMethod:
        return _TokenMethod(self._link.unary_stream(*args, **kwargs), self._metadata)


class _TokenMethod:
    """A method of a channel whose calls carry a token."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._method, args, kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as `future` of gRPC's blocking methods does."""
        return self._call(self._method.future, args, kwargs)

    def _call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        metadata = (*kwargs.pop("metadata", ()), *self._metadata)
        return method(*args, metadata=metadata, **kwargs)
