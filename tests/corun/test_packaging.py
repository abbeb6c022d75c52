"""The distribution: its name, which is not the import name, its metadata, and what says how to install more of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import corun
from corun.config.extras import needs_extra
from corun.errors import CorunError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TOLD = [
    path
    for folder in ("corun", "router", "prefill_node", "decode_node", "docs", "k8s", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yaml") and "v1" not in path.parts
] + [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "Makefile"]


def test_the_distribution_is_not_the_stranger_that_is_called_corun() -> None:
    assert PROJECT["name"] != "corun"
    assert PROJECT["scripts"] == {"corun": "corun.cli:main"}


@pytest.mark.parametrize("path", TOLD, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_is_told_to_install_the_stranger(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?:pip|uv) install [^\n`#]*\bcorun(?![-_\w./])", text) == []
    assert re.findall(r"(?<![-\w])corun\[(?:\w+|\$\{\w+\})[\],]", text) == []


def test_extras_are_those_of_this_distribution() -> None:
    named = [Requirement(text) for texts in EXTRAS.values() for text in texts]
    own = [one for one in named if "corun" in one.name]
    assert own
    assert {one.name for one in own} == {PROJECT["name"]}
    assert {extra for one in own for extra in one.extras} <= set(EXTRAS)


def test_the_image_prunes_to_this_distribution() -> None:
    (root,) = re.findall(r'prune\.py "([^"]+)"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert root.partition("[")[0] == PROJECT["name"]


def test_the_wheel_says_what_it_is() -> None:
    assert PROJECT["version"] == corun.__version__
    assert PROJECT["license"] == "Apache-2.0"
    assert [one["name"] for one in PROJECT["authors"]]
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)}
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed", *pythons} <= set(PROJECT["classifiers"])
    assert not [one for one in PROJECT["classifiers"] if one.startswith("License ::")]  # PEP 639: beside `license`.
    assert (ROOT / "corun" / "py.typed").is_file()


@pytest.mark.parametrize(
    ("extra", "told"),
    [("router", "pip install '.[router]'"), ("bench", "pip install '.[bench]'"), ("cpu", "make setup")],
)
def test_what_is_missing_is_the_smallest_extra(extra: str, told: str) -> None:
    with pytest.raises(CorunError, match="needs package uvloop") as found, needs_extra("corun that", extra):
        raise ModuleNotFoundError("No module named 'uvloop'", name="uvloop")
    assert told in str(found.value)
    assert extra in EXTRAS
