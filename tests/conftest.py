"""What tests of several folders share. Hypothesis runs without clocks: how long an example takes says how busy the
machine is, and nothing about the code."""

from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from tests.loading import load

settings.register_profile("corun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("corun")


@pytest.fixture(scope="session")
def stepping() -> ModuleType:
    """The module that drives vLLM's schedulers."""
    return load("tests.stepping")
