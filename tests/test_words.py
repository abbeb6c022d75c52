"""What can be said by a rule about the words of docstrings: each begins with a word that carries it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_layers import GENERATED, PACKAGES, ROOT

FRAGMENTS = ("Of", "That", "Those")
"""A text that begins with one of these is half a sentence: its subject is somewhere else."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every docstring and every text below an attribute, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def fragments(source: str) -> list[int]:
    return [line for line, text in texts(source) if text.split(maxsplit=1)[:1] and text.split()[0] in FRAGMENTS]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_is_half_a_sentence(package: str) -> None:
    files = [
        path for path in sorted((ROOT / package).rglob("*.py")) if not str(path.relative_to(ROOT)).startswith(GENERATED)
    ]
    found = {str(path): lines for path in files if (lines := fragments(path.read_text(encoding="utf-8")))}
    assert files
    assert found == {}


def test_half_a_sentence_is_found() -> None:
    assert fragments('"""A module."""\nclass A:\n    x = 1\n    """Of its first run."""\n') == [4]
