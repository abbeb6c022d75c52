from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from corun.config.fields import RouterConfig
from router.nodes.registry import Registry
from tests.over_fakes import chat_model, model, no_lost_errors, nodes_come_back_soon

__all__ = ["chat_model", "model", "no_lost_errors", "nodes_come_back_soon", "registry"]


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """A registry without a router, in which no node becomes ready."""
    registry = Registry(RouterConfig(), "r")
    yield registry
    await registry.close()
