"""The playground in a real browser: a prompt alone and in a crowd, a node that is killed, and a server that differs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from corun.gateway.playground import LOOPBACK, UNKNOWN
from tests.browser import Browser, Page, browser, needs_chromium
from tests.clusters import FakeCluster, cluster
from tests.gateway.foreign import PARTS_AT, foreign
from tests.gateway.serving import Http, serving, with_tokens
from tests.gateway.test_kills import supervisor

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
STEP_MS = 10.0
"""The pace of fake engines, so that a run lasts for as long as a browser needs to do something in it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One browser for all tests here: each page has a profile of its own."""
    async with browser() as running:
        yield running


@asynccontextmanager
async def playground(
    model: str, chromium: Browser, *, kills: Path | None = None, refused: str = "", width: int = 1280, **settings: Any
) -> AsyncIterator[tuple[FakeCluster, Http, Page]]:
    """The playground of a cluster with two decode nodes, in a page that complains of nothing.

    kills: a directory for the socket at which nodes are killed; None: nobody kills any. refused: why it kills none.
    """
    async with AsyncExitStack() as stack:
        # A browser and a busy machine hold everybody up at times. That is no reason to lose a node.
        fake = await stack.enter_async_context(cluster(model, decodes=2, heartbeat_timeout_ms=60_000))
        for node in fake.nodes:
            node.engine.step_ms = STEP_MS
        if kills is not None:
            settings |= await stack.enter_async_context(supervisor(fake, kills, refused))
        http = await stack.enter_async_context(serving(fake, **settings))
        page = await chromium.page(width=width)
        await page.open(http.gateway.url + "/playground")
        await said(page, "Ready: ")
        yield fake, http, page
        assert page.complaints == []


async def said(page: Page, text: str) -> str:
    """Wait until the page says this and maybe more, and return all of it."""
    return str(
        await page.until(f"(t => t.startsWith({json.dumps(text)}) && t)(document.querySelector('#said').textContent)")
    )


async def ended(page: Page, run: str) -> str:
    """Wait until a run and what it is part of have ended, and return what the page says of it."""
    await page.until(
        f"['done', 'failed'].includes(document.querySelector('#run-{run} .state').textContent)"
        " && document.querySelector('#stop').hidden"
    )
    return await page.text("#said")


async def fill(page: Page, **values: Any) -> None:
    for name, value in values.items():
        script = (
            f"(e => {{ e.value = {json.dumps(str(value))}; e.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        )
        await page.evaluate(f"{script}(document.querySelector('#{name.replace('_', '-')}'))")


async def click(page: Page, selector: str) -> None:
    await page.evaluate(f"document.querySelector({selector!r}).click()")


async def column(page: Page, run: str) -> list[str]:
    """The text of a run's cells in the table."""
    cells = f"[...document.querySelectorAll('#bits tbody [data-run={run}]')].map(cell => cell.textContent)"
    return list(await page.evaluate(cells))


def hexes(cells: list[str]) -> list[str]:
    return [cell[:8] for cell in cells]


@needs_chromium
async def test_bits_agree_in_a_crowd(model: str, chromium: Browser) -> None:
    """What the page shows are the bits that any client gets, and no request of it comes before others' requests."""
    async with playground(model, chromium) as (fake, http, page):
        await fill(page, max_tokens=24, size=12, seed=str(2**59 + 1))
        await click(page, "#start")
        verdict = await ended(page, "crowd")
        assert verdict.startswith("Every bit agrees: 24 tokens and 24 log probabilities, alone and beside ")
        assert re.search(r"beside [1-9]\d* neighbours? that drew [1-9]\d* tokens?\.$", verdict)
        asked = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 2**59 + 1}
        answer = await http.complete(**asked, logprobs=0)
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        bits = await page.evaluate(
            f"import('/page/experiment.js').then(made => {values}.map(value => made.bitsOf(value)))"
        )
        assert hexes(await column(page, "alone")) == hexes(await column(page, "crowd")) == bits
        assert {cell[8:] for cell in await column(page, "crowd")} == {"same bits"}
        digest = answer["choices"][0]["corun"]["receipt"]["output_digest"]
        assert digest[:16] in await page.text("#run-crowd")
        await fake.idle()  # The crowd has ended with the run.
        await fill(page, max_tokens=25)
        assert not await page.evaluate("document.querySelector('#bits').checkVisibility()"), "they are not of this form"


@needs_chromium
async def test_a_crowd_leaves_with_its_page_and_when_it_is_stopped(model: str, chromium: Browser) -> None:
    async with playground(model, chromium) as (fake, http, page):
        leaving = await chromium.page()
        await leaving.open(http.gateway.url + "/playground")
        for each in (page, leaving):
            await said(each, "Ready: ")
            await fill(each, max_tokens=400, prompt="a", size=64)
            await click(each, "#start")
            await each.until("document.querySelectorAll('#run-alone .strip i').length > 5")
        await click(page, "#stop")
        assert await said(page, "Stopped.")
        assert http.gateway.activity.running > 0
        await leaving.open("about:blank#left")
        await fake.until(lambda: http.gateway.activity.running == 0)
        await fake.idle()
        assert await page.text("#run-alone .state") == "stopped"


