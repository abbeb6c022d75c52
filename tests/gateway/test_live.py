"""The live page over HTTP: readable without scripts, streamed from one question, and only what a token may see."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corun.client.client import AsyncClient
from corun.errors import OverloadedError, UnavailableError
from corun.gateway import watch
from corun.gateway.app import Gateway
from corun.gateway.config import GatewayConfig
from corun.gateway.pages import Pages
from corun.params import SamplingParams
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.types import NodeState
from tests.clusters import FakeCluster, cluster
from tests.gateway.serving import Http, serving
from tests.router.asking import token_of, with_tokens

OPERATOR, ALICE, BOB = token_of("ops"), token_of("alice"), token_of("bob")
PARAMS = SamplingParams(max_tokens=400)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


async def page(http: Http, token: str = "", *, form: bool = False) -> tuple[int, str, Any]:
    """The status, text and headers of the page."""
    session, url = http.session, http.gateway.url + "/"
    asked = session.post(url, data={"token": token}) if form else session.get(url, headers=bearer(token))
    async with asked as answer:
        return answer.status, await answer.text(), answer.headers


@asynccontextmanager
async def events(http: Http, token: str = "") -> AsyncIterator[AsyncIterator[Any]]:
    async with http.session.get(http.gateway.url + "/live", headers=bearer(token)) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"

        async def each() -> AsyncIterator[Any]:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield each()


@asynccontextmanager
async def held(fake: FakeCluster, token: str, request_id: str, seed: int) -> AsyncIterator[None]:
    """A sample that decodes and does not end while the context lasts."""
    engine, router = fake.nodes[-1].engine, fake.router
    async with AsyncClient(fake.address, token=token) as client:
        node = next(iter(router.registry.decodes.values())).client
        before = len(node.leases)
        engine.hanging = False
        running = asyncio.ensure_future(client.generate([1, 2, 3], PARAMS, seed=seed, request_id=request_id))
        await fake.until(lambda: len([one for one in node.leases if one.first_row_at]) == before + 1)
        engine.hanging = True
        try:
            yield
        finally:
            engine.hanging = False
            await running


async def test_it_is_readable_without_scripts(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http, held(fake, "", "of-somebody", 4242):
        status, text, headers = await page(http)
        assert status == 200
        for expected in (Path(model).name, "serving", fake.router.registry.contract.fingerprint, fake.router.router_id):
            assert expected in text
        rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
        told = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)] for row in rows]
        (sample,) = (cells for cells in told if "of-somebody" in cells)
        assert sample[:3] == ["0", "running", "of-somebody"]
        assert re.fullmatch(r"\d+ of 400", sample[3])
        assert sample[4] == "4242"
        assert text.count('class="c R"') == 2, "one slot, and the legend"
        for node in fake.nodes:
            assert node.ref.node_id in text
            assert node.ref.generation in text
        assert '<noscript><meta http-equiv="refresh"' in text
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "[1, 2, 3]" not in text


async def test_a_page_is_written_once_for_a_view(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it takes the gateway longer than all else, and anybody may ask for it."""
    written = []
    render = Pages.render

    def noting(self: Pages, name: str, **values: Any) -> Any:
        written.append(name)
        return render(self, name, **values)

    monkeypatch.setattr(Pages, "render", noting)
    monkeypatch.setattr(watch, "INTERVAL_S", 3600.0)
    async with cluster(model) as fake, serving(fake) as http:
        pages = {(await page(http))[:2] for _ in range(5)}
        assert (len(pages), len(written)) == (1, 1)
        assert (await page(http, "", form=True))[1] not in pages, "it does not load itself again"
        assert len(written) == 2


async def test_names_from_outside_are_text(model: str) -> None:
    name = "<script>alert(1)</script>"
    async with cluster(model) as fake, serving(fake) as http, held(fake, "", name, 1):
        _, text, _ = await page(http)
        assert name not in text
        assert "&lt;script&gt;alert(1)" in text


