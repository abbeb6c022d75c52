"""Text prompts: bounded by the model, tokenized beside the event loop, few at a time, to the same ids as ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from corun.errors import InvalidArgumentError, OverloadedError
from corun.testing.cluster import WAIT_S
from router import prompts
from router.prompts import Model, PromptEncoder
from router.text import Tokenizer
from tests.clusters import cluster, generate

HAN = "\u9fa5"
MIB = 2**20
FAR_S = 60.0


def model_of(max_model_len: int, tokenizer: Tokenizer) -> Model:
    return Model(tokenizer=tokenizer, vocab_size=1000, max_model_len=max_model_len, name="m", folder=".")


@pytest.fixture
def tokenizer(model: str) -> Gate:
    """A tokenizer with a token per byte that tokenizes when it is told to."""
    return Gate(model)


def test_the_longest_text_follows_from_the_model(tokenizer: Gate) -> None:
    most = {length: model_of(length, tokenizer).max_prompt_bytes for length in (100, 512 * 1024, 2 * MIB)}
    assert most == {100: 100 * tokenizer.max_token_bytes, 512 * 1024: 512 * 1024 * 4, 2 * MIB: 8 * MIB}


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """The gaps between ticks of the event loop, in seconds."""
    times = [time.perf_counter()]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.005)
            times.append(time.perf_counter())

    ticker, gaps = asyncio.ensure_future(tick()), list[float]()
    try:
        yield gaps
        await asyncio.sleep(0.02)  # For the gap that lasted to the end.
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    finally:
        ticker.cancel()


@pytest.mark.parametrize("prompt", [HAN * (5 * MIB), HAN * (MIB // 4)])
async def test_a_text_beyond_the_model_is_refused_before_it_is_tokenized(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Tokenizer, "_encode", lambda self, text, **_: asked.append(len(text)))
    async with cluster(model) as fake:
        with pytest.raises(InvalidArgumentError, match=r"(prompt\.text|message) = \d+ bytes: must be at most"):
            await generate(fake, prompt, timeout_s=FAR_S)
    assert asked == []


async def test_the_loop_runs_while_a_long_text_is_tokenized(tokenizer: Gate) -> None:
    """A machine may stop the loop for as long, but not every time."""
    tokenizer.open()
    prompt, parts = HAN * (MIB // 6), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        async with ticking() as gaps:
            far = asyncio.get_running_loop().time() + FAR_S
            ids = await PromptEncoder().encode(prompt, model_of(MIB, tokenizer), far)
        assert len(ids) == len(prompt.encode())
        parts.append(max(gaps) / (time.perf_counter() - began))
        if parts[-1] < 1 / 3:
            return
    raise AssertionError(f"the loop stood still for {parts} of the time")


LONG, OTHER = prompts.LONG + 1, prompts.SHORT + 1


class Gate(Tokenizer):
    """Tokenizes when it is told to."""

    def __init__(self, model: str) -> None:
        super().__init__((Path(model) / "tokenizer.json").read_bytes())
        self.opened = {True: threading.Event(), False: threading.Event()}
        """For long texts, and for others."""
        self.begun: list[int] = []
        self.both = threading.Event()
        """Set when two texts are being tokenized."""

    def open(self) -> None:
        for opened in self.opened.values():
            opened.set()

    def encode(self, text: str, max_tokens: int | None = None, *, special: bool = True) -> tuple[int, ...]:
        self.begun.append(len(text))
        if len(self.begun) == 2:
            self.both.set()
        assert self.opened[len(text) > prompts.LONG].wait(WAIT_S)
        return super().encode(text, max_tokens, special=special)


@contextlib.asynccontextmanager
async def encoding(
    tokenizer: Gate, sizes: Sequence[int], clients: str = ""
) -> AsyncIterator[list[asyncio.Future[tuple[int, ...]]]]:
    """Texts of these sizes on their way, as many under way as may be. clients: a letter for the client of each."""
    encoder, model = PromptEncoder(), model_of(MIB, tokenizer)
    far = asyncio.get_running_loop().time() + FAR_S
    calls = [
        asyncio.ensure_future(encoder.encode("x" * size, model, far, client))
        for size, client in zip(sizes, clients or "a" * len(sizes), strict=True)
    ]
    try:
        await asyncio.to_thread(tokenizer.both.wait, WAIT_S)
        yield calls
    finally:
        tokenizer.open()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        encoder.close()


async def test_one_long_text_at_a_time_and_one_other(tokenizer: Gate) -> None:
    async with encoding(tokenizer, [LONG, OTHER, LONG + 1, LONG + 2, OTHER + 1]) as calls:
        assert sorted(tokenizer.begun) == [OTHER, LONG]
        calls[0].cancel()  # It is being tokenized, and goes on; one that waits is gone at once.
        calls[2].cancel()
        tokenizer.opened[False].set()
        assert [len(await calls[i]) for i in (1, 4)] == [OTHER, OTHER + 1]
        assert tokenizer.begun[2:] == [OTHER + 1]
        tokenizer.opened[True].set()
        assert len(await calls[3]) == LONG + 2
        assert tokenizer.begun[3:] == [LONG + 2]


async def test_a_wait_ends_at_the_deadline(tokenizer: Gate) -> None:
    encoder = PromptEncoder()
    now = asyncio.get_running_loop().time()
    calls = [encoder.encode("x" * OTHER, model_of(MIB, tokenizer), now + 0.05) for _ in range(2)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in found] == ["text and tokens were not converted before the deadline"] * 2
    assert tokenizer.begun == [OTHER]
    tokenizer.open()
    encoder.close()


@pytest.mark.parametrize(
    ("bound", "most", "clients"),
    [("MAX_WAITING", 3 * prompts.LONG, "aaaaa"), ("MAX_WAITING_OF_CLIENT", 2 * LONG, "aaaba")],
)
async def test_texts_that_wait_are_bounded_in_each_lane_and_of_each_client(
    tokenizer: Gate, bound: str, most: int, clients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, bound, most)
    async with encoding(tokenizer, [LONG, LONG, LONG, OTHER if clients == "aaaaa" else LONG, OTHER], clients) as calls:
        says = rf"{2 * LONG} bytes of text wait to be tokenized, of at most {most}"
        with pytest.raises(OverloadedError, match=says):
            await calls[2]
        tokenizer.open()
        assert all([await calls[i] for i in (0, 1, 3, 4)])


async def test_what_a_finished_request_gets_waits_and_is_never_refused(
    tokenizer: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts for what comes after it. The control is work that nobody has finished."""
    monkeypatch.setattr(prompts, "MAX_WAITING", 100)
    encoder, deadline = PromptEncoder(), asyncio.get_running_loop().time() + FAR_S
    held = threading.Event()
    first = asyncio.ensure_future(encoder.read(held.wait, 1, deadline, "a"))
    await asyncio.sleep(0)
    due = asyncio.ensure_future(encoder.read(lambda: "texts", 100, deadline, "a", is_due=True))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="bytes of text wait"):
        await encoder.read(lambda: "texts", 1, deadline, "b")
    held.set()
    assert (await first, await due) == (True, "texts")
    encoder.close()


async def test_clients_take_turns_however_many_texts_each_has(tokenizer: Gate) -> None:
    sizes = [OTHER, LONG, OTHER + 1, OTHER + 2, OTHER + 3, OTHER + 4]
    async with encoding(tokenizer, sizes, "aaaabb") as calls:
        tokenizer.open()
        await asyncio.gather(*calls)
    assert tokenizer.begun[2:] == [OTHER + 3, OTHER + 1, OTHER + 4, OTHER + 2]


async def test_short_texts_need_no_thread(tokenizer: Gate) -> None:
    encoder, short = PromptEncoder(), model_of(10, tokenizer)
    encoder.close()
    tokenizer.open()
    assert len(await encoder.encode("the", short, 0.0)) == 3
    with pytest.raises(InvalidArgumentError, match=r"prompt\.text = 0 bytes: must have at least one token"):
        await encoder.encode("", short, 0.0)
