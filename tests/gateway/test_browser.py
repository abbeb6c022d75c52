"""The live page in a real headless Chromium: what is drawn, read and reached, in each state of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.gateway import watch
from corun.params import SamplingParams
from corun.rpc.channel import Access
from tests.browser import Browser, Page, browser, needs_chromium
from tests.clusters import FakeCluster, cluster
from tests.gateway.serving import Http, serving
from tests.router.asking import token_of, with_tokens

pytestmark = needs_chromium
PARAMS = SamplingParams(max_tokens=400)
LIVE = "document.querySelector('.top .pill [data-k=state]').textContent === 'serving'"


@asynccontextmanager
async def looking(model: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A cluster, a gateway that asks often, and a browser."""
    monkeypatch.setattr(watch, "INTERVAL_S", 0.1)
    async with cluster(model, **settings) as fake, serving(fake) as http, browser() as chromium:
        yield fake, http, chromium


@asynccontextmanager
async def held(fake: FakeCluster, count: int, token: str = "") -> AsyncIterator[None]:
    """Samples that decode and do not end while the context lasts: as many as there are slots, and the others wait."""
    decodes = [node for node in fake.nodes if node.ref.node_id.startswith("d")]
    async with AsyncClient(fake.address, token=token) as client, AsyncExitStack() as ends:
        asked = (client.generate([1, 2], PARAMS, seed=70 + i, request_id=f"request-{i}") for i in range(count))
        running = [asyncio.ensure_future(each) for each in asked]
        slots = sum(node.info.slots for node in decodes)
        nodes = [node.client for node in fake.router.registry.decodes.values()]
        for node in decodes:
            node.engine.step_ms = 20.0

        def decoding() -> int:
            return sum(lease.first_row_at is not None for client in nodes for lease in client.leases)

        await fake.until(lambda: decoding() >= min(slots, count))
        for node in decodes:
            node.engine.hanging = True
        try:
            yield
        finally:
            for node in decodes:
                node.engine.hanging, node.engine.step_ms = False, 1.0
            await asyncio.gather(*running)
        await ends.aclose()


async def opened(chromium: Browser, http: Http, **how: Any) -> Page:
    page = await chromium.page(**how)
    await page.open(http.gateway.url + "/")
    return page


