"""Bodies of requests: who may send one, how large it may be, how many are held at once."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError, OverloadedError, UnavailableError
from corun.gateway import clients as gateway_clients
from corun.gateway.app import Gateway
from corun.gateway.bodies import ALLOWANCE, Limits, Room, Structure
from corun.gateway.clients import Catalog
from corun.gateway.config import GatewayConfig
from corun.gateway.requests import read_request
from corun.testing.cluster import WAIT_S
from corun.testing.engines import MAX_MODEL_LEN
from tests.clusters import cluster
from tests.gateway.serving import PROMPT, serving, with_tokens

JSON_TYPE = {"Content-Type": "application/json"}
MIB = 2**20


@asynccontextmanager
async def asking(gateway: Gateway, length: int, *headers: str) -> AsyncIterator[Any]:
    """A connection that has sent the head of a request with a body of so many bytes, and nothing of the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    writer.write("\r\n".join([*head, *headers, "", ""]).encode())
    try:
        yield reader, writer
    finally:
        writer.close()


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), WAIT_S)).split()[1])


async def test_without_a_token_no_body_is_read_nor_asked_for(model: str, tmp_path: Path) -> None:
    """Whether the body of a client that was not asked for it follows the answer, nobody can tell: what comes next may
    be another request. So its connection is closed."""
    async with with_tokens(model, tmp_path) as (_, http, secrets):
        good, wrong = (f"Authorization: Bearer {token}" for token in (secrets.token("client"), "wrong-" * 5))
        expect = "Expect: 100-continue"
        for length, status, headers in (
            (100, 401, ()),
            (100_000, 401, (wrong,)),
            (100_000, 401, (wrong, expect)),
            (MIB, 413, (good, expect)),
        ):
            async with asking(http.gateway, length, *headers) as (reader, _):
                assert await status_of(reader) == status
                rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
                assert expect not in headers or b"\r\nConnection: close\r\n" in rest
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        async with asking(http.gateway, len(body), good, expect) as (reader, writer):
            assert await status_of(reader) == 100
            assert await reader.readline() == b"\r\n"
            writer.write(body)
            assert await status_of(reader) == 200


