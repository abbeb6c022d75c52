"""The docs site builds, every link and anchor of it leads somewhere, and nothing in it comes from another host."""

from __future__ import annotations

import ast
import html
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "docs" / "tools"
TIMEOUT_S = 240
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
"""The attribute of each element whose file a browser loads by itself."""
RELATIONS = {"stylesheet", "icon", "preconnect", "dns-prefetch", "preload", "prefetch", "modulepreload", "manifest"}
"""The relations of `link` elements for which a browser opens a connection by itself."""


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. `--strict` makes an error of each link, anchor or page that leads nowhere."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


class Assets(HTMLParser):
    """Collects what a browser loads by itself when it opens a page, and what it would need another host for."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag == "link" and set(values.get("rel", "").split()) & RELATIONS:
            self.loaded.append(values["href"])
        if "srcset" in values:
            self.loaded += [part.split()[0] for part in values["srcset"].split(",")]
        if "mermaid" in values.get("class", "").split():  # The theme fetches mermaid's code from another host.
            self.loaded.append("https://mermaid")


def assets_of(text: str) -> list[str]:
    parser = Assets()
    parser.feed(text)
    return parser.loaded + re.findall(r"url\(['\"]?([^'\")]+)", text)


def is_foreign(address: str) -> bool:
    return address.startswith("//") or ("://" in address and not address.startswith("data:"))


def texts(site: Path, suffix: str) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob(f"*{suffix}")):
        yield str(path.relative_to(site)), path.read_text(encoding="utf-8")


def test_what_a_page_loads_is_there_and_not_of_another_host(site: Path) -> None:
    pages = dict(texts(site, ".html"))
    assert {"index.html", "tutorial.html", "sdk.html", "kubernetes.html"} <= pages.keys()
    assert {name: found for name, text in pages.items() if (found := [*filter(is_foreign, assets_of(text))])} == {}
    gone = {
        (name, asset)
        for name, text in pages.items()
        if name != "404.html"  # Its paths begin at the root of the host.
        for asset in assets_of(text)
        if not asset.startswith("data:") and not (site / name).parent.joinpath(asset.partition("?")[0]).is_file()
    }
    assert gone == set()
    for name, css in texts(site, ".css"):
        found = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\");]+)", css)
        assert [*filter(is_foreign, found)] == [], name


def test_what_comes_from_another_host_is_seen() -> None:
    """The control: the test above must be able to fail."""
    assert [*filter(is_foreign, assets_of('<img src="https://a.example/b.png">'))] == ["https://a.example/b.png"]
    assert [*filter(is_foreign, assets_of('<link rel="preconnect" href="//fonts.example">'))] == ["//fonts.example"]
    assert [*filter(is_foreign, assets_of('<pre class="mermaid">graph</pre>'))] == ["https://mermaid"]
    assert [*filter(is_foreign, assets_of('<style>a{b:url("https://a.example")}</style>'))] == ["https://a.example"]
    assert [*filter(is_foreign, assets_of('<a href="https://a.example">a link</a><img src="a.png">'))] == []


def test_every_public_name_of_the_sdk_is_in_its_reference(site: Path) -> None:
    import corun

    page = (site / "sdk.html").read_text(encoding="utf-8")
    names = [name for name in corun.__all__ if name != "__version__"]
    missing = [name for name in names if not re.search(rf'id="corun\.(?:[\w.]+\.)?{name}"', page)]
    assert missing == []
    assert "Example:" not in page
    examples = re.findall(r"<strong>Example</strong></p>\s*<div[^>]*>.*?<code>(.*?)</code>", page, flags=re.DOTALL)
    sources = [html.unescape(re.sub(r"<[^>]+>", "", found)) for found in examples]
    assert len(sources) > 10
    for source in sources:
        compile(source, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_a_page_without_a_place_gets_one(site: Path) -> None:
    """Whoever adds a page need not know mkdocs.yml: it stands at the end of Guides, with the title of its heading."""
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in home, page.name


def test_links_have_the_titles_of_pages_and_lists_are_lists(site: Path) -> None:
    for name, text in texts(site, ".html"):
        assert re.findall(r'<a href="[^":]+\.html[^"]*">[\w/.-]+\.md</a>', text) == [], name
        prose = re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
        assert re.findall(r"^(?:- |\d+\. |\| ).*", prose, flags=re.MULTILINE) == [], name


def test_the_page_of_protos_is_up_to_date() -> None:
    """In a process of its own: protoc and a gRPC that is loaded already cannot be in one, which aborts."""
    page = (ROOT / "docs" / "protos.md").read_bytes()
    made = subprocess.run([sys.executable, TOOLS / "protos.py"], check=True, capture_output=True, timeout=TIMEOUT_S)
    assert page == made.stdout, "docs/protos.md is not what protos/ gives; run: make docs"


def test_the_table_of_errors_has_each_with_its_codes() -> None:
    import corun
    from corun import cli
    from corun.gateway.errors import STATUSES

    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+Error)` \| `(\w+)` \| (\d+) \| (\d) \|", page, flags=re.MULTILINE)
    errors = [getattr(corun, name) for name in corun.__all__ if name.endswith("Error") and name != "CorunError"]
    code = {error: cli._EXIT_CODES.get(error, cli.FAILURE) for error in errors}
    assert sorted(found) == sorted(
        (error.__name__, error.code.name, str(STATUSES[error.code][0]), str(code[error])) for error in errors
    )


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/http.md#chats", "http.md#chats"),
        ("README.md", "docs/figures/a.png", "figures/a.png"),
        ("README.md", "LICENSE", "#"),
        ("docs/deploy.md", "../k8s/README.md#gpus", "kubernetes.md#gpus"),
        ("docs/deploy.md", "http.md", "http.md"),
        ("k8s/README.md", "../docs/deploy.md#alerts", "deploy.md#alerts"),
        ("docs/deploy.md", "gone.md", "gone.md"),
        ("docs/deploy.md", "https://a.example/b", "https://a.example/b"),
        ("docs/deploy.md", "#alerts", "#alerts"),
    ],
)
def test_links_between_files_become_links_between_pages(source: str, link: str, expected: str) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    known = {"http.md", "deploy.md", "kubernetes.md", "figures/a.png"}
    assert tool("hooks").site_links(f"[a]({link})", source, known) == f"[a]({expected})"


def test_lists_are_seen_as_where_the_repository_is_read() -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    text = "Two:\n- a\n  b\n- c\n\n1. d\n\n   ```\n   e\n   ```\n2. f\n"
    assert tool("hooks").spaced(text) == "Two:\n\n- a\n  b\n- c\n\n1. d\n\n    ```\n    e\n    ```\n\n2. f\n"