async def test_slots_by_pointer_and_keyboard(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(model, monkeypatch) as (fake, http, chromium):
        page = await opened(chromium, http)
        await page.until(f"{LIVE} && document.querySelectorAll('.grid td').length === 8")
        assert await page.evaluate("document.querySelectorAll('.grid td.none').length") == 8
        async with held(fake, 3):
            await page.until("document.querySelectorAll('.grid td.R').length === 3")
            await page.hover(".grid td")
            text = await page.until("document.getElementById('tip').innerText")
            assert "slot 0, running" in text
            assert "request-" in text
            assert "of 400" in text
            await page.evaluate("document.querySelector('.grid td').focus()")
            for key in ("ArrowRight", "ArrowRight"):
                await page.press(key)
            label = await page.until("document.activeElement.getAttribute('aria-label')")
            assert label.startswith("slot 2, running, request request-")
            assert ", seed 7" in label
            assert await page.evaluate("document.querySelectorAll('.grid td[tabindex=\"0\"]').length") == 1
            await page.press("ArrowDown")
            assert "slot 6, empty" in await page.text("#tip")
            await page.press("Escape")
            assert await page.evaluate("document.getElementById('tip').hidden")
            await page.evaluate("document.querySelector('details.samples').open = true")
            await page.until("document.querySelectorAll('.samples tbody tr').length === 3")
            assert "request-2" in await page.text(".samples")
        await page.until("document.querySelectorAll('.grid td.R').length === 0")
        assert page.complaints == []


NAMED = {"button", "checkbox", "combobox", "form", "grid", "gridcell", "image", "link", "radio", "region", "slider"}
NAMED |= {"spinbutton", "table", "textbox"}
"""The roles of what a screen reader stops at. Without a name it would say no more than the role."""


async def test_a_screen_reader_hears_a_name_of_everything(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(model, monkeypatch) as (fake, http, chromium):
        page = await opened(chromium, http)
        await page.until(f"{LIVE} && document.querySelectorAll('.grid td').length === 8")
        without = await chromium.page(scripts=False)
        async with held(fake, 3):
            await page.until("document.querySelectorAll('.grid td.R').length === 3")
            await page.hover(".grid td")
            await page.until("document.getElementById('tip').innerText")
            heard = await page.heard()
            slots = [name for role, name in heard if role == "gridcell"]
            assert slots[0].startswith("slot 0, running, request request-"), "more is said of the slot at the pointer"
            assert slots[1:] == [
                "slot 1, running",
                "slot 2, running",
                *(f"slot {place}, empty" for place in range(3, 8)),
            ]
            await without.open(http.gateway.url + "/")
            assert [name for role, name in await without.heard() if role == "gridcell"] == [
                "slot 0, running",
                *slots[1:],
            ]
        await page.until("document.querySelectorAll('.grid td.R').length === 0")
        await page.hover("h1")
        await page.until("document.querySelector('.grid td').getAttribute('aria-label') === 'slot 0, empty'")
        assert {"banner", "main", "navigation", "status"} <= {role for role, _ in await page.heard()}
        playground = await chromium.page()
        await playground.open(http.gateway.url + "/playground")
        for each in (page, without, playground):
            assert [role for role, name in await each.heard() if role in NAMED and not name] == []
        await page.evaluate("document.querySelector('.grid td').removeAttribute('aria-label')")
        assert [role for role, name in await page.heard() if role in NAMED and not name] == ["gridcell"]


@pytest.mark.slow
async def test_every_number_is_one_step_from_its_definition(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(model, monkeypatch) as (_, http, chromium):
        for scripts in (True, False):
            page = await opened(chromium, http, scripts=scripts)
            await page.press("Tab")
            seen = []
            for _ in range(60):
                await page.press("Tab")
                name = await page.evaluate("document.activeElement.getAttribute('popovertarget') ?? ''")
                if not name or name in seen:
                    continue
                seen.append(name)
                await page.press("Enter")
                assert await page.evaluate(f"document.getElementById({name!r}).matches(':popover-open')"), name
                assert len(await page.text(f"#{name}")) > 40
                await page.press("Escape")
            labels = await page.evaluate("[...document.querySelectorAll('.tile dt button')].length")
            assert labels == 14
            assert len(seen) > labels
            assert page.complaints == []


async def test_a_lost_node_and_a_mismatch_are_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(model, monkeypatch, decodes=2) as (fake, http, chromium):
        page = await opened(chromium, http)
        await page.until(f"{LIVE} && document.querySelectorAll('.node').length === 2")
        await fake.kill("d1")
        await page.until("document.getElementById('alerts').innerText.includes('d1 is lost')")
        assert await page.evaluate("document.querySelector('.node').classList.contains('bad')")
        fake.router.registry.mismatches += 1
        await page.until("document.getElementById('alerts').innerText.includes('1 sample gave other bits')")
        await page.until("document.querySelector('[data-tile=mismatches]').classList.contains('bad')")
        assert await page.evaluate("document.querySelectorAll('#alerts .note.bad').length") == 2
        await fake.add_decode("d3")
        await page.until("document.querySelectorAll('.node').length === 3")
        assert page.complaints == []


ASKED = "const real = window.fetch; window.asked = []; window.fetch = (...all) => (asked.push(all[0]), real(...all));"
"""Notes what the page asks the gateway for."""


async def test_a_token_is_asked_for_and_stays_in_the_tab(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = token_of("alice")
    settings = with_tokens(tmp_path, "ops operator", "alice")
    async with looking(model, monkeypatch, client=Access(token=token), **settings) as (fake, http, chromium):
        page = await opened(chromium, http)
        assert "wants a token" in await page.text("main")
        await page.evaluate(f"(() => {{ {ASKED} }})()")
        for given, expected in (("y" * 20, "'.why, .gate .dim'"), (token, "'.top'")):
            await page.evaluate("document.getElementById('page-token').focus()")
            await page.write(given)
            await page.press("Enter")
            await page.until(f"document.querySelector({expected}) && !document.querySelector('main[aria-busy]')")
            await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            # Whoever writes a token, and looks for it in another tab, must find the field as it was.
            assert given == token or await page.evaluate("asked") == ["/"]
        await page.until(LIVE)
        assert await page.evaluate("location.href") == http.gateway.url + "/"
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        await page.open(http.gateway.url + "/")
        await page.until(LIVE)
        await page.evaluate("document.getElementById('forget').click()")
        await page.until("document.body.innerText.includes('wants a token')")
        without = await opened(chromium, http, scripts=False)
        await without.evaluate("document.getElementById('page-token').focus()")
        await without.write(token)
        await without.press("Enter")
        await without.until("document.querySelector('.top')")
        assert await without.evaluate("document.querySelectorAll('.grid td').length") == 8
        assert await without.evaluate("location.href") == http.gateway.url + "/"
        unasked = [text for text in (*page.complaints, *without.complaints) if "401" not in text]
        assert unasked == []
        assert fake.router.router_id in await without.text("main")


@pytest.mark.slow
async def test_it_works_in_every_state_on_every_screen(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wider than the screen, and the policy forbids nothing that the page does. The pictures are kept for
    people to look at."""
    async with looking(model, monkeypatch, prefills=0, decodes=0, slots=256) as (fake, http, chromium):
        screens = {
            "desktop": {},
            "dark": {"scheme": "dark"},
            "phone": {"width": 390, "height": 844, "touch": True},
            "without-scripts": {"scripts": False},
        }

        async def look(state: str) -> None:
            for name, how in screens.items():
                page = await opened(chromium, http, **how)
                await page.until("document.querySelector('.top')")
                await asyncio.sleep(0.5)  # Some curves.
                wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
                assert not await page.evaluate(wide), (state, name)
                assert page.complaints == [], (state, name)
                await page.look(tmp_path / f"{state}-{name}.png")
                await page.close()

        await look("empty")
        for name in ("p1", "p2"):
            await fake.add_prefill(name)
        for name in ("d1", "d2"):
            await fake.add_decode(name, slots=256)
        await fake.ready("p1", "p2", "d1", "d2")
        async with held(fake, 40):
            await look("busy")
            await fake.kill("d2")
            fake.router.registry.mismatches += 1
            await look("lost-and-mismatch")
        page = await opened(chromium, http)
        await page.until(LIVE)
        await http.gateway.drain()
        await page.until("document.querySelector('.top .pill').innerText.includes('not connected')")


@pytest.mark.slow
async def test_colours_can_be_chosen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(model, monkeypatch) as (_, http, chromium):
        page = await opened(chromium, http, scheme="dark")
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        dark = await page.evaluate(ground)
        await page.evaluate("document.getElementById('theme').click()")
        light = await page.evaluate(ground)
        assert dark != light
        await page.open(http.gateway.url + "/")
        assert await page.evaluate(ground) == light, "the choice stays"
