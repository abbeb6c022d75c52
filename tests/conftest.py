"""What tests of several folders share. Hypothesis runs without clocks: how long an example takes says how busy the
machine is, and nothing about the code."""

import logging
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from corun.client.loop_thread import is_no_late_wake
from tests.loading import load

settings.register_profile("corun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("corun")

# Each test has a loop of its own, and gRPC may wake the closed one of an earlier test: no fault of the test that runs.
logging.getLogger("asyncio").addFilter(is_no_late_wake)


@pytest.fixture(scope="session")
def stepping() -> ModuleType:
    """The module that drives vLLM's schedulers."""
    return load("tests.stepping")
