"""Engines with a node's own arguments but for the worker class, started without the node around them.

Owns: how such an engine is started and ended. Must not know: what is tested with it. Imports vLLM only after the
environment is pinned.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig, PrefillConfig
from corun.types import NixlEndpoint
from decode_node import engine as decode
from prefill_node import engine as prefill

ROOT = Path(__file__).parents[2]


def arguments(config: PrefillConfig | DecodeConfig, endpoint: NixlEndpoint, worker: str) -> Any:
    """The `AsyncEngineArgs` of a node of this config; pins the environment. worker: full name of its class."""
    # The engine's own processes import the worker.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if isinstance(config, PrefillConfig):
        made = prefill.arguments(config, endpoint)
    else:
        made = decode.arguments(config, endpoint)
    made.worker_cls = worker
    return made


@asynccontextmanager
async def started(made: Any) -> AsyncIterator[Any]:
    """An `AsyncLLM` of these arguments; it blocks the event loop while it starts."""
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(made)
    try:
        yield llm
    finally:
        llm.shutdown()
