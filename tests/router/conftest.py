from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from corun.config.fields import RouterConfig
from router import clock
from router.nodes.registry import Registry, _Usable
from tests.over_fakes import chat_model, model, no_lost_errors, nodes_come_back_soon

__all__ = ["chat_model", "model", "no_lost_errors", "nodes_come_back_soon", "registry"]


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """A registry without a router, in which no node becomes ready."""
    registry = Registry(RouterConfig(), "r")
    yield registry
    await registry.close()


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a short time count as standing still, so that what a busy machine does to the loop counts, too."""
    monkeypatch.setattr(clock, "TICK_S", 0.01)
    monkeypatch.setattr(clock, "LONGEST_TICK_S", 0.05)


@pytest.fixture(autouse=True)
def usable_nodes_are_never_out_of_date(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry keeps what it found of its nodes until one of them changes. Look again each time it is asked."""
    found, stale = Registry._usable, []

    def checked(registry: Registry) -> Any:
        kept, fresh = found(registry), _Usable.of(registry._decodes, registry._prefills)
        if kept != fresh:
            stale.append((kept, fresh))
        return kept

    monkeypatch.setattr(Registry, "_usable", checked)
    yield
    assert not stale
