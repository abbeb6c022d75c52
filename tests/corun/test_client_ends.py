"""How calls and clients end: by a close, another thread, Ctrl-C, a fork, the interpreter, or the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corun import AsyncClient, CancelledByPeerError, Client, OverloadedError, SamplingParams, VerifyCase
from corun.client.client import _LOOP_THREAD
from corun.client.loop_thread import LoopThread
from tests.answers import until
from tests.corun.fake_router import WAIT_S, FakeRouter
from tests.machine import free_port, wait_for

PROMPT = "Once upon a time"
PARAMS = SamplingParams(max_tokens=6, logprobs=True)


def test_leaving_a_stream_cancels_it(client: Client, fake: FakeRouter) -> None:
    fake.gate.clear()
    for _ in client.stream(PROMPT, PARAMS):
        break
    assert fake.cancelled.wait(WAIT_S)


def test_closing_ends_the_calls_of_other_threads(client: Client, fake: FakeRouter) -> None:
    fake.gate.clear()
    stream = client.stream(PROMPT, PARAMS)
    assert next(stream).token_ids
    with Client(fake.address) as other, ThreadPoolExecutor(1) as pool:
        assert other.get_cluster()  # The thread has another user, so it goes on.
        rest = pool.submit(list, stream)
        client.close()
        with pytest.raises(CancelledByPeerError, match="closed"):
            rest.result(WAIT_S)
    assert fake.cancelled.wait(WAIT_S)
    with pytest.raises(CancelledByPeerError, match="closed"):
        client.generate("a")


def test_a_closed_client_leaves_no_connection_to_the_garbage_collector(fake: FakeRouter) -> None:
    async def use() -> int:
        async with AsyncClient(fake.address) as client:
            await client.get_cluster()
            await client.generate(PROMPT, PARAMS, seed=1)
            found = connections(fake.address)
        # gRPC may still wait for the header of a call that has ended. `asyncio.run` would cancel that, and gRPC's task
        # would keep its error, and with it the call, for the collector.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=WAIT_S)
        return found

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(use()) == 1
        wait_for(lambda: not connections(fake.address), "the connection is closed", 15.0)
    finally:
        gc.enable()


def connections(address: str) -> int:
    """Return the number of established TCP connections to a port of this host, by /proc/net: gRPC uses IPv6 sockets."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    remotes = [line.split()[2] for line in lines if line.split()[3] == "01"]
    return sum(int(remote.rpartition(":")[2], 16) == int(address.rpartition(":")[2]) for remote in remotes)


def test_closing_ends_a_call_that_waits_for_its_next_try(client: Client, fake: FakeRouter) -> None:
    fake.errors.append(OverloadedError("queue full", WAIT_S))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate_many, ["a"], timeout_s=2 * WAIT_S)
        wait_for(lambda: not (fake.errors or fake.running), "the first try has ended")
        client.close()
        with pytest.raises(CancelledByPeerError, match="closed"):
            waiting.result(WAIT_S / 2)


def test_several_threads_and_clients_share_a_loop(client: Client, fake: FakeRouter) -> None:
    with Client(fake.address) as other, ThreadPoolExecutor(4) as pool:
        seeds = [done.seed for done in pool.map(lambda seed: client.generate(PROMPT, PARAMS, seed=seed), range(8))]
        assert other.generate(PROMPT, PARAMS, seed=8).seed == 8
    assert seeds == list(range(8))
    assert [thread.name for thread in threading.enumerate()].count("corun-client") == 1


def test_a_forgotten_client_leaves_no_call(fake: FakeRouter) -> None:
    fake.gate.clear()
    client = Client(fake.address)
    stream, routers = client.stream(PROMPT, PARAMS), client._client._routers
    assert next(stream).token_ids
    del client, stream
    gc.collect()
    assert fake.cancelled.wait(WAIT_S)
    assert routers.is_closed


