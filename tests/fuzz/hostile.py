"""Clients that take and do not give, each kind in a process of its own, and what an ordinary client feels of them.

    python -m tests.fuzz.hostile ATTACK ADDRESS SCALE

Attacks until stdin ends, then prints a line of JSON with what it saw. `measure` runs one beside an ordinary client.
Tests only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.server import raise_file_limit
from corun.testing.engines import MAX_MODEL_LEN
from tests.chaos.overload import Options, load
from tests.chaos.report import quantiles
from tests.fuzz.http2 import MAX_FRAME, Connection, call, headers, hello, message, status_of, widen
from tests.fuzz.target import Target

GENERATE, WATCH = b"/corun.v1.ClusterService/Generate", b"/grpc.health.v1.Health/Watch"
ANSWER_S = 60.0
"""The limit for an attacker to begin, and to say what it saw."""
_OPEN_AT_ONCE = 200

Seen = Counter[str]
Attack = Callable[[str, int, Seen], Awaitable[None]]


async def slowloris(address: str, scale: int, seen: Seen) -> None:
    """Connections that say a byte now and then, and come back when they are closed."""
    greeting = hello() + headers(1, GENERATE, (b"x-slow", b"y" * 4000))

    async def one(number: int) -> None:
        await asyncio.sleep(number / scale)
        while True:
            link = await _opened(address, greeting[:1], seen)
            for byte in greeting[1:]:
                await asyncio.sleep(0.5)
                link.send(bytes([byte]))
                if link.writer.is_closing() or link.reader.at_eof():
                    break
            seen["closed by the server"] += 1
            link.close()

    await asyncio.gather(*(one(number) for number in range(scale)))


async def idle(address: str, scale: int, seen: Seen) -> None:
    """Connections that do nothing: half of them are silent, half speak HTTP/2 and answer pings."""
    opening = asyncio.Semaphore(_OPEN_AT_ONCE)

    async def one(greeting: bytes) -> None:
        async with opening:
            link = await _opened(address, greeting, seen)
        while not link.is_over:
            await link.read(3600.0)
        seen["closed by the server"] += 1
        link.close()

    await asyncio.gather(*(one(hello() if number % 2 else b"P") for number in range(scale)))


async def giant(address: str, scale: int, seen: Seen) -> None:
    """Messages of 1 GiB: one is only announced, the others are sent as fast as the server takes them."""

    async def one(*, silent: bool) -> None:
        while True:
            link = await _opened(address, b"", seen)
            link.send(headers(1, GENERATE))
            link.send_data(1, message(b"", announced=2**30))
            sent = 0
            while not link.is_over and 1 not in link.ended and sent < 2**30:
                room = 0 if silent else min(link.window(1), MAX_FRAME)
                if room > 0:
                    link.send_data(1, bytes(room))
                    sent += room
                    await link.writer.drain()
                else:
                    await link.read(1.0)
            seen[f"ended with status {await link.until_ended(1, 5.0)}"] += 1
            seen["MiB sent"] += sent >> 20
            link.close()

    await asyncio.gather(one(silent=True), *(one(silent=False) for _ in range(scale)))


async def slow_reader(address: str, scale: int, seen: Seen) -> None:
    """Clients that let one byte a second come of a long answer."""
    params = SamplingParams(n=4, logprobs=True, max_tokens=MAX_MODEL_LEN - 3)
    request = call(1, GENERATE, codec.generate_request((1, 2, 3), params).SerializeToString())

    async def one() -> None:
        while True:
            link = await _opened(address, hello(0), seen)
            link.send(request)
            seen["requests"] += 1
            began = time.monotonic()
            while 1 not in link.ended and not link.is_over and time.monotonic() < began + 15:
                link.send(widen(1, 1))
                await link.read(1.0)
                await asyncio.sleep(0.5)
            link.send(widen(1, 1 << 24) + widen(0, 1 << 24))
            seen[f"ended with status {await link.until_ended(1, 5.0)}"] += 1
            link.close()

    await asyncio.gather(*(one() for _ in range(scale)))


async def many_streams(address: str, scale: int, seen: Seen) -> None:
    """Calls on one connection, many more than it may have: half never send their message, half watch health."""
    link = await _opened(address, b"", seen)
    for number in range(scale):
        stream = 2 * number + 1
        link.send(headers(stream, GENERATE) if number % 2 else call(stream, WATCH, b""))
    seen["calls"] += scale
    while await link.read(5.0) or not link.is_over:
        ended, link.ended = link.ended, {}
        for end in ended.values():
            seen["refused" if len(end) == 4 else f"ended with status {status_of(end)}"] += 1
    seen["closed by the server"] += 1


ATTACKS: dict[str, tuple[int, Attack]] = {
    "slowloris": (500, slowloris),
    "idle": (10_000, idle),
    "giant": (2, giant),
    "slow_reader": (2, slow_reader),
    "many_streams": (3000, many_streams),
}
"""By name, each with its ordinary scale."""


async def measure(target: Target, name: str, *, scale: int, seconds: float, server: str = "open") -> dict[str, Any]:
    """An ordinary client's latency without and with an attack on a server of the same process, and what the attack did
    to that."""
    files, memory = target.files, target.rss_mib
    before = await latency(target.addresses["open"], seconds)
    command = [sys.executable, "-m", "tests.fuzz.hostile", name, target.addresses[server], str(scale)]
    attacker = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    most = {"memory_mib": memory, "files": files}
    try:
        await asyncio.wait_for(attacker.stdout.readline(), ANSWER_S)
        watch = asyncio.create_task(_watch(target, most))
        await asyncio.sleep(seconds / 4)
        during = await latency(target.addresses["open"], seconds)
        watch.cancel()
        attacker.stdin.close()
        seen = json.loads(await asyncio.wait_for(attacker.stdout.readline(), ANSWER_S))
    finally:
        if attacker.returncode is None:
            attacker.kill()
        await attacker.wait()
    left = await target.settled(files)
    return {
        "attack": name,
        "server": server,
        "scale": scale,
        "seconds": seconds,
        "before": before,
        "during": during,
        "seen": seen,
        "memory_mib": {"before": memory, "peak": most["memory_mib"], "after": target.rss_mib},
        "files": {"before": files, "peak": most["files"], "after": target.files},
        "left": left,
        "alive": target.alive,
    }


async def latency(address: str, seconds: float) -> dict[str, Any]:
    """Send one ordinary request after the other; the times are in milliseconds, from its start to its last token."""
    tally = await load(address, "ordinary", Options(seconds=seconds, slots=1, max_tokens=8, prompt_tokens=3), rate=0.0)
    found, failed = quantiles(tally.ended), tally.other + Counter(refused=len(tally.refused))
    times = {f"{name}_ms": round(1000 * found.get(name, 0.0), 2) for name in ("p50", "p99")}
    return {"requests": len(tally.ended), "failed": failed, **times}


async def _watch(target: Target, most: dict[str, float]) -> None:
    """Note the most memory and files of the target until this is cancelled."""
    while target.alive:
        for name, found in (("memory_mib", target.rss_mib), ("files", target.files)):
            most[name] = max(most[name], found)
        await asyncio.sleep(0.1)


async def _opened(address: str, greeting: bytes, seen: Seen) -> Connection:
    """A connection; one that cannot be had is tried again."""
    while True:
        try:
            link = await Connection.open(address, greeting)
        except OSError as error:
            seen[f"no connection: {type(error).__name__}"] += 1
            await asyncio.sleep(0.5)
        else:
            seen["connections"] += 1
            return link


async def attack(name: str, address: str, scale: int) -> Seen:
    """Attacks until stdin ends."""
    seen: Seen = Counter()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    _, run = ATTACKS[name]
    attacking = asyncio.ensure_future(run(address, scale, seen))
    await reader.read()
    attacking.cancel()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await attacking
    except Exception as error:
        seen[f"the attack failed: {error!r}"] += 1
    return seen


if __name__ == "__main__":
    raise_file_limit()
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = asyncio.run(attack(sys.argv[1], sys.argv[2], min(int(sys.argv[3]), most_files - 100)))
    print(json.dumps(found), flush=True)
