"""A short overload in one process. Counts only: how long anything takes is for `python -m tests.chaos.overload`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corun.rpc.auth import Caller
from corun.rpc.channel import Access
from corun.testing.model import write_tokenizer
from router.queue import SampleQueue
from tests.chaos.overload import SHARES, Tally, asker, token_of, write_tokens
from tests.clusters import FakeCluster, cluster

pytestmark = pytest.mark.slow

SIZE = {"max_tokens": 8, "prompt_tokens": 8}
SLOTS = 4


async def overload(fake: FakeCluster, *, hogs: int) -> dict[str, Tally]:
    """A hog asks for much at once, again and again, while the others ask for one thing after the other."""

    async def client(name: str, concurrency: int, number: int) -> Tally:
        async with asker(fake.address, token_of(name), **SIZE) as one:
            return await one.closed_count(concurrency, number)

    tallies = await asyncio.gather(client("hog", hogs, 10), client("small", 2, 10), client("tiny", 1, 10))
    return dict(zip(SHARES, tallies, strict=True))


def full_for_all(queue: SampleQueue, caller: Caller, samples: int = 0, tokens: int = 0) -> bool:
    return queue.waiting + samples <= queue._max_samples


@pytest.mark.timeout(120)
@pytest.mark.parametrize("leaves_room", [True, False])
async def test_nobody_is_lost_and_small_clients_are_served(
    tmp_path: Path, leaves_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they are not all served, if one client may fill the queue."""
    if not leaves_room:
        monkeypatch.setattr("router.queue.SampleQueue._has_room", full_for_all)
    most = 0
    enter = SampleQueue.enter

    def watched(queue: SampleQueue, *arguments: object, **options: object) -> object:
        nonlocal most
        try:
            return enter(queue, *arguments, **options)  # type: ignore[arg-type]
        finally:
            most = max(most, queue.waiting)

    monkeypatch.setattr(SampleQueue, "enter", watched)
    access = Access(token=token_of("hog"))
    settings = {**write_tokens(tmp_path), "max_queued_samples": 8, "heartbeat_timeout_ms": 60_000}
    model = write_tokenizer(tmp_path)
    async with cluster(model, slots=SLOTS, client=access, **settings) as fake:
        tallies = await overload(fake, hogs=10 * SLOTS)
        assert {name: dict(tally.other) for name, tally in tallies.items()} == {"hog": {}, "small": {}, "tiny": {}}
        assert {name: tally.asked for name, tally in tallies.items()} == {"hog": 400, "small": 20, "tiny": 10}
        assert tallies["hog"].ended
        assert tallies["hog"].refused
        refused = sum(len(tally.refused) for tally in tallies.values())
        assert fake.router.queue.refused == refused
        small = len(tallies["small"].refused) + len(tallies["tiny"].refused)
        assert (small == 0) is leaves_room
        assert most <= 2 * 8
        await fake.idle()
        queue = fake.router.queue
        assert (queue.waiting, queue.waiting_tokens, queue._head(), queue._aside) == (0, 0, None, {})
        assert not queue._samples_of
        assert not any(share.waiting for share in queue._shares.values())