@needs_chromium
async def test_a_node_is_killed_and_the_stream_goes_on(model: str, chromium: Browser, tmp_path: Path) -> None:
    async with playground(model, chromium, kills=tmp_path) as (fake, _, page):
        await fill(page, max_tokens=80, size=6)
        assert await page.evaluate("document.querySelector('#kill').disabled")
        await click(page, "#start")
        await ended(page, "crowd")
        await page.until("!document.querySelector('#kill').disabled")
        await click(page, "#kill")
        verdict = await ended(page, "kill")
        found = re.search(r"(d\d) was killed after token (\d+), and the stream went on\.$", verdict)
        assert verdict.startswith("Every bit agrees: 80 tokens"), verdict
        assert found is not None, verdict
        assert fake.node(found[1]).life.done()
        cells = await column(page, "kill")
        assert hexes(cells) == hexes(await column(page, "alone"))
        assert [i for i, cell in enumerate(cells) if f"{found[1]} killed" in cell] == [int(found[2])]


@needs_chromium
@pytest.mark.parametrize("settings", [{}, {"allow_kills": True}], ids=["not allowed", "nobody to ask"])
async def test_the_page_says_why_no_node_can_be_killed(model: str, chromium: Browser, settings: dict[str, Any]) -> None:
    async with playground(model, chromium, **settings) as (_, http, page):
        assert not await page.evaluate("document.querySelector('#kill')")
        _, answer = await http.get("/playground/kill")
        assert await page.text("#kill-why") == f"Nodes cannot be killed from here: {answer['refused']}."


@needs_chromium
async def test_a_supervisor_that_refuses_is_heard(model: str, chromium: Browser, tmp_path: Path) -> None:
    why = "decode-1 is not in use yet"
    async with playground(model, chromium, kills=tmp_path, refused=why) as (_, _, page):
        await page.until(f"document.querySelector('#kill-why').textContent.includes('{why}.')")
        assert await page.evaluate("document.querySelector('#kill').disabled")


@needs_chromium
async def test_bits_that_differ_are_shown(model: str, chromium: Browser) -> None:
    """Negative control: a node gives another last token, and the page must see it. The router does not compare runs."""
    async with playground(model, chromium) as (fake, _, page):
        await fill(page, max_tokens=20)
        await click(page, "#start")
        await ended(page, "crowd")
        for node in fake.nodes:
            if node.info.slots:
                node.engine.corrupt = True
        await click(page, "#again")
        verdict = await ended(page, "crowd")
        (first,) = (await column(page, "alone"))[:1]
        assert verdict.startswith("They part at token 1: alone ")
        assert f"with {first}, in the crowd " in verdict
        assert verdict.endswith("with bf800000.")  # -1
        assert await page.evaluate("document.querySelector('#bits tbody tr.first').rowIndex") == 1
        assert await page.evaluate("document.querySelectorAll('#run-crowd .strip .other').length") == 20


@needs_chromium
async def test_a_foreign_server_parts(model: str, chromium: Browser) -> None:
    """The browser calls it, and shows it nothing of this cluster."""
    async with foreign() as (other, url), playground(model, chromium) as (fake, http, page):
        await page.evaluate("import('/page/frame.js').then(frame => frame.keepToken('a-token-of-this-cluster'))")
        await click(page, "[value=foreign]")
        await fill(page, url=url, max_tokens=12, size=5)
        await click(page, "#start")
        verdict = await ended(page, "crowd")
        assert verdict.startswith(f'They part at token {PARTS_AT + 1}: alone " {PARTS_AT}" with ')
        alone, crowd = hexes(await column(page, "alone")), hexes(await column(page, "crowd"))
        assert alone[:PARTS_AT] == crowd[:PARTS_AT]
        assert not set(zip(alone[PARTS_AT:], crowd[PARTS_AT:], strict=True)) & {(bits, bits) for bits in alone}
        known = {"model", "prompt", "max_tokens", "temperature", "stream", "logprobs", "seed"}
        assert all(body.keys() <= known for body in other.asked), "only OpenAI's own fields"
        assert not any("Authorization" in headers for headers in other.headers)
        assert not any(node.drawn_tokens for node in fake.nodes if node.info.slots)
        assert http.gateway.activity.running == 0


