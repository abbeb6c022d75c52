"""The parent's side of engine processes, and two systems of them: independent engines, and stock prefill and decode.

Owns: the start and end of engines, the choice of an engine for each request, and the plain proxy between prefill and
decode. Must not know vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from corun.errors import DeadlineError, InternalError, UnavailableError
from corun_bench.children import Processes
from corun_bench.driver import Outcome, Request, Target
from corun_bench.systems import TEMPERATURE, EngineSettings

ANSWER_S = 60.0
STOP_S = 30.0
FINISHED_WELL = ("stop", "length")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The transfer parameters that vLLM's own proxy for NIXL sends with a prompt (vLLM's
examples/online_serving/disaggregated_prefill)."""


def sampling(request: Request, *, logprobs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": TEMPERATURE, "seed": request.seed, "max_tokens": request.max_tokens}
    return found | ({"logprobs": 0} if logprobs else {})


class Stream(NamedTuple):
    """A request in an engine."""

    outcome: Outcome
    done: asyncio.Future[dict[str, Any] | None]
    """Resolves when the request ends: to the transfer parameters that the engine gave, or to an error."""


class Engine:
    """One engine process (`corun_bench.engine`)."""

    def __init__(self, name: str, settings: EngineSettings, processes: Processes, directory: Path) -> None:
        self.name, self.settings = name, settings
        self.facts: dict[str, Any] = {}
        self.in_flight = 0
        self._dead = ""
        self._processes = processes
        self._streams: dict[str, Stream] = {}
        self._answers: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        context = zmq.asyncio.Context.instance()
        self._commands: Any = context.socket(zmq.PUSH)  # pyzmq's types give its poll no arguments.
        self._events = context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)
        addresses = [f"ipc://{directory / name}.{end}" for end in ("commands", "events")]
        self._commands.bind(addresses[0])
        self._events.bind(addresses[1])
        processes.start(name, "corun_bench.engine", json.dumps(asdict(settings)), *addresses)
        self._reader = asyncio.create_task(self._read())

    def check(self) -> None:
        """Raise UnavailableError if the engine has reported that it died."""
        if self._dead:
            raise UnavailableError(f"{self._dead}\n{self._processes.tail(self.name)}")

    async def ready(self, deadline: float) -> None:
        """Wait until the engine is ready, and listens.

        Its two connections come up apart: it may say that it is ready while nothing can be sent to it yet.
        Raises UnavailableError, with the end of its log, if it does not start; DeadlineError if it is not in time.
        """
        self.facts = await self._answer("ready", deadline)
        if not await self._commands.poll(1000 * ANSWER_S, zmq.POLLOUT):
            raise DeadlineError(f"{self.name} is ready and does not listen")
        self._processes.note(self.name)

    async def forget(self) -> None:
        await self._send("forget")
        await self._answer("forgot", time.monotonic() + ANSWER_S)

    async def pad_to(self, rows: int) -> None:
        """Make all further decode steps of a colocated engine this many rows long."""
        await self._send("pad", rows)
        await self._answer("padded", time.monotonic() + ANSWER_S)

    async def draw(
        self,
        request_id: str,
        outcome: Outcome,
        sampling: dict[str, Any],
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Run one request to its end; return the transfer parameters of a prefill."""
        stream = self._streams[request_id] = Stream(outcome, asyncio.get_running_loop().create_future())
        self.in_flight += 1
        try:
            await self._send("start", request_id, outcome.request.prompt_token_ids, sampling, transfer)
            return await stream.done
        except asyncio.CancelledError:
            with suppress(UnavailableError):
                await self._send("abort", request_id)
            raise
        finally:
            self.in_flight -= 1
            self._streams.pop(request_id, None)

    async def stop(self) -> None:
        with suppress(subprocess.TimeoutExpired, UnavailableError):
            await self._send("stop")
            await asyncio.to_thread(self._processes.running[self.name].wait, STOP_S)
        await asyncio.to_thread(self._processes.terminate, self.name, 5.0)
        self._reader.cancel()
        for socket in (self._commands, self._events):
            socket.close(linger=0)

    async def _send(self, *command: Any) -> None:
        """Send a command. Raises UnavailableError if the process does not listen yet, or no longer listens."""
        try:
            await self._commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise UnavailableError(f"{self.name} does not listen") from None

    async def _read(self) -> None:
        while True:
            kind, value = msgspec.msgpack.decode(await self._events.recv())
            if kind == "step":
                self._step(value)
            elif kind == "died":
                self._dead = f"{self.name}: {value}"
                for stream in self._streams.values():
                    if not stream.done.done():
                        stream.done.set_exception(UnavailableError(self._dead))
            else:
                self._answers.put_nowait((kind, value))

    def _step(self, rows: list[Any]) -> None:
        now: float | None = None  # One time for all rows: a step is one message.
        for request_id, tokens, logprobs, reason, transfer in rows:
            if (stream := self._streams.get(request_id)) is None:
                continue
            if tokens:
                now = time.monotonic() if now is None else now
                stream.outcome.arrivals.append((now, len(tokens)))
                stream.outcome.token_ids += tokens
                if logprobs is not None:
                    stream.outcome.logprobs += logprobs
            if reason is not None and not stream.done.done():
                if reason not in FINISHED_WELL:
                    stream.done.set_exception(InternalError(f"{self.name} ended the request: {reason}"))
                else:
                    stream.done.set_result(transfer)

    async def _answer(self, kind: str, deadline: float) -> Any:
        while time.monotonic() < deadline:
            try:
                found, value = await asyncio.wait_for(self._answers.get(), 0.5)
            except asyncio.TimeoutError:
                self._processes.check()
                self._processes.note(self.name)
                self.check()
                continue
            if found == kind:
                return value
        raise DeadlineError(f"{self.name} did not say {kind} in time:\n{self._processes.tail(self.name)}")


def least_busy(engines: list[Engine]) -> Engine:
    """Return the engine with the fewest requests in flight; the first one of several."""
    return min(engines, key=lambda engine: engine.in_flight)


class IndependentEngines(Target):
    """Engines that do both prefill and decode; each request goes to the least busy one."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._names = (f"r{number}" for number in itertools.count(1))

    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        parameters = sampling(outcome.request, logprobs=logprobs)
        await least_busy(self.engines).draw(next(self._names), outcome, parameters)

    async def forget(self) -> None:
        for engine in self.engines:
            await engine.forget()


class PlainProxy(IndependentEngines):
    """Stock prefill and decode engines: prefill, then decode with prefill's parameters, nothing else."""

    def __init__(self, prefill: list[Engine], decode: list[Engine]) -> None:
        super().__init__([*prefill, *decode])
        self._prefill, self._decode = prefill, decode

    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        name, parameters = next(self._names), sampling(outcome.request, logprobs=logprobs)
        # The client does not get prefill's token: decode draws the first token again.
        unused = Outcome(request=outcome.request)
        first = {**parameters, "max_tokens": 1}
        prefill = least_busy(self._prefill)
        transfer = await prefill.draw(name, unused, first, dict(REMOTE_DECODE))
        if transfer is None:
            raise InternalError(f"{prefill.name} gave no transfer parameters")
        await least_busy(self._decode).draw(name, outcome, parameters, transfer)
