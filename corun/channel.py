"""Channels to our processes: one set of options for every client, so that both ends agree on sizes and keepalive.

This module must not know servers, nor any service of ours.
"""

from __future__ import annotations

import grpc
import grpc.aio

from corun.config import MAX_MESSAGE_BYTES

Options = list[tuple[str, int]]

KEEPALIVE_MS = 15_000
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_METADATA_BYTES = 64 * 1024
# gRPC refuses beyond its own limit with a status that names no field, so its limit is wider than ours. Up to it, a
# message is read and refused by us.
HARD_LIMIT_FACTOR = 4
"""gRPC's size limit, as a multiple of ours."""


def channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """An asyncio channel to a process of ours. Connects when first used; make it inside a running loop."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


def sync_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """The same for blocking calls."""
    return grpc.insecure_channel(address, options=channel_options(max_message_bytes))


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a client's channel."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes * HARD_LIMIT_FACTOR),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # A long quiet stream still has to notice a dead peer.
        # A restarted process comes back soon: gRPC's own backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),  # One connection, and one backoff, per channel.
        ("grpc.enable_http_proxy", 0),  # A proxy for web traffic must not swallow calls inside a cluster.
    ]
