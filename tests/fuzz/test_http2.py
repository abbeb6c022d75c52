"""What a hostile client relies on: a connection that can be left at any moment."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tests.fuzz.http2 import Connection


@pytest.mark.parametrize("turns", range(6))
async def test_a_reader_that_is_cancelled_as_bytes_come_ends(turns: int) -> None:
    """An attack reads in a loop without an end: one lost cancellation, and the attacker's process outlives its test."""
    link = Connection(asyncio.StreamReader(), cast(asyncio.StreamWriter, None))

    async def forever() -> None:
        while True:
            await link.read(5.0)

    reading = asyncio.create_task(forever())
    await asyncio.sleep(0)
    link.reader.feed_data(b"1")
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading], timeout=1.0)
    cancelled = reading.cancelled()
    reading.cancel()
    assert cancelled