def test_ctrl_c_ends_a_call_and_the_request(fake: FakeRouter) -> None:
    """The process may go on, as that of a notebook does."""
    fake.gate.clear()
    code = f"""
import sys
from corun import Client
try:
    Client({fake.address!r}).generate("a")
except KeyboardInterrupt:
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: fake.requests, "the request is there")
        process.send_signal(signal.SIGINT)
        assert fake.cancelled.wait(30), "the server itself ends connections that ping three times without data"
        assert process.poll() is None
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("is_used", "said"), [(True, "forked after a client was used"), (False, "7")])
def test_a_forked_process_can_use_a_client_unless_one_was_used(fake: FakeRouter, is_used: bool, said: str) -> None:
    code = f"""
import os, sys
from corun import Client, UnavailableError
client = Client({fake.address!r})
if {is_used}:
    client.generate("a")
    client.close()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    print(Client({fake.address!r}).generate("a", seed=7).seed, flush=True)
except UnavailableError as error:
    print(error, flush=True)
del client
os._exit(0)
"""
    options: Any = {"capture_output": True, "text": True, "timeout": 2 * WAIT_S}
    found = subprocess.run([sys.executable, "-c", code], check=False, **options)
    assert (found.returncode, said in found.stdout) == (0, True), found


def test_an_interpreter_ends_while_a_stream_is_open(fake: FakeRouter) -> None:
    """What still refers to the stream is finalized when no thread can be started any more."""
    code = f"""
from corun import Client
stream = Client({fake.address!r}).stream("a")
next(stream)
circle = [stream]
circle.append(circle)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=True, stderr=subprocess.PIPE, text=True)
    assert "Error" not in ended.stderr


async def test_a_close_ends_the_search_for_a_router_with_an_error_of_ours() -> None:
    """It must not cancel the caller's own task."""
    client = AsyncClient(f"127.0.0.1:{free_port()}", connect_timeout_s=WAIT_S)
    call = asyncio.ensure_future(client.generate("x"))
    # Until it pauses between two tries.
    await until(lambda: any(isinstance(each, asyncio.Future) for each in client._routers._in_progress))
    await client.close()
    with pytest.raises(CancelledByPeerError):
        await call


async def test_a_close_ends_calls_with_an_error_of_ours_and_cancels_no_task(fake: FakeRouter) -> None:
    """gRPC cancels whoever waits for a call that is cancelled. A group of tasks would take that for nothing."""
    fake.gate.clear()
    client = AsyncClient(fake.address)
    stream = client.stream(PROMPT, PARAMS)
    assert (await anext(stream)).token_ids
    fake.refused_prompts[""], fake.refused_beside = OverloadedError("later"), 99
    case = VerifyCase(prompt_token_ids=(1, 2), sampling_params=PARAMS, seed=1)
    calls: list[Awaitable[object]] = [anext(stream), anext(client.verify([case])), client.get_cluster()]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: bool(fake.verified))
    await client.close()
    for task in tasks:
        with pytest.raises(CancelledByPeerError, match="the client is closed"):
            await task


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not say whether it was cancelled")
async def test_a_task_that_is_cancelled_when_its_client_is_closed_stays_cancelled(fake: FakeRouter) -> None:
    fake.gate.clear()
    client = AsyncClient(fake.address)
    task = asyncio.create_task(client.generate(PROMPT, PARAMS))
    await until(lambda: bool(fake.requests))
    task.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_client_that_is_closed_on_the_loops_own_thread_waits_for_nothing(fake: FakeRouter) -> None:
    """The garbage collector may run there, and end an object that closes its client."""
    with Client(fake.address) as using, Client(fake.address) as other:
        other.generate("a")

        async def collect() -> None:
            other.close()

        _LOOP_THREAD.submit(collect()).result(WAIT_S)
        assert using.generate("a") is not None


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = LoopThread()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            fresh.submit(asyncio.sleep(0, "ran"))
    assert fresh.submit(asyncio.sleep(0, "ran")).result(WAIT_S) == "ran"
    fresh.end()


def refuse_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_cancelling_an_async_call_reaches_the_router(fake: FakeRouter) -> None:
    fake.gate.clear()
    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(client.generate(PROMPT, PARAMS))
        await until(lambda: bool(fake.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, WAIT_S)
