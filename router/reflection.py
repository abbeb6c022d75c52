"""Reflection on a router: what tools such as grpcurl ask, in so few streams that answers delay nobody.

Answers are made in the router's loop, and a stream may ask all the time. This module must not know our services.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from grpc_reflection.v1alpha._async import ReflectionServicer

from corun.errors import OverloadedError
from corun.rpc.interceptor import Context, caller

MAX_STREAMS = 16
"""The most streams of questions at once."""
MAX_STREAMS_OF_CLIENT = 8
"""The most of one client, by its token, or by its host if no tokens tell clients apart."""
RETRY_S = 1.0


class BoundedReflection(ReflectionServicer):  # type: ignore[misc]
    """Answers as gRPC's own servicer does. Raises OverloadedError for a stream too many."""

    def __init__(self, service_names: tuple[str, ...]) -> None:
        super().__init__(service_names)
        self._streams: Counter[str] = Counter()

    async def ServerReflectionInfo(self, request_iterator: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        name = caller().name
        if self._streams.total() >= MAX_STREAMS or self._streams[name] >= MAX_STREAMS_OF_CLIENT:
            raise OverloadedError(f"{self._streams.total()} streams ask for reflection, as many as may", RETRY_S)
        self._streams[name] += 1
        try:
            async for answer in super().ServerReflectionInfo(request_iterator, context):
                yield answer
        finally:
            self._streams[name] -= 1
            if not self._streams[name]:
                del self._streams[name]
