"""Options that several commands share, and how their values reach the client."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from corun.client.client import AsyncClient, Client
from corun.client.routers import CallerOptions
from corun.params import SamplingParams
from corun.rpc.auth import read_token

TOKEN_FILE_VARIABLE = "CORUN_TOKEN_FILE"

PriorityName = Literal["high", "normal", "low"]


def unset(kind: Any, metavar: str | None = None, **words: Any) -> Any:
    """Return what tyro is told of an option of this type that is None unless it is given. Otherwise tyro takes the word
    "None" as a value, too, and names both types in its errors."""
    return tyro.conf.arg(constructor=kind, metavar=metavar, help_behavior_hint="", **words)


OptionalInt = Annotated[int | None, unset(int)]
OptionalFloat = Annotated[float | None, unset(float)]
OptionalPath = Annotated[Path | None, unset(Path, "[PATH]")]


@dataclass(frozen=True, kw_only=True)
class RouterOptions(CallerOptions):
    """Which router to call."""

    token_file: str = ""
    """File of your token; by default the one that the environment variable CORUN_TOKEN_FILE names."""

    def client(self) -> Client:
        return Client(**self.arguments(self._token()))

    def async_client(self) -> AsyncClient:
        return AsyncClient(**self.arguments(self._token()))

    def _token(self) -> str:
        path = self.token_file or os.environ.get(TOKEN_FILE_VARIABLE, "")
        return read_token("token_file", path) if path else ""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(SamplingParams):
    """How tokens are drawn."""

    # `SamplingParams` takes these fields as any sequence or mapping; a command line needs one type for each.

    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the sample, not part of its text; may be given several times."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sample, part of its token ids."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], tyro.conf.arg(metavar="[ID BIAS [ID BIAS ...]]")] = ()
    """Token ids, each with a bias in [-100, 100]."""

    structured_outputs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KIND TEXT]")] = ()
    """A constraint on the output: json, regex, choice or grammar, and its text; that of choice is a JSON list."""

    def params(self) -> SamplingParams:
        """Return the options as plain `SamplingParams`."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})
