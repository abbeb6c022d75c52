"""Read JSON that strangers wrote, so that what was read can be written and walked again.

Python's parser takes more than JSON: numbers that are not finite, which other parsers refuse when they are sent back,
and values so deep that what writes them fails later, when an answer has begun. This module must not know what the JSON
is for.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 100
"""The most levels of lists and objects. What walks or writes a value here can do some 900."""

Pairs = Callable[[list[tuple[str, Any]]], Any]


def loads(text: str, *, object_pairs_hook: Pairs | None = None) -> Any:
    """Return the value that a text of JSON holds. Raises ValueError, also for a number such as 1e999 and for more than
    `MAX_DEPTH` levels.

    Whole numbers have no check: it would make token ids three times as slow to read, and they stay what they are.
    """
    hooks: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        found = json.loads(text, object_pairs_hook=object_pairs_hook, **hooks)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(found)
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of which no name is given twice: Python would keep only the last value. It is a hook of `loads`.
    Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {json.dumps(twice[:64])} is in an object twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:16]}{'...' if len(text) > 16 else ''} is not a finite number")
    return number


def _check_depth(value: Any) -> None:
    level = _containers((value,))
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _containers(each.values() if type(each) is dict else each)]
        if not level:
            return
    raise _too_deep()


def _containers(values: Iterable[Any]) -> list[Any]:
    return [each for each in values if type(each) in (dict, list)]


def _too_deep() -> ValueError:
    return ValueError(f"it has more than {MAX_DEPTH} levels of lists and objects")
