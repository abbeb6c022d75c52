"""Options that several commands share, and how their values reach the client."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from corun.calls import DEFAULT_ADDRESS, DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S
from corun.client import AsyncClient, Client
from corun.params import SamplingParams

OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="[PATH]")]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Which router to call."""

    router: str = DEFAULT_ADDRESS
    """host:port of the router; several routers of one cluster, with commas in between, are tried in turn."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest time for one call, in seconds."""
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    """Longest wait for the router to be reachable, in seconds."""

    def client(self) -> Client:
        return Client(self.router, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.router, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(SamplingParams):
    """How tokens are drawn."""

    # `SamplingParams` takes these as any sequence or mapping; a command line needs one type.

    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the sample, not part of its text; may be given several times."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sample, part of its token ids."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], tyro.conf.arg(metavar="[ID BIAS [ID BIAS ...]]")] = ()
    """Token ids, each with a bias in [-100, 100]."""

    def params(self) -> SamplingParams:
        """The plain value."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})
