"""What tests ask of a service: the error that a call ends with, and whether something is so yet, or after some time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from corun.errors import CorunError, from_rpc_error

DEADLINE_S = 60.0


async def refusal(call: Any, kind: type[CorunError] = CorunError) -> Any:
    """Return the error that a call ends with, which is of this kind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, kind)
    return error


async def settle() -> None:
    """Let all tasks go on as far as they can without an answer from outside."""
    for _ in range(10):
        await asyncio.sleep(0)


def put_forward(seconds: float) -> None:
    """Put the running loop's clock forward, so that the timers of this time are due: no test has to wait for them, and
    how long a busy machine takes for anything else does not matter."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; raises TimeoutError after a minute."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110  # The other side of a socket has no event.
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), DEADLINE_S)
