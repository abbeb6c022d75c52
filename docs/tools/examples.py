"""Shows the SDK's docstrings as they stand: their examples as code, and `Client` with the arguments that it takes."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:^(?:    .*)?\n?)+)", re.MULTILINE)
_LIST = re.compile(r"^(?!Args|Example|Raises|Returns|Yields)(\w.*:)\n((?:^    .*\n?)+)", re.MULTILINE)
"""A sentence with indented items below it, which no convention of docstrings knows."""


class Examples(griffe.Extension):
    """Turns each `Example:` into a fenced block before the docstring is parsed.

    `Client` takes the arguments of `AsyncClient`, which a decorator gives it: they are not in its own source.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path == "corun":
            pkg["client.client.Client.__init__"].parameters = pkg["client.client.AsyncClient.__init__"].parameters

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, _LIST.sub(_listed, obj.docstring.value))


def _fenced(found: re.Match[str]) -> str:
    return f"**Example**\n\n```python\n{textwrap.dedent(found[1]).rstrip()}\n```\n"


def _listed(found: re.Match[str]) -> str:
    items = re.sub(r"^(?=\w)", "- ", textwrap.dedent(found[2]), flags=re.MULTILINE)
    return f"{found[1]}\n\n{items}"
