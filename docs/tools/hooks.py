"""What mkdocs does not do by itself: pages that lie outside of docs/, links that leave it, and pages without a place.

Pages of the repository link to each other by path, so that they can be read where the repository is read. The site has
other paths. This module owns the mapping between the two.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "k8s/README.md": "kubernetes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "reporting.md",
}
"""The pages outside of docs/ that are on the site too, and their names there."""
_LINK = re.compile(r'(\]\(|\b(?:src|href|srcset)=")([^)"\s#]+)')
_NAMED = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)")
"""A link whose text is a file's path. Readers of the site see the page's title in its place."""
_SPACING = (
    (re.compile(r"^ {3}(?=\S)", re.MULTILINE), "    "),
    (re.compile(r"^( {4}```)\n(?=\S)", re.MULTILINE), r"\1\n\n"),
    (re.compile(r"^((?![-*|#>\s]|\d+\.).+)\n(?=(?:-|1\.) \S)", re.MULTILINE), r"\1\n\n"),
)
"""What Python's Markdown wants where GitHub's does not: four spaces before what belongs to an item of a numbered list,
and an empty line after code in a list and before a list."""
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give a place to each page that the navigation does not name: Project if it lies outside of docs/, else Guides."""
    nav: list[dict[str, Any]] = config.nav or []
    named = set(_paths(nav))
    pages = sorted(path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md"))
    guides = next(entry["Guides"] for entry in nav if "Guides" in entry)
    guides += [page for page in pages if page not in named and not page.startswith("tools/")]
    project = [page for page in _outside().values() if page not in named]
    if project:
        nav.append({"Project": project})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, name in _outside().items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    names = {name: source for source, name in _outside().items()}
    source = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = [
        part if part.startswith("```") else spaced(site_links(part, source, set(files.src_uris)))
        for part in _CODE.split(markdown)
    ]
    return _NAMED.sub(lambda found: f"[{_title(found, files)}]({found[1]}", "".join(parts))


def site_links(text: str, source: str, known: set[str]) -> str:
    """Return a page's text with links to what the site has; a link to another file of the repository loses its target.

    `source` is the page's path in the repository, and `known` has the site's files.
    """

    def replaced(found: re.Match[str]) -> str:
        before, target = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = OUTSIDE.get(path, path.removeprefix("docs/"))
        return before + (name if name in known or path.startswith("docs/") else "#")

    return _LINK.sub(replaced, text)


def spaced(text: str) -> str:
    """Return a page's text so that Python's Markdown sees the same lists as GitHub's."""
    for pattern, replacement in _SPACING:
        text = pattern.sub(replacement, text)
    return text


def _title(link: re.Match[str], files: Files) -> str:
    file = files.get_file_from_path(link[1])
    heading = re.search(r"^# (.+)$", file.content_string, re.MULTILINE) if file is not None else None
    return heading[1] if heading is not None else link[1]


def _outside() -> dict[str, str]:
    return {source: name for source, name in OUTSIDE.items() if (ROOT / source).is_file()}


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _paths(part)
