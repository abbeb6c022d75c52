"""What a benchmark sends and what it gets back: plain values, without any arithmetic over them.

Times are seconds on the client's monotonic clock since the run began, taken where the client receives a message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample to draw: `max_tokens` tokens after a prompt, whatever they are."""

    index: int
    """The request's place in the workload, from 0."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    arrival_s: float = 0.0
    """The time at which the request is sent in an open loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in their order, and when they are sent.

    Closed loop: `max_concurrency` requests are in flight, and the next is sent when one ends (paper, Section V). Open
    loop: each is sent at its `arrival_s`, with at most `max_concurrency` in flight if that is not 0.
    """

    name: str
    """The workload's name, as in "in=512,out=256", "burstgpt", "rl=32x8"."""
    requests: tuple[Request, ...]
    max_concurrency: int = 256
    """The most requests in flight; 0: no limit (open loop only)."""
    request_rate: float = math.inf
    """Requests a second of an open loop; inf: a closed loop."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""

    @property
    def is_open(self) -> bool:
        return math.isfinite(self.request_rate)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The outcome of one request."""

    index: int
    num_prompt_tokens: int
    sent_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When each message with tokens came, and how many tokens it held."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """The fp32 log probabilities of the sampled tokens; empty unless asked for."""
    error: str = ""
    """Why the request failed; empty if it got all its tokens."""
    done_s: float = 0.0
    """The time at which the request ended, successfully or not."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class Run:
    """One pass over a workload on one system."""

    system: str
    workload: str
    repeat: int
    outcomes: list[Outcome]
    """The outcomes in the order of the workload's requests."""
    duration_s: float
    """The time from the start of the run to the end of the last request, in seconds."""
