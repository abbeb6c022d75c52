"""Chats are rendered in turns of the clients, and neither threads nor waiting places are one client's alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from corun.errors import DeadlineError, OverloadedError
from corun.gateway import renders
from corun.gateway.renders import Renders


async def test_one_client_leaves_a_thread_to_the_others() -> None:
    made, go_on, has_begun, begun = Renders(60), threading.Event(), asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def stall() -> str:
        begun.append("a")
        loop.call_soon_threadsafe(has_begun.set)
        go_on.wait()
        return "a"

    held = [asyncio.ensure_future(made.run("a", stall)) for _ in range(3)]
    await has_begun.wait()
    assert await made.run("b", lambda: "b") == "b"
    assert len(begun) == 1
    go_on.set()
    assert await asyncio.gather(*held) == ["a"] * 3
    made.close()


async def test_clients_have_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renders, "THREADS", 1)
    made, go_on, order = Renders(60), threading.Event(), list[str]()

    def note(token: str) -> Callable[[], str]:
        return lambda: order.append(token) or token  # type: ignore[func-returns-value]

    stalled = asyncio.ensure_future(made.run("x", lambda: str(go_on.wait())))
    asked = [asyncio.ensure_future(made.run(token, note(token))) for token in "aaabc"]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(stalled, *asked)
    assert order == ["a", "b", "c", "a", "a"]
    made.close()


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renders, "WAITING", 4)
    made, go_on = Renders(60), threading.Event()
    stalls = [asyncio.ensure_future(made.run(token, lambda: str(go_on.wait()))) for token in ("x", "y")]
    waiting = [asyncio.ensure_future(made.run("a", lambda: "a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 of this client"):
        await made.run("a", lambda: "a")
    waiting += [asyncio.ensure_future(made.run("", lambda: "a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="4 chats wait"):
        await made.run("b", lambda: "b")
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    waiting[0] = asyncio.ensure_future(made.run("b", lambda: "a"))  # What left has given its place back.
    go_on.set()
    assert await asyncio.gather(*waiting) == ["a"] * 4
    await asyncio.gather(*stalls)
    made.close()


async def test_a_thread_counts_until_it_ends_also_if_nobody_waits_for_it() -> None:
    made, go_on = Renders(0.05), threading.Event()
    for _ in range(2):
        with pytest.raises(DeadlineError):
            await made.run("a", lambda: str(go_on.wait()))
    made._timeout_s = 60
    again = asyncio.ensure_future(made.run("a", lambda: "a"))
    await asyncio.sleep(0)
    assert made._running == ["a"]
    go_on.set()
    assert await again == "a"
    made.close()


async def test_errors_reach_who_asked() -> None:
    def fail() -> str:
        raise ValueError("no")

    made = Renders(60)
    with pytest.raises(ValueError, match="no"):
        await made.run("a", fail)
    made.close()
