from typing import Any

import pytest

from router.service import ClusterService
from tests.over_fakes import chat_model, model, no_lost_errors, nodes_come_back_soon

__all__ = ["chat_model", "model", "no_lost_errors", "nodes_come_back_soon"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of GetCluster that routers got."""
    seen: list[Any] = []
    answer = ClusterService.GetCluster

    async def noting(self: Any, request: Any, context: Any) -> Any:
        seen.append(request)
        return await answer(self, request, context)

    monkeypatch.setattr(ClusterService, "GetCluster", noting)
    return seen
