"""Targets without an engine, for tests of the client loop and of what is built on it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from corun.errors import CorunError
from corun_bench.driver import Outcome, Target


@dataclass
class FakeTarget(Target):
    """Draws tokens that depend on prompt and seed; in a crowd also on the crowd, if `crowd_shows`."""

    delay_s: float = 0.001
    crowd_shows: bool = False
    own: int = 0
    """What else its tokens depend on."""
    errors: dict[int, CorunError] = field(default_factory=dict)
    """Raised for the request of an index."""
    hanging: frozenset[int] = frozenset()
    lost_tokens: int = 0
    running: int = 0
    most: int = 0
    started: list[int] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    tokens_asked: list[int] = field(default_factory=list)
    forgotten: int = 0
    settled: int = 0

    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        request = outcome.request
        self.started.append(request.index)
        self.prompts.append(request.prompt_token_ids)
        self.tokens_asked.append(request.max_tokens)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(3600 if request.index in self.hanging else self.delay_s)
            if request.index in self.errors:
                raise self.errors[request.index]
            crowd = self.most if self.crowd_shows else 0
            draw = random.Random(f"{request.prompt_token_ids} {request.seed} {crowd} {self.own}")
            for _ in range(request.max_tokens - self.lost_tokens):
                outcome.arrivals.append((time.monotonic(), 1))
                outcome.token_ids.append(draw.randrange(100))
                if logprobs:
                    outcome.logprobs.append(-draw.random())
        finally:
            self.running -= 1

    def settle(self) -> None:
        self.settled += 1

    async def forget(self) -> None:
        self.forgotten += 1
        self.most = 0


class FakeEngine:
    """Gives every request its tokens at once, notes what it is asked for, and counts no request as done."""

    def __init__(self, name: str, transfer: dict[str, Any] | None = None) -> None:
        self.name, self.transfer, self.in_flight = name, transfer, 0
        self.asked: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = []
        self.padded: list[int] = []

    async def forget(self) -> None:
        """Nothing is kept."""

    async def pad_to(self, rows: int) -> None:
        self.padded.append(rows)

    async def draw(
        self,
        request_id: str,
        outcome: Outcome,
        sampling: dict[str, Any],
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        self.asked.append((request_id, sampling, transfer))
        self.in_flight += 1
        outcome.arrivals.append((time.monotonic(), sampling["max_tokens"]))
        outcome.token_ids += [7] * sampling["max_tokens"]
        return self.transfer
