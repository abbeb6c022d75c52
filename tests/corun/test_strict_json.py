"""JSON of strangers: what would not be JSON when it is written again is refused when it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corun.strict_json import MAX_DEPTH, loads


def nested(depth: int) -> str:
    """A list in an object in a list, and so on."""
    text = "1"
    for level in range(depth):
        text = f"[{text}]" if level % 2 else f'{{"a": {text}}}'
    return text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -2.5, true, null, "x"]}', {"a": [1, -2.5, True, None, "x"]}),
        ("1e308", 1e308),
        ("-" + "9" * 400, -int("9" * 400)),  # A whole number stays what it is.
        ('"\ud800"', "\ud800"),
        (f'["{"[" * 1000}"]', ["[" * 1000]),
    ],
)
def test_what_is_json_is_read(text: str, value: Any) -> None:
    assert loads(text) == value


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_numbers_are_finite(text: str) -> None:
    for around in (text, f"[{text}]", f'{{"a": [1, {text}]}}'):
        with pytest.raises(ValueError, match=r"is not a finite number|is not JSON") as refused:
            loads(around)
        assert len(str(refused.value)) < 50


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 900, 100_000])
def test_depth_has_a_limit(depth: int) -> None:
    if depth <= MAX_DEPTH:
        assert json.loads(json.dumps(loads(nested(depth)))) == json.loads(nested(depth))
        return
    for text in (nested(depth), f'[1, [], {{"b": {nested(depth - 1)}}}]', "[" * depth + "]" * depth):
        with pytest.raises(ValueError, match=f"it has more than {MAX_DEPTH} levels"):
            loads(text)
