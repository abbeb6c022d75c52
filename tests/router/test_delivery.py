"""A shared stream: what goes into a message, whom an error ends, and who waits for what has been written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, OverloadedError, UnavailableError
from corun.params import SamplingParams
from corun.v1.cluster_service_pb2 import GenerateResponse, StreamOutputsResponse
from router import delivery
from router.delivery import OutputStream, OutputStreams, Responses
from router.output import Outbox
from tests.answers import settle
from tests.corun.test_wire import RECEIPT

PARAMS = SamplingParams(logprobs=True)


class Call:
    """One call on a stream, and the samples that fill its outbox."""

    def __init__(
        self, stream: OutputStream, number: int, samples: int = 1, room: int = 100, prompt: tuple[int, ...] = ()
    ) -> None:
        self.outbox = Outbox(room)
        self.number = number
        running: Any = SimpleNamespace(outbox=self.outbox, num_samples=samples, tokenizer=None)
        sample: Any = SimpleNamespace(request_id=f"r{number}", params=PARAMS, token_texts=False)
        self.task = asyncio.ensure_future(stream.carry(number, Responses(running, sample, prompt, "", number)))

    def draw(self, token_id: int, index: int = 0) -> None:
        self.outbox.add(index, 7, token_id, -1.0, "t")

    def finish(self, index: int = 0) -> None:
        self.outbox.piece(index, 7).receipt = replace(RECEIPT, sample_index=index)
        self.outbox.notify()


async def test_a_call_of_its_own_sends_each_sample_by_itself_to_the_last() -> None:
    """The prompt and the fingerprint are in the first response only."""
    outbox = Outbox(100)
    running: Any = SimpleNamespace(outbox=outbox, num_samples=2, tokenizer=None)
    sample: Any = SimpleNamespace(request_id="r", params=PARAMS, token_texts=False)
    responses = Responses(running, sample, (1, 2, 3), "f")
    assert responses.pull() is None
    for index in (1, 0):
        outbox.add(index, 7, 10 + index, -1.0, "t")
        outbox.piece(index, 7).receipt = replace(RECEIPT, sample_index=index)
    sent, ends = [], []
    while (message := responses.pull()) is not None:
        sent.append(GenerateResponse.FromString(message))
        ends.append(responses.has_ended)
    assert [(each.sample_index, list(each.token_ids)) for each in sent] == [(1, [11]), (0, [10])]
    assert [(list(each.prompt_token_ids), each.fingerprint) for each in sent] == [([1, 2, 3], "f"), ([], "")]
    assert ends == [False, True]


class Reader:
    """What a pump makes of a stream, one message at a time."""

    def __init__(self, stream: OutputStream) -> None:
        self.stream = stream
        self.turns = 0
        stream.listen(self._count)
        opened = self.read()
        assert (opened.stream_id, len(opened.responses)) == (stream.stream_id, 0)

    def _count(self) -> None:
        self.turns += 1

    def read(self) -> StreamOutputsResponse:
        return StreamOutputsResponse.FromString(self.stream.pull() or b"")

    def tokens(self) -> list[tuple[int, list[int]]]:
        return [(each.call_number, list(each.token_ids)) for each in self.read().responses]


async def opened(*sizes: int, room: int = 100) -> tuple[OutputStream, Reader, list[Call]]:
    stream = OutputStream("alice")
    calls = [Call(stream, number, samples, room) for number, samples in enumerate(sizes, start=1)]
    await settle()
    return stream, Reader(stream), calls


async def test_a_step_is_one_message_and_one_turn() -> None:
    _, reader, calls = await opened(1, 2, 1)
    before = reader.turns
    for call in calls:
        call.draw(10 + call.number)
    calls[1].draw(99, index=1)
    assert reader.turns == before  # Not while a step is being delivered.
    await settle()
    assert reader.turns == before + 1
    assert reader.tokens() == [(1, [11]), (2, [12]), (2, [99]), (3, [13])]
    assert reader.stream.pull() is None


async def test_what_comes_while_a_message_is_written_is_joined() -> None:
    _, reader, (one, two) = await opened(1, 1)
    one.draw(1)
    two.draw(2)
    one.draw(3)
    assert reader.tokens() == [(1, [1, 3]), (2, [2])]


async def test_a_call_ends_when_its_last_response_has_been_written() -> None:
    _, reader, (one, two) = await opened(2, 1)
    one.finish(0)
    one.draw(5, index=1)
    assert list(reader.read().ended) == []
    one.finish(1)
    two.draw(6)
    last = reader.read()
    assert (list(last.ended), len(last.responses)) == ([1], 2)
    await settle()
    assert not one.task.done()  # The message may still be on its way.
    reader.read()
    await asyncio.wait_for(one.task, 5)
    assert not two.task.done()
    two.task.cancel()


async def test_an_error_ends_its_call_at_once_and_no_other() -> None:
    """A client that takes no message pulls nothing, and learns of the error by its call."""
    stream, reader, (one, two) = await opened(1, 1, room=3)
    for token_id in range(4):
        one.draw(token_id)
    two.draw(8)
    with pytest.raises(OverloadedError, match="more slowly"):
        await asyncio.wait_for(one.task, 5)
    assert reader.tokens() == [(2, [8])]
    two.finish()
    assert list(reader.read().ended) == [2]
    assert stream.pull() is None
    await asyncio.wait_for(two.task, 5)


async def test_an_error_leaves_the_next_message_to_the_others() -> None:
    """The client may be ready for a message before the call's own task has seen the error."""
    _, reader, (one, two) = await opened(1, 1, room=3)
    for token_id in range(4):
        one.draw(token_id)
    two.draw(8)
    assert reader.tokens() == [(2, [8])]
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(one.task, 5)
    two.task.cancel()


