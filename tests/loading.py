"""Imports test modules that need vLLM, in the environment of a CPU node, which is put back afterwards.

Importing vLLM takes 10 s and warns about itself: only tests that need it pay, when they run.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """The environment in which tests use vLLM; other tests start real nodes and must not inherit it."""
    with mock.patch.dict(os.environ, {**ENVIRONMENT, **changes}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(name: str) -> ModuleType:
    """The module of this dotted name."""
    known = set(sys.modules)
    with environment():
        module = importlib.import_module(name)
    if any(new.partition(".")[0] == "vllm" for new in sys.modules.keys() - known):
        # Else every full collection stops the event loops of all later tests for some 100 ms.
        gc.collect()
        gc.freeze()
    return module
