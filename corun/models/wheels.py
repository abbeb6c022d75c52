"""Fetch one file of a package index, whose digest is known, and continue a download that was interrupted.

It does not matter which index gives the file, because its digest is compared. This module must not know what is in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

import requests

from corun.errors import UnavailableError
from corun.models.files import sha256
from corun.models.indexes import indexes

TIMEOUT_S = (10.0, 60.0)
"""The longest time to connect, and the longest silence of a server."""
PIECE = 2**14
"""The bytes that are written at once. At most so many are lost, and fetched again, when a connection breaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """A file of a project on a package index."""

    project: str
    filename: str
    sha256: str
    size: int
    """The number of its bytes."""


class _NotThereError(Exception):
    """An index does not have the file. The text says why."""


def fetch(wanted: Pinned, directory: Path, tell: Callable[[int], None]) -> Path:
    """Return the path of the file in `directory`, where it is named FILENAME.part, whole or not.

    What is there is not fetched again. Only one process at a time may do it. tell: called with the number of bytes that
    are there.

    Raises UnavailableError, with what each index said, if none gives the file.
    """
    part, reasons = directory / f"{wanted.filename}.part", []
    with requests.Session() as session:
        session.verify = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or True
        for index in indexes():
            try:
                _download(session, _link(session, index, wanted), part, wanted, tell)
                return part
            except (_NotThereError, requests.RequestException) as error:
                reasons.append(_without_users(f"{index}: {error}"))
    raise UnavailableError(f"{wanted.filename} could not be fetched: {'; '.join(reasons)}")


def _link(session: requests.Session, index: str, wanted: Pinned) -> str:
    """Return the address of the file, as the project's page on an index says it."""
    with _ask(session, f"{index}/{wanted.project}/", headers={"Accept": "text/html"}) as page:
        (parser := _Links()).feed(page.text)
        if wanted.filename not in parser.links:
            raise _NotThereError(f"it has no {wanted.filename}")
        return urljoin(str(page.url), parser.links[wanted.filename])


class _Links(HTMLParser):
    """The links of a page by the names of their files."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.links[urlsplit(href).path.rpartition("/")[2]] = urldefrag(href).url


def _download(session: requests.Session, url: str, part: Path, wanted: Pinned, tell: Callable[[int], None]) -> None:
    """Fetch what `part` lacks. What was there before may be damaged, or be a part of another file. So if the whole is
    not what is wanted, all is fetched once more, before the index is blamed."""
    was_there = _size(part) > 0
    _complete(session, url, part, wanted, tell)
    if was_there and sha256(part) != wanted.sha256:
        part.unlink()
        _complete(session, url, part, wanted, tell)
    if (found := sha256(part)) != wanted.sha256:
        part.unlink()
        raise _NotThereError(f"what it gives has the SHA-256 digest {found}, and not {wanted.sha256}")


def _complete(session: requests.Session, url: str, part: Path, wanted: Pinned, tell: Callable[[int], None]) -> None:
    """Fetch the rest of `part`. A lost connection is opened again as long as each one brings something. What is
    whole but too short is another file."""
    while (before := _size(part)) < wanted.size:
        tell(before)
        try:
            _continue(session, url, part, wanted, tell)
        except requests.RequestException:
            if _size(part) <= before:
                raise
        else:
            if _size(part) < wanted.size:
                part.unlink()
                raise _NotThereError(f"what it gives has less than {wanted.size} bytes")
    tell(wanted.size)


def _continue(session: requests.Session, url: str, part: Path, wanted: Pinned, tell: Callable[[int], None]) -> None:
    there = _size(part)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={there}-"} if there else {})}
    with _ask(session, url, headers=headers, stream=True) as answer:
        is_rest = answer.headers.get("Content-Range", "").startswith(f"bytes {there}-")
        there = there if is_rest else 0
        with part.open("ab" if is_rest else "wb") as file:
            for piece in answer.iter_content(PIECE):
                there += len(piece)
                if there > wanted.size:
                    part.unlink()
                    raise _NotThereError(f"what it gives has more than {wanted.size} bytes")
                file.write(piece)
                tell(there)


def _ask(session: requests.Session, url: str, **options: Any) -> requests.Response:
    """Return an answer that is no error. Its body may not have come yet."""
    try:
        answer = session.get(url, timeout=TIMEOUT_S, **options)
    except requests.RequestException:
        raise
    except OSError as error:  # The file of certificates that is set cannot be read.
        raise _NotThereError(str(error)) from None
    if not answer.ok:  # The library's own message would show the address, which may have a password.
        answer.close()
        raise _NotThereError(f"HTTP status {answer.status_code}")
    return answer


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _without_users(text: str) -> str:
    """Return a text without the users and passwords of the addresses in it, of which each may be malformed."""
    return re.sub(r"[^/\s'\"]*@", "", text)
