"""`python -m tests.fuzz.bystander ROUTER GATEWAY TOKEN_FILE`: another client's streams, and how they went.

Prints a line of JSON once it knows the right answers, then one for every stream that ended. Ends when its stdin does.
It is a process of its own, so that an attacker's computation does not look like a pause. Tests only.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from corun import AsyncClient, SamplingParams
from corun.receipt import output_digest

NUM_CASES = 8
PAUSE_S = 0.05
"""The pause between two streams of the same place in `WAYS`."""
STREAM_S = 120.0
"""The limit for one stream to end."""
WAYS = ("grpc", "grpc", "http")
"""The streams that run at a time, each through the router ("grpc") or through the gateway ("http")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A request."""

    prompt: list[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The outcome of one stream."""

    way: str
    at: float
    """The time of its end, by `time.time`."""
    first_s: float
    """The time until its first token; 0 if there was none."""
    longest_pause_s: float
    """The longest time between two messages with tokens."""
    seconds: float
    equal: bool
    error: str = ""


class Bystander:
    """A client that streams the cases in turn."""

    def __init__(self, client: AsyncClient, session: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._session = session
        self._url = url
        self._cases = make_cases()
        self._expected: list[str] = []

    async def learn(self) -> None:
        """Get the right answers, one at a time."""
        for case in self._cases:
            sample = (await self._client.generate(case.prompt, case.params, seed=case.seed)).samples[0]
            self._expected.append(output_digest(sample.token_ids, sample.logprobs))

    async def go_on(self, place: int, stop: asyncio.Event) -> None:
        """Run one stream after the other until `stop` is set."""
        number = place
        while not stop.is_set():
            told = await self._one(WAYS[place], number % NUM_CASES)
            print(json.dumps(asdict(told)), flush=True)
            number += 1
            await asyncio.sleep(PAUSE_S)

    async def _one(self, way: str, number: int) -> Told:
        began = time.monotonic()
        times, digest, error = [began], "", ""
        case = self._cases[number]
        try:
            digest = await asyncio.wait_for(self._read(way, case, times), STREAM_S)
        except Exception as raised:  # Anything that ends a stream is a finding here.
            error = f"{type(raised).__name__}: {raised}"[:500]
        pauses = [later - earlier for earlier, later in pairwise(times[1:])]
        return Told(
            way=way,
            at=time.time(),
            first_s=round(times[1] - began, 4) if len(times) > 1 else 0.0,
            longest_pause_s=round(max(pauses, default=0.0), 4),
            seconds=round(time.monotonic() - began, 4),
            equal=digest == self._expected[number],
            error=error,
        )

    async def _read(self, way: str, case: Case, times: list[float]) -> str:
        """Read a whole stream and return its digest. Append the time of each message to `times`."""
        digest = ""
        async with aclosing(self._grpc(case) if way == "grpc" else self._http(case)) as pieces:
            async for found in pieces:
                digest = found or digest
                times.append(time.monotonic())
        return digest

    async def _grpc(self, case: Case) -> AsyncGenerator[str, None]:
        """Yield an empty text for every chunk but the last, and the output's digest for the last."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in self._client.stream(case.prompt, case.params, seed=case.seed):
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            yield output_digest(token_ids, logprobs) if chunk.receipt else ""

    async def _http(self, case: Case) -> AsyncGenerator[str, None]:
        body: dict[str, Any] = {"prompt": case.prompt, "seed": case.seed, "stream": True, "ignore_eos": True}
        body |= {name: getattr(case.params, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield _digest_in(json.loads(data))


def make_cases() -> list[Case]:
    """Make the same cases every time: prompts of one token to some chunks, greedy, or drawn with or without filters."""
    rng = random.Random(11)
    styles: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 30}, {"temperature": 0.7})
    return [
        Case(
            prompt=[rng.randrange(3, 500) for _ in range(rng.choice((1, 40, 128, 200)))],
            params=SamplingParams(max_tokens=96, ignore_eos=True, logprobs=True, **styles[number % len(styles)]),
            seed=rng.getrandbits(62),
        )
        for number in range(NUM_CASES)
    ]


def _digest_in(event: dict[str, Any]) -> str:
    """Return the digest in the receipt of a stream's last event, empty for others. Raises RuntimeError for an error."""
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    receipts = [choice["corun"]["receipt"] for choice in event["choices"] if (choice.get("corun") or {}).get("receipt")]
    return receipts[0]["output_digest"] if receipts else ""


async def main(router: str, url: str, token: str) -> None:
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        AsyncClient(router, timeout_s=STREAM_S, token=token) as client,
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
    ):
        bystander, stop = Bystander(client, session, url), asyncio.Event()
        await bystander.learn()
        print(json.dumps({"cases": NUM_CASES}), flush=True)
        streams = [asyncio.ensure_future(bystander.go_on(place, stop)) for place in range(len(WAYS))]
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], Path(sys.argv[3]).read_text()))
