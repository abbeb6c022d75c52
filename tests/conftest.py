"""What tests of several folders share. Hypothesis runs without clocks: how long an example takes says how busy the
machine is, and nothing about the code."""

import logging
import math
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from corun.client.loop_thread import is_no_late_wake
from corun.node import kept
from tests.loading import load
from tests.secrets import Secrets
from tests.traces import CPU, GPU, Platform

settings.register_profile("corun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("corun")

# Each test has a loop of its own, and gRPC may wake the closed one of an earlier test: no fault of the test that runs.
logging.getLogger("asyncio").addFilter(is_no_late_wake)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "skip tests that would begin after this time, in seconds since 1970"
    parser.addoption("--begin-before", type=float, default=math.inf, metavar="TIME", help=words)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--begin-before"):
        pytest.skip("no time is left for it (--begin-before)")


@pytest.fixture(autouse=True, scope="session")
def no_kept_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own certificates: a node that is told to have given wrong bits forgets all."""
    folder = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """Certificates and tokens that no test changes."""
    return Secrets.make(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(params=[CPU, GPU], ids=["cpu", "gpu"])
def platform(request: pytest.FixtureRequest) -> Platform:
    """What the tests of schedulers run on, each time."""
    return request.param


@pytest.fixture(scope="session")
def stepping() -> ModuleType:
    """The module that drives vLLM's schedulers."""
    return load("tests.stepping")