async def test_a_token_is_shown_to_the_router_once_in_a_while(
    model: str, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tokens(model, tmp_path) as (_, http, secrets):
        good, wrong = ({"Authorization": f"Bearer {token}"} for token in (secrets.token("client"), "wrong-" * 5))
        body = {"prompt": list(PROMPT), "max_tokens": 1}
        for _ in range(3):
            assert (await http.post(body, headers=good))[0] == 200
            assert (await http.post(body, headers=wrong))[0] == 401
        assert len(asked) == 1
        assert list(http.gateway.clients._kept) == [secrets.token("client")], "a refused token keeps no connection"
        (tmp_path / "clients.tokens").write_text("other: another-token-for-clients\n")
        monkeypatch.setattr(gateway_clients, "FRESH_S", 0.0)
        async with asking(http.gateway, 100_000, f"Authorization: Bearer {secrets.token('client')}") as (reader, _):
            assert await status_of(reader) == 401


async def test_the_size_of_a_body_follows_from_the_models_length(model: str) -> None:
    ids = MAX_MODEL_LEN - 1
    async with cluster(model) as fake, serving(fake) as http:
        for indent in (None, 1):
            prompt = json.dumps({"prompt": [255] * ids, "max_tokens": 1}, indent=indent).encode()
            assert (await http.post(prompt, headers=JSON_TYPE))[0] == 200
        async with asking(http.gateway, MIB) as (reader, _):
            assert await status_of(reader) == 413
        pieces = aiohttp.AsyncIterablePayload(_pieces(b" " * 65_536, 16))  # Without a length ahead.
        async with http.session.post(http.gateway.url + "/v1/completions", data=pieces, headers=JSON_TYPE) as response:
            assert response.status == 413
        room = ALLOWANCE + 8 * MAX_MODEL_LEN
        for content, weight in (("1", 2), ("[]", 35), ('""', 33), ('"\\n"', 34)):
            for count, status in ((room // weight - 200, 200), (room // weight + 1, 413)):
                body = '{"prompt": "a", "max_tokens": 1, "metadata": [1' + f",{content}" * count + "]}"
                found, answer, _ = await http.post(body.encode(), headers=JSON_TYPE)
                assert found == status, (content, count, answer)
                told = f"the body has more than {room} bytes of numbers and lists, the most for a model of"
                assert status == 200 or told in answer["error"]["message"]
        text = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": ",[" * (room // 2 + 100)}).encode()
        assert (await http.post(text, headers=JSON_TYPE))[0] == 200


@pytest.mark.parametrize(
    ("tokens", "longest_token", "size", "structure"),
    [
        (2_048, 16, 475_136, 278_528),
        (40_960, 128, 16 * MIB, 589_824),
        (131_072, 128, 16 * MIB, 1_310_720),
        (2**31, 128, 16 * MIB, 16 * MIB),
    ],
)
def test_limits_of_models(tokens: int, longest_token: int, size: int, structure: int) -> None:
    limits = Limits.of_model(tokens, tokens * longest_token, 16 * MIB)
    assert (limits.size, limits.structure) == (size, structure)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.text('"\\/\n\t'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\', max_size=5), inner, max_size=5),
    max_leaves=20,
)


def structure(text: str) -> int:
    """Character by character: all but what strings hold as it is, by what it costs."""
    found, inside, escaped = 0, False, False
    for char in text:
        if escaped:
            escaped = False
        elif inside and char == "\\":
            escaped = True
            found += 1
        elif char == '"':
            inside = not inside
            found += 16
        elif not inside:
            found += 33 if char in "[{" else 1
    return found


@given(JSON, st.booleans(), st.data())
def test_what_is_not_text_is_counted_wherever_the_pieces_end(value: Any, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    counted = Structure()
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        counted.add(body[start:end])
    assert counted.size == structure(text)


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-16-le", "utf-16", "utf-32", "cp1252"])
def test_a_body_is_utf_8_since_nothing_else_is_weighed(encoding: str) -> None:
    """In UTF-16, "∀" has the byte of a quote, so that all that follows would be weighed as text."""
    body = ('{"prompt": "a", "user": "' + ("é" if encoding == "cp1252" else "∀") + '"}').encode(encoding)
    with pytest.raises(InvalidArgumentError, match="must be JSON in UTF-8"):
        read_request(body, max_prompts=1)
    assert read_request('{"prompt": "∀"}'.encode("utf-8-sig"), max_prompts=1).prompts == ("∀",), "its mark may come"


async def test_who_waits_for_an_answer_about_the_model_is_told_it_also_if_it_is_an_error() -> None:
    """One after the other, each waiting for as long as a router may take, the last one would have no deadline."""
    asked, answers, questions = asyncio.Event(), asyncio.Event(), itertools.count(1)

    async def get_cluster(**_: Any) -> Any:
        number = next(questions)
        asked.set()
        await answers.wait()
        raise UnavailableError(f"no router answers, question {number}")

    client = SimpleNamespace(get_cluster=get_cluster)
    clients: Any = SimpleNamespace(lease=lambda token: nullcontext(client))
    catalog = Catalog(GatewayConfig(), clients)
    first = [asyncio.ensure_future(catalog.served("")) for _ in range(3)]
    await asyncio.wait_for(asked.wait(), WAIT_S)
    answers.set()
    found = await asyncio.wait_for(asyncio.gather(*first, return_exceptions=True), WAIT_S)
    assert [str(answer) for answer in found] == ["no router answers, question 1"] * 3
    with pytest.raises(UnavailableError, match="question 2"):
        await catalog.served("")


async def test_the_bytes_of_all_bodies_have_a_bound(model: str) -> None:
    body = json.dumps({"prompt": list(PROMPT), "max_tokens": 1}).encode()
    async with cluster(model) as fake, serving(fake, max_bodies_bytes=1000) as http:
        async with asking(http.gateway, 999) as (_, writer):
            writer.write(b" " * 990)
            await fake.until(lambda: http.gateway.room.used == 990)
            status, answer, headers = await http.post(body, headers=JSON_TYPE)
            assert (status, answer["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
            assert "990 of 1000 bytes" in answer["error"]["message"]
        await fake.until(lambda: http.gateway.room.used == 0)
        assert (await http.post(body, headers=JSON_TYPE))[0] == 200
        assert http.gateway.room.used == 0


def test_one_token_does_not_fill_a_room() -> None:
    """One body of it may, since a client with one request is in nobody's way for longer than it takes to send it."""
    room = Room(100)
    with room.hold("a") as first, room.hold("a") as second, room.hold("b") as other, room.hold("") as anyone:
        first(20)
        second(5)
        with pytest.raises(OverloadedError, match="this client's bodies of 25 of 25 bytes are held"):
            first(1)
        other(30)
        other(30)
        anyone(15)
        with pytest.raises(OverloadedError, match="room for 1 bytes more: bodies of 100 of 100 bytes are held"):
            other(1)
    assert room.used == 0
    assert not room._used_by
