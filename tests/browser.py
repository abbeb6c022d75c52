"""A real headless Chromium for tests, driven over its own protocol. Tests that need it are skipped where it is missing.

Only Debian's package `chromium` is needed: the protocol is JSON on a WebSocket, which aiohttp speaks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
WAIT_S = 60.0
"""The longest wait for anything that has to happen, on a busy machine."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium")


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        """What the browser complained of: errors of scripts, and what the page's policy forbade."""

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    async def close(self) -> None:
        """Close the page, so that it takes no time any more."""
        await self.call("Page.close")

    async def open(self, url: str, *, headers: dict[str, str] | None = None) -> None:
        """Load a page, and wait until its scripts have been read."""
        if headers is not None:
            await self.call("Network.setExtraHTTPHeaders", headers=headers)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression, as JSON has it. Raises AssertionError if it throws."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true, and return its value. It may throw until then."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            is_true = f"const found = ({condition}); return found instanceof Node ? true : found;"
            script = f"(() => {{ try {{ {is_true} }} catch {{ return null; }} }})()"
            with contextlib.suppress(AssertionError):  # A page that is left has no scripts for a moment.
                if value := await self.evaluate(script):
                    return value
            assert asyncio.get_running_loop().time() < deadline, f"it did not come: {condition}"
            await asyncio.sleep(0.02)

    async def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(await self.evaluate(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, such as "Tab" or "ArrowRight"."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        values = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **values, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    async def hover(self, selector: str) -> None:
        """Move the pointer over an element."""
        box = f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
        x, y = await self.evaluate(f"{box} return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def write(self, text: str) -> None:
        """Write into the field that has the focus."""
        await self.call("Input.insertText", text=text)

    async def heard(self) -> list[tuple[str, str]]:
        """Return role and name of all that a screen reader meets, in order: Chromium's accessibility tree."""
        await self.call("Accessibility.enable")
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node.get("ignored")
        ]

    async def look(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))


class Browser:
    """A running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        """Call a method of the browser's protocol, and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._socket.send_json(message)
        found = await asyncio.wait_for(answer, WAIT_S)
        assert "error" not in found, (method, found["error"])
        return found["result"]

    async def page(
        self, *, width: int = 1280, height: int = 900, scheme: str = "light", scripts: bool = True, touch: bool = False
    ) -> Page:
        """Return a new page, with nothing stored from others. scheme: the colours that the system prefers."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        await page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # Otherwise only one page has keys.
        return page

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if (answer := self._answers.pop(found.get("id", 0), None)) is not None:
                answer.set_result(found)
            elif (page := self._pages.get(found.get("sessionId", ""))) is not None:
                page.complaints += _complaints(found)
        for answer in self._answers.values():
            answer.cancel()


def _complaints(event: dict[str, Any]) -> list[str]:
    params = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        return [str(params["exceptionDetails"])]
    if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
        return [f"{params['entry']['source']}: {params['entry']['text']} {params['entry'].get('url', '')}"]
    return []


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run a browser with a profile of its own."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="corun-browser-", ignore_cleanup_errors=True) as profile:
        command = (CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank")
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*command, **quiet)  # type: ignore[arg-type]
        try:
            port, path = await _address(Path(profile) / "DevToolsActivePort", process)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket,
            ):
                running = Browser(socket)
                yield running
                with contextlib.suppress(AssertionError, asyncio.CancelledError):
                    await running.call("Browser.close")
                await running._reading
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(file: Path, process: asyncio.subprocess.Process) -> tuple[str, str]:
    """Wait for the browser to say where it listens."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while True:
        assert process.returncode is None, "Chromium does not start"
        with contextlib.suppress(OSError, ValueError):
            port, path = (await asyncio.to_thread(file.read_text)).split()
            return port, path
        assert asyncio.get_running_loop().time() < deadline, "Chromium does not listen"
        await asyncio.sleep(0.05)
