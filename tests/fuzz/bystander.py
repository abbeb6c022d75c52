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
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from corun import AsyncClient, SamplingParams
from tests.chaos.traffic import Case, answered, streamed

PAUSE_S = 0.05
"""The pause between two streams of the same place in `WAYS`."""
STREAM_S = 120.0
"""The limit for one stream to end."""
WAYS = ("grpc", "grpc", "http")
"""The streams that run at a time, each through the router ("grpc") or through the gateway ("http")."""
STYLES: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 30}, {"temperature": 0.7}) * 2


class Bystander:
    """A client that streams the same cases in turn: prompts of one token to some chunks, greedy, or drawn."""

    def __init__(self, client: AsyncClient, session: aiohttp.ClientSession, url: str) -> None:
        rng = random.Random(11)
        self._client = client
        self._session = session
        self._url = url
        self._cases = [
            Case(
                number=number,
                prompt=[rng.randrange(3, 500) for _ in range(rng.choice((1, 40, 128, 200)))],
                params=SamplingParams(max_tokens=96, ignore_eos=True, logprobs=True, **style),
                seed=rng.getrandbits(62),
            )
            for number, style in enumerate(STYLES)
        ]

    async def learn(self) -> None:
        """Get the right answers, one at a time."""
        self._cases = [await answered(self._client, case) for case in self._cases]

    async def go_on(self, place: int, stop: asyncio.Event) -> None:
        """Run one stream after the other until `stop` is set, and tell of each; times are in seconds."""
        for number in count(place):
            if stop.is_set():
                return
            began = time.monotonic()
            times, equal, error = [began], False, ""
            case, way = self._cases[number % len(STYLES)], WAYS[place]
            try:
                equal = await asyncio.wait_for(self._read(way, case, times), STREAM_S)
            except Exception as raised:  # Anything that ends a stream is a finding here.
                error = f"{type(raised).__name__}: {raised}"[:500]
            pauses = [(b - a, message, b) for message, (a, b) in enumerate(pairwise(times[1:]), 2)]
            longest, message, over = max(pauses, default=(0.0, 0, began))
            told = {
                "way": way,
                "at": time.time(),
                "first_s": round(times[1] - began, 4) if len(times) > 1 else 0.0,
                "longest_pause_s": round(longest, 4),
                "before_message": message,
                "paused_until": round(time.time() - (time.monotonic() - over), 3),
                "seconds": round(time.monotonic() - began, 4),
                "equal": equal,
                "error": error,
            }
            print(json.dumps(told), flush=True)
            await asyncio.sleep(PAUSE_S)

    async def _read(self, way: str, case: Case, times: list[float]) -> bool:
        """Read a whole stream and return whether it has the right bits. Append the time of each message to `times`."""
        equal = False
        async with aclosing(self._grpc(case) if way == "grpc" else self._http(case)) as messages:
            async for equal in messages:  # noqa: B007
                times.append(time.monotonic())
        return equal

    async def _grpc(self, case: Case) -> AsyncGenerator[bool, None]:
        """Yield for every chunk whether all that has come is the right output."""
        samples = [bytearray()]
        async with aclosing(streamed(self._client, case, samples)) as chunks:
            async for _ in chunks:
                yield (bytes(samples[0]),) == case.bits

    async def _http(self, case: Case) -> AsyncGenerator[bool, None]:
        """Yield for every event whether it has the receipt of the right output."""
        body: dict[str, Any] = {"prompt": case.prompt, "seed": case.seed, "stream": True, "ignore_eos": True}
        body |= {name: getattr(case.params, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                receipts = [(choice.get("corun") or {}).get("receipt") for choice in event["choices"]]
                yield any(receipt and receipt["output_digest"] == case.digests[0] for receipt in receipts)


async def main(router: str, url: str, token: str) -> None:
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        AsyncClient(router, timeout_s=STREAM_S, token=token) as client,
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
    ):
        bystander, stop = Bystander(client, session, url), asyncio.Event()
        await bystander.learn()
        print(json.dumps({"cases": len(STYLES)}), flush=True)
        streams = [asyncio.ensure_future(bystander.go_on(place, stop)) for place in range(len(WAYS))]
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text()))
