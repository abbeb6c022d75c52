"""Long whole answers: they are made and sent piece by piece, so that other clients' streams go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from aiohttp import web

from corun.gateway import answers, chat_responses, responses
from corun.gateway.responses import TOKENS_AT_ONCE, Parts, parts, plain
from corun.gateway.streams import PIECE, EventStream, send_whole
from corun.types import Alternatives, FinishReason

TOKENS, TOPS = 1000, 20


def found(with_tops: bool) -> tuple[Any, Any]:
    """What was asked for, and one sample of it."""
    tops = Alternatives(tuple(range(TOPS)), (-0.5,) * TOPS, tuple(f"t{i}" for i in range(TOPS)))
    sample = SimpleNamespace(
        index=0,
        seed=1,
        text="a" * TOKENS,
        token_ids=(1,) * TOKENS,
        logprobs=(-0.25,) * TOKENS,
        token_texts=("a",) * TOKENS,
        top_logprobs=(tops,) * TOKENS if with_tops else (),
        finish_reason=FinishReason.LENGTH,
        receipt=None,
    )
    params = SimpleNamespace(logprobs=True)
    asked = SimpleNamespace(params=params, tokens_as_ids=False, echo=False, return_token_ids=True, calls=None)
    return asked, sample


def choices(with_tops: bool) -> dict[str, dict[str, Any]]:
    asked, sample = found(with_tops)
    generation: Any = SimpleNamespace(prompt_token_ids=(5, 6))
    return {
        "chat": chat_responses._choice(asked, sample),
        "completion": responses._choice(0, asked, 0, generation, sample),
    }


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_no_part_of_an_answer_takes_long_to_make(kind: str) -> None:
    """Alternatives take most of the time, and a part has those of a few tokens."""
    made = list(parts({"choices": [choices(with_tops=True)[kind]] * 3}))
    names = [part.count('"t7"') for part in made]
    assert sum(names) == 3 * TOKENS
    assert max(names) <= TOKENS_AT_ONCE


def test_no_part_of_a_long_list_takes_long_to_make() -> None:
    """A list of 131072 floats, as a long prompt that is scored has one, takes some 80 ms."""
    columns = {"token_logprobs": [None, *(-1 / each for each in range(3, 20_000))], "tokens": ["a, b"] * 5000}
    made = list(parts(columns))
    assert "".join(made) == json.dumps(columns)
    assert max(map(len, made)) < 3 * PIECE


async def test_the_scores_of_many_prompts_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 prompts of 4096 tokens take a third of a second."""
    asked: Any = SimpleNamespace(scores=True, draws=False, prompts=[])
    monkeypatch.setattr(answers, "echoed", lambda *_: {"made_in": threading.get_ident()})
    answer = await answers.whole(asked, mock.Mock(), mock.Mock(), "model")
    assert answer["made_in"] != threading.get_ident()


async def test_an_answer_is_put_together_beside_the_event_loop() -> None:
    """256 samples of 4096 tokens take half a second."""
    asked: Any = SimpleNamespace(scores=False, draws=True, prompts=[], calls=None)
    shape: Any = SimpleNamespace(head=lambda *_: {}, completion=lambda *_: {"made_in": threading.get_ident()})
    answer = await answers.whole(asked, mock.Mock(), shape, "model")
    assert answer["made_in"] != threading.get_ident()


@pytest.mark.parametrize("with_tops", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_parts_are_the_json_of_the_answer(kind: str, with_tops: bool) -> None:
    choice = choices(with_tops)[kind]
    answer = {"id": "é", "choices": [choice, choice], "empty": {}, "none": [], "ids": [1, 2], "mixed": [None, {"a": 1}]}
    made = {**choice, "logprobs": plain(choice["logprobs"])}
    assert isinstance(choice["logprobs"], Parts)
    assert json.loads("".join(parts(answer))) == {**answer, "choices": [made, made]}


def test_a_drawn_token_has_one_name_among_its_alternatives() -> None:
    """Token 1 is "a" in the text; alone, as the alternatives have it, it would be "t1"."""
    for entry in plain(choices(with_tops=True)["chat"]["logprobs"])["content"][:3]:
        names = [top["token"] for top in entry["top_logprobs"]]
        assert (entry["token"], names[:3]) == ("a", ["t0", "a", "t2"])


class Client:
    """Stands in for the connection of a client that takes a piece in `waits_s` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits_s: float = 0.0) -> None:
        self.waits_s = waits_s
        self.taken: list[bytes] = []
        self.transport = mock.Mock()
        self.transport.get_write_buffer_size.return_value = 0 if not waits_s else 60_000
        response = mock.AsyncMock()

        async def write(data: bytes) -> None:
            if self.waits_s:
                await asyncio.sleep(self.waits_s)
            self.taken.append(data)

        response.write = write
        self.protocol = SimpleNamespace(writing_paused=False)
        self.request: Any = SimpleNamespace(transport=self.transport, protocol=self.protocol)
        monkeypatch.setattr(web, "StreamResponse", lambda **_: response)


async def test_others_have_their_turn_after_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    client, turns = Client(monkeypatch), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.ensure_future(other())
    sent = ["x" * PIECE for _ in range(20)]
    await send_whole(client.request, iter(sent), 60.0)
    running.cancel()
    assert b"".join(client.taken).decode() == "".join(sent)
    assert turns >= len(sent)


async def test_a_client_that_takes_nothing_of_a_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, waits_s=3600.0)
    with pytest.raises(ConnectionResetError):
        await EventStream(client.request, 0.01).send("data: x\n\n")
    client.transport.abort.assert_called_once()
    client.waits_s = 0.0
    await EventStream(client.request, 0.01).send("data: x\n\n")
    client.transport.abort.assert_called_once()


async def test_a_client_that_stops_to_take_after_some_of_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that a full buffer stopped goes on only once a quarter of it is left, which is less than what may be
    buffered without a time limit."""
    client = Client(monkeypatch, waits_s=3600.0)
    client.transport.get_write_buffer_size.return_value, client.protocol.writing_paused = 20_000, True
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(EventStream(client.request, 0.01).send("data: x\n\n"), 5)
    client.transport.abort.assert_called_once()


async def test_a_client_that_takes_nothing_of_a_long_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    client, made = Client(monkeypatch, waits_s=3600.0), 0

    def endless() -> Any:
        nonlocal made
        while True:
            made += 1
            yield "x" * PIECE

    with pytest.raises(ConnectionResetError):
        await send_whole(client.request, endless(), 0.01)
    client.transport.abort.assert_called_once()
    assert made == 1, "no more is made than the client takes"


async def test_a_short_answer_says_its_length() -> None:
    answer = await send_whole(mock.Mock(), iter(['{"a":', "1}"]), 60.0)
    assert isinstance(answer, web.Response)
    assert (answer.text, answer.content_type) == ('{"a":1}', "application/json")
