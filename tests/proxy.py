"""A TCP proxy that breaks, slows and silences connections, so that tests can cut a stream at any byte."""

from __future__ import annotations

import asyncio
import random


class CuttingProxy:
    """Passes bytes on to `target` (host:port). The first `cuts` connections are broken after a random number of bytes
    from the target, `longest` at most; later ones are left alone, but for `cut`, `delay_s` and `silence`."""

    def __init__(self, target: str, *, seed: int = 0, cuts: int = 0, longest: int = 0) -> None:
        self.target = target
        self.num_cuts = 0
        self.delay_s = 0.0
        """What every piece of data waits before it is passed on."""
        self._silent_until = 0.0
        self._rng = random.Random(seed)
        self._left = cuts
        self._longest = longest
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> int:
        """Breaks every connection; returns how many there were."""
        for writer in self._open:
            writer.transport.abort()
        return len(self._open)

    def silence(self, seconds: float) -> None:
        """Passes nothing on for a while, in either direction; connections stay, and nothing is lost."""
        self._silent_until = asyncio.get_running_loop().time() + seconds

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        budget = self._rng.randint(0, self._longest) if self._left else None
        self._left = max(0, self._left - 1)
        pumps = [
            asyncio.ensure_future(self._pump(reader, far_writer, None)),
            asyncio.ensure_future(self._pump(far_reader, writer, budget)),
        ]
        self._tasks.update(pumps)
        self._open.add(writer)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            self.num_cuts += budget is not None and pumps[1].done()
        finally:
            self._open.discard(writer)
            for pump in pumps:
                pump.cancel()
                pump.add_done_callback(self._tasks.discard)
            writer.transport.abort()
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None) -> None:
        try:
            while data := await reader.read(2**16):
                wait_s = max(self.delay_s, self._silent_until - asyncio.get_running_loop().time())
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                writer.write(data if budget is None else data[:budget])
                await writer.drain()
                if budget is not None:
                    budget -= len(data)
                    if budget <= 0:
                        return
        except OSError:
            return