async def test_a_call_that_is_left_sends_nothing_more() -> None:
    _, reader, (one, two) = await opened(1, 1)
    one.draw(1)
    two.draw(2)
    one.task.cancel()
    await settle()
    assert one.outbox.ready is None
    one.draw(3)
    assert reader.tokens() == [(2, [2])]
    two.task.cancel()


async def test_a_message_has_a_limit_and_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MESSAGE_TOKENS", 4)
    _, reader, calls = await opened(*[1] * 6)
    for call in calls:
        call.draw(call.number)
    first = reader.tokens()
    assert 1 < len(first) < 6
    while more := reader.tokens():
        first += more
    assert first == [(number, [number]) for number in range(1, 7)]
    for call in calls:
        call.task.cancel()


async def test_a_call_that_fills_whole_messages_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that have waited longest are in the next message."""
    monkeypatch.setattr(delivery, "MESSAGE_TOKENS", 2)
    stream, reader, (one, two, three) = await opened(1, 1, 1)
    assert stream.pull() is None  # Nobody has anything yet.
    sent: list[tuple[int, list[int]]] = []
    for token_id in range(3):
        one.draw(token_id)
        one.draw(token_id)
        two.draw(20)
        three.draw(30)
        sent += reader.tokens()
    assert sent == [(1, [0, 0]), (2, [20, 20]), (3, [30, 30, 30])]
    assert reader.tokens() == [(1, [1, 1, 2, 2])]
    for call in (one, two, three):
        call.task.cancel()


async def test_the_tokens_of_prompts_count_for_the_limit_of_a_message() -> None:
    """First responses of many long texts, in one message, were more than a client may receive: it lost its stream."""
    stream, reader, _ = await opened()
    calls = [Call(stream, number, prompt=tuple(range(delivery.MESSAGE_TOKENS))) for number in (1, 2)]
    await settle()
    for call in calls:
        call.draw(10 + call.number)
    await settle()
    assert reader.tokens() == [(1, [11])]
    assert reader.tokens() == [(2, [12])]
    for call in calls:
        call.task.cancel()


async def test_a_number_is_used_once_at_a_time() -> None:
    stream, reader, (one,) = await opened(1)
    with pytest.raises(InvalidArgumentError, match="call_number"):
        await Call(stream, 1).task
    one.finish()
    reader.read()
    reader.read()
    await asyncio.wait_for(one.task, 5)
    again = Call(stream, 1)
    await settle()
    again.draw(4)
    assert reader.tokens() == [(1, [4])]
    again.task.cancel()


async def test_a_stream_that_ends_ends_its_calls_and_takes_no_more() -> None:
    stream, _, (one,) = await opened(1)
    stream.close()
    for call in (one, Call(stream, 2)):
        with pytest.raises(UnavailableError, match="not open") as caught:
            await asyncio.wait_for(call.task, 5)
        assert caught.value.retry_after_s == delivery.REOPEN_S


async def test_a_stream_that_no_call_uses_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []
    cancelled: set[int] = set()

    def later(_: float, look: Callable[[], None]) -> Any:
        number = len(timers)
        timers.append(look)
        return SimpleNamespace(cancel=lambda: cancelled.add(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", later)
    stream, reader, (one,) = await opened(1)
    assert (len(timers), cancelled) == (1, {0})  # It waits for its first call, which has come.
    one.finish()
    reader.read()
    reader.read()
    await settle()
    assert (len(timers), cancelled, stream.has_ended) == (2, {0}, False)
    timers[1]()
    assert (stream.has_ended, stream.pull()) == (True, b"")


async def test_a_call_that_has_nothing_yet_keeps_its_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a node for longer than an unused stream stays open."""
    monkeypatch.setattr(delivery, "IDLE_S", 0.0)
    stream = OutputStream("alice")
    with stream.used():
        with stream.used():
            await settle()
        await asyncio.sleep(0.01)
        assert not stream.has_ended
    await asyncio.sleep(0.01)
    assert stream.has_ended, "nobody uses it"


async def test_only_its_owner_finds_a_stream_and_only_while_it_is_open() -> None:
    streams = OutputStreams()
    with streams.opened("alice") as stream:
        assert streams.find(stream.stream_id, "alice") is stream
        for stream_id, owner in ((stream.stream_id, "bob"), ("other", "alice")):
            with pytest.raises(UnavailableError, match="not open"):
                streams.find(stream_id, owner)
    with pytest.raises(UnavailableError, match="not open"):
        streams.find(stream.stream_id, "alice")


async def test_a_client_has_a_limited_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_STREAMS", 2)
    streams = OutputStreams()
    with streams.opened("alice"), streams.opened("bob"):
        with streams.opened("alice"):
            with pytest.raises(OverloadedError, match="2 streams open"), streams.opened("alice"):
                pass
            with streams.opened("bob"):
                pass
        with streams.opened("alice"):
            pass