async def test_many_viewers_are_one_question(model: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    monkeypatch.setattr(watch, "LINGER_S", 0.2)
    async with cluster(model) as fake, serving(fake) as http:
        await page(http)  # Nothing else asks from now on.
        before = len(asked)
        counts = [0] * 8

        async def look(number: int) -> None:
            async with events(http) as each:
                async for view in each:
                    assert view["texts"]["state"] == "serving"
                    counts[number] += 1
                    if counts[number] == 20:
                        return

        await asyncio.gather(*map(look, range(8)))
        assert counts == [20] * 8
        assert len(asked) - before <= 20 + 8, "the viewers begin at other times"
        assert all(one.with_samples and one.without_contracts for one in asked[before:])
        await fake.until(lambda: not http.gateway.live.watch._sources)
        after = len(asked)
        await asyncio.sleep(0.2)
        assert len(asked) == after, "nobody looks"
        await page(http)
        assert len(asked) == after + 1


async def test_a_token_opens_the_page_and_shows_what_is_its_own(model: str, tmp_path: Path) -> None:
    settings = with_tokens(tmp_path, "ops operator", "alice", "bob")
    async with cluster(model, client=Access(token=ALICE), **settings) as fake, serving(fake) as http:
        for status, text, headers in (await page(http), await page(http, "x" * 20), await page(http, "", form=True)):
            assert status == 401
            assert headers["WWW-Authenticate"] == "Bearer"
            assert '<form class="token"' in text
            assert fake.router.router_id not in text
        for token in ("", "x" * 20):
            assert (await http.get("/live", headers=bearer(token)))[0] == 401
        async with held(fake, ALICE, "of-alice", 777777), held(fake, BOB, "of-bob", 888888):
            for token, own, other in ((ALICE, "alice", "bob"), (BOB, "bob", "alice")):
                seeds = {"alice": "777777", "bob": "888888"}
                for form in (False, True):
                    status, text, _ = await page(http, token, form=form)
                    assert status == 200
                    assert f"of-{own}" in text
                    assert seeds[own] in text
                    assert f"of-{other}" not in text
                    assert seeds[other] not in text
                    assert token not in text
                    assert text.count('class="c R"') == 3, "that there are others is no secret"
                async with events(http, token) as each:
                    text = json.dumps(await each.__anext__())
                    assert f"of-{own}" in text
                    assert f"of-{other}" not in text
                    assert seeds[other] not in text
            _, text, _ = await page(http, OPERATOR)
            assert "of-alice" in text
            assert "of-bob" in text


async def test_who_may_no_longer_look_is_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    settings = with_tokens(tmp_path, "ops operator", "alice")
    async with cluster(model, client=Access(token=OPERATOR), **settings) as fake, serving(fake) as http:
        async with events(http, ALICE) as each:
            assert (await each.__anext__())["texts"]["state"] == "serving"
            with_tokens(tmp_path, "ops operator")
            async for view in each:
                if "error" in view:
                    break
            assert view["error"]["code"] == 401
        assert (await page(http, ALICE))[0] == 401


async def test_the_state_goes_on_over_trouble(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node is an alert, and so is a router that does not answer; neither ends the stream."""
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    async with (
        cluster(model, decodes=2) as fake,
        serving(fake, connect_timeout_s=0.5) as http,
        events(http) as each,
    ):

        async def until(text: str) -> Any:
            async for view in each:
                if any(text in alert for _, alert in view["alerts"]):
                    return view
            raise AssertionError("the stream ended")

        await fake.nodes[1].kill()
        view = await asyncio.wait_for(until("d1 is lost"), WAIT_S)
        assert view["texts"]["state"] == "serving"
        await fake.kill_router()
        view = await asyncio.wait_for(until("does not answer"), WAIT_S)
        assert (view["texts"]["state"], view["colours"]["state"]) == ("no answer", "bad")
        await fake.restart_router()
        await asyncio.wait_for(_serving(each), WAIT_S)
        await fake.until(lambda: fake.state("d2") is NodeState.READY)


async def _serving(each: AsyncIterator[Any]) -> None:
    async for view in each:
        if view["texts"]["state"] == "serving":
            return


async def test_a_gateway_without_a_cluster_says_so() -> None:
    gateway = Gateway(GatewayConfig(port=0, router="127.0.0.1:1", connect_timeout_s=0.2))
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as session:
            status, text, _ = await page(Http(gateway=gateway, session=session))
            assert status == 200
            assert "The cluster does not answer" in text
    finally:
        await gateway.stop()


async def test_there_is_a_limit_to_who_watches(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS_OF_TOKEN", 2)
    async with cluster(model) as fake, serving(fake) as http, events(http) as one, events(http) as two:
        await one.__anext__()
        await two.__anext__()
        status, answer = await http.get("/live")
        assert status == 429
        assert "2 of 2 watch" in answer["error"]["message"]


async def test_who_looks_in_the_moment_in_which_questions_end_starts_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task is done a turn of the loop before it is forgotten."""
    monkeypatch.setattr(watch, "LINGER_S", 0.02)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)

    class Silent:
        def lease(self, token: str) -> Any:
            raise UnavailableError("no router answers")

    watched = watch.Watch(Silent())  # type: ignore[arg-type]
    views = watched.events("")
    await anext(views)
    (source,) = watched._sources.values()

    async def look_again() -> None:
        while not source.task.done():  # noqa: ASYNC110 - An event would be told a turn later.
            await asyncio.sleep(0)
        assert list(watched._sources.values()) == [source]
        await anext(views)

    await asyncio.wait_for(look_again(), WAIT_S)
    assert len(watched._sources) == 1
    watched.end(UnavailableError("the end"))
    with pytest.raises(UnavailableError, match="the end"):
        await anext(views)


async def test_a_gateway_that_ends_says_so(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http, events(http) as each:
        await each.__anext__()
        ended = asyncio.ensure_future(http.gateway.drain())
        views = [view async for view in each]
        assert views[-1]["error"]["code"] == 503
        await ended
        with pytest.raises(Exception, match="shutting down"):
            await http.gateway.live.watch.view("")


async def test_too_many_tokens(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = with_tokens(tmp_path, "ops operator", "alice", "bob")
    guarded = cluster(model, client=Access(token=OPERATOR), **settings)
    monkeypatch.setattr(watch, "MAX_TOKENS", 1)
    async with guarded as fake, serving(fake) as http:
        assert (await page(http, ALICE))[0] == 200
        with pytest.raises(OverloadedError, match="1 different tokens"):
            await http.gateway.live.watch.view(BOB)
        assert (await page(http, BOB))[0] == 429


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"token=" + b"x" * 4000, "application/x-www-form-urlencoded", 413),
        (b'{"token": "x"}', "application/json", 415),
        (b"\xff\xfe", "application/x-www-form-urlencoded", 200),
        (b"token=%00%ff", "application/x-www-form-urlencoded", 200),
    ],
)
async def test_hostile_forms(model: str, data: bytes, kind: str, status: int) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        sent = http.session.post(http.gateway.url + "/", data=data, headers={"Content-Type": kind})
        assert (await sent).status == status