@needs_chromium
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://10.0.0.1:8001/v1", "must be http on 127.0.0.1 or localhost, or be allowed by the operator"),
        ("nothing", "the server's address must be a URL"),
        ("http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1 is not there, or does not allow this page's origin (CORS)."),
        ("without CORS", "is not there, or does not allow this page's origin (CORS)."),
    ],
)
async def test_a_foreign_server_that_cannot_be_called(model: str, chromium: Browser, address: str, why: str) -> None:
    async with foreign(cors=False) as (_, url), cluster(model) as fake, serving(fake) as http:
        page = await chromium.page()
        await page.open(http.gateway.url + "/playground")
        await said(page, "Ready: ")
        await click(page, "[value=foreign]")
        await fill(page, url=url if address == "without CORS" else address)
        await click(page, "#start")
        text = await page.until("(e => e.className.includes('bad') && e.textContent)(document.querySelector('#said'))")
        assert why.lower() in str(text).lower()


@needs_chromium
async def test_a_cluster_that_is_away_and_comes_back(model: str, chromium: Browser) -> None:
    async with cluster(model) as fake:
        router = fake.router.server.port
        async with serving(fake, connect_timeout_s=0.2, timeout_s=2) as http:
            await fake.kill_router()
            page = await chromium.page()
            await page.open(http.gateway.url + "/playground")
            assert str(router) in str(await page.until("document.querySelector('#said.bad')?.textContent"))
            await fake.restart_router()
            await fake.ready("p1", "d1")
            await said(page, "Ready: ")
            await fill(page, max_tokens=8)
            await click(page, "#start")
            assert (await ended(page, "crowd")).startswith(("Every bit agrees: 8 tokens", "All bits agree"))


@needs_chromium
async def test_a_token_is_asked_for(model: str, chromium: Browser, tmp_path: Path) -> None:
    async with with_tokens(model, tmp_path) as (_, http, secrets):
        page = await chromium.page()
        await page.open(http.gateway.url + "/playground")
        await page.until("document.querySelector('#sign-in').open")
        await page.write(secrets.token("client"))
        await page.press("Enter")
        await said(page, "Ready: ")
        await fill(page, max_tokens=8)
        await click(page, "#start")
        assert " agree" in await ended(page, "crowd")
        assert secrets.token("client") not in await page.evaluate("location.href + document.documentElement.outerHTML")


@needs_chromium
async def test_keys_alone_and_a_phone(model: str, chromium: Browser) -> None:
    async with playground(model, chromium, width=360) as (_, _, page):
        await fill(page, max_tokens=8)
        await page.evaluate("document.querySelector('#prompt').focus()")
        for _ in range(12):
            if await page.evaluate("document.activeElement.id === 'start'"):
                break
            await page.press("Tab")
        await page.press("Enter")
        await page.until("document.activeElement.id === 'stop'")
        await ended(page, "crowd")
        assert await page.evaluate("document.activeElement.id") == "start"
        assert await page.evaluate("document.documentElement.scrollWidth") == 360


@needs_chromium
async def test_without_javascript_the_page_says_what_to_do_instead(model: str, chromium: Browser) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        page = await chromium.page(scripts=False)
        await page.open(http.gateway.url + "/playground")
        text = await page.text()
        assert "needs JavaScript" in text
        assert f"curl -s {http.gateway.url}/v1/completions" in text
        assert not await page.evaluate("document.querySelector('#start').checkVisibility()")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
async def test_the_shell_gives_the_same_experiment(model: str, tmp_path: Path) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        async with http.session.get(http.gateway.url + "/playground") as answer:
            text = await answer.text()
        found = re.search(r"<pre[^>]*><code>(.*?)</code></pre>", text, re.DOTALL)
        assert found is not None
        script = found[1].replace("&gt;", ">").replace("&amp;", "&").replace("&#39;", "'").replace("&#34;", '"')
        file = tmp_path / "experiment.sh"
        file.write_text(script)
        options: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
        done = await asyncio.to_thread(subprocess.run, ["bash", str(file)], **options)
        names, digests = zip(*(line.split(":", 1) for line in done.stdout.split("\n")[:-1]), strict=True)
        assert names == ("alone.json", "crowd.json")
        assert digests[0] == digests[1] != ""


async def test_the_policy_lets_the_page_call_no_others(model: str) -> None:
    others = "https://vllm.example.org:8001,http://10.0.0.1"
    async with cluster(model) as fake, serving(fake, foreign_origins=others) as http:
        async with http.session.get(http.gateway.url + "/playground") as answer:
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
            text = await answer.text()
        assert policy["connect-src"].split() == ["'self'", *LOOPBACK, *others.split(",")]
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert f'data-origins="{others}"' in text


@pytest.mark.parametrize("host", ['a"><script>x', "a;rm -rf $(x)", "a:b", "[::1"])
async def test_a_host_that_a_client_made_up_is_shown_to_nobody(model: str, host: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        async with http.session.get(http.gateway.url + "/playground", headers={"Host": host}) as answer:
            text = await answer.text()
        assert answer.status == 200
        assert host not in text
        assert f"curl -s {UNKNOWN}/v1/completions" in text
