"""Streams that go on for as long as a fleet changes under them, each judged bit by bit. Tests only."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from corun import AsyncClient, CorunError, SamplingParams
from tests.chaos.traffic import pack

TIMEOUT_S = 180.0
Bits = bytes
Answer = Callable[[Sequence[int], SamplingParams, int], Bits]
"""The right bits of a prompt, parameters and seed."""


@dataclass
class Streams:
    """One request after the other from each of a few clients."""

    address: str
    answer: Answer
    max_tokens: tuple[int, int] = (20, 150)
    vocabulary: int = 256
    completed: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _number: int = 0

    async def run(self, clients: int, stop: threading.Event) -> None:
        async with AsyncClient(self.address, timeout_s=TIMEOUT_S) as client:
            await asyncio.gather(*(self._ask_on(client, number, stop) for number in range(clients)))

    async def _ask_on(self, client: AsyncClient, number: int, stop: threading.Event) -> None:
        draw = random.Random(number)
        while not stop.is_set():
            self._number += 1
            prompt = [draw.randrange(1, self.vocabulary) for _ in range(draw.randrange(1, 60))]
            params = SamplingParams(max_tokens=draw.randrange(*self.max_tokens), logprobs=True, ignore_eos=True)
            await self._judge(client, prompt, params, draw.randrange(2**63))

    async def _judge(self, client: AsyncClient, prompt: list[int], params: SamplingParams, seed: int) -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        try:
            async for chunk in client.stream(prompt, params, seed=seed):
                ids += chunk.token_ids
                logprobs += chunk.logprobs
        except CorunError as error:
            self.failed.append(f"seed {seed}: {type(error).__name__}: {error}")
            return
        self.completed += 1
        if pack(ids, logprobs) != self.answer(prompt, params, seed):
            self.wrong.append(f"seed {seed}, {len(ids)} tokens")


@contextmanager
def streaming(address: str, answer: Answer, *, clients: int = 6) -> Iterator[Streams]:
    """Streams that run beside the block, and end after it."""
    streams, stop = Streams(address, answer), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(streams.run(clients, stop)))
    thread.start()
    try:
        yield streams
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "a stream did not end"
