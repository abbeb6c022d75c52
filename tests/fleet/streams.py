"""Streams that go on for as long as a fleet changes under them, each judged bit by bit. Tests only."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from corun import AsyncClient, CorunError
from tests.chaos.traffic import Case, streamed
from tests.machine import wait_for

TIMEOUT_S = 180.0
CLIENTS = 6


@dataclass
class Streams:
    """One request after the other from each of a few clients."""

    address: str
    cases: Sequence[Case]
    completed: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    decoded_by: dict[str, str] = field(default_factory=dict)
    """The decode node of each sample's receipt, by what routers' logs call the sample; empty before the receipt."""

    def begun(self) -> list[str]:
        """Return the samples that have tokens and have not ended."""
        return [sample for sample, node in self.decoded_by.copy().items() if not node]

    def more(self, count: int = 12) -> None:
        """Wait for some more streams to end."""
        target = self.completed + count
        wait_for(lambda: self.completed >= target, "streams go on")

    async def run(self, stop: threading.Event) -> None:
        async with AsyncClient(self.address, timeout_s=TIMEOUT_S) as client:
            await asyncio.gather(*(self._ask_on(client, number, stop) for number in range(CLIENTS)))

    async def _ask_on(self, client: AsyncClient, number: int, stop: threading.Event) -> None:
        draw = random.Random(number)
        while not stop.is_set():
            case = draw.choice(self.cases)
            samples = [bytearray() for _ in case.bits]
            try:
                async for chunk in streamed(client, case, samples):
                    node = chunk.receipt.decode_node.node_id if chunk.receipt else ""
                    self.decoded_by[f"sample {chunk.sample_index} of request {chunk.request_id!r}"] = node
            except CorunError as error:
                self.failed.append(f"request {case.number}: {type(error).__name__}: {error}")
                continue
            self.completed += 1
            if tuple(map(bytes, samples)) != case.bits:
                self.wrong.append(f"request {case.number}")


@contextmanager
def streaming(address: str, cases: Sequence[Case]) -> Iterator[Streams]:
    """Streams that run beside the block, and end after it."""
    streams, stop = Streams(address, cases), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(streams.run(stop)))
    thread.start()
    try:
        yield streams
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "a stream did not end"
