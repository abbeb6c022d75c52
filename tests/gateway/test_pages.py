"""The files of the gateway's pages, and what a browser is told about them."""

import re
from pathlib import Path

import pytest

from corun.gateway.pages import FOLDER
from tests.clusters import cluster
from tests.gateway.serving import serving


async def test_files_are_sent_once_until_they_change(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for name, kind in (("style.css", "text/css"), ("frame.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
            async with http.session.get(f"{http.gateway.url}/page/{name}") as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                assert await answer.read() == (FOLDER / name).read_bytes()
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                tag = answer.headers["ETag"]
            async with http.session.get(f"{http.gateway.url}/page/{name}", headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")


@pytest.mark.parametrize("name", ["frame.html", "nothing.js", "..%2Fapp.py", "%2e%2e%2fapp.py"])
async def test_nothing_else_is_sent(model: str, name: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        status, _ = await http.get(f"/page/{name}")
        assert status == 404


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.html")), ids=lambda path: path.name)
def test_a_template_has_no_script_or_style_of_its_own(path: Path) -> None:
    """The policy forbids them, so a browser would leave them out."""
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]* src=\"/page/)|<style|\sstyle=|\son\w+=|javascript:|https?://", text) == []


def test_nothing_comes_from_elsewhere() -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|@import|url\(", text), path.name
