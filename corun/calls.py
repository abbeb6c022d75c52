"""What the two clients share: deadlines, checked requests, how a response reads, what a failure means.

Nothing here does I/O. This module must not know whether its caller blocks or awaits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from corun import wire
from corun.channel import OPEN, Access
from corun.errors import (
    CorunError,
    DeadlineError,
    InvalidArgumentError,
    OverloadedError,
    Shown,
    UnavailableError,
    from_rpc_error,
)
from corun.generation import Assembler, Chunk, Prompt
from corun.params import SamplingParams
from corun.v1 import cluster_service_pb2 as pb

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 600.0
"""For one prompt, from the call to its last token."""
DEFAULT_CONNECT_TIMEOUT_S = 20.0
"""For a router to be reachable; part of a call's deadline."""
STATUS_TIMEOUT_S = 30.0
DEFAULT_CONCURRENCY = 256
"""Prompts in flight at once: the slots of one decode node."""

_MIN_RETRY_S = 0.05


class Deadline:
    """A moment by which a call must have ended."""

    def __init__(self, timeout_s: float) -> None:
        check_timeout("timeout_s", timeout_s)
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A router's address, how long to wait for it and what to show it."""

    address: str
    timeout_s: float
    connect_timeout_s: float
    access: Access = OPEN

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise InvalidArgumentError("address", self.address, "must be host:port")
        check_timeout("timeout_s", self.timeout_s)
        check_timeout("connect_timeout_s", self.connect_timeout_s)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def status_deadline(self, timeout_s: float | None = None) -> Deadline:
        return self.deadline(min(self.timeout_s, STATUS_TIMEOUT_S) if timeout_s is None else timeout_s)

    def connect_s(self, deadline: Deadline) -> float:
        """Seconds to wait for a connection."""
        return min(self.connect_timeout_s, deadline.remaining_s)

    def unreachable(self, waited_s: float) -> UnavailableError:
        return UnavailableError(f"no router answers at {self.address} (waited {waited_s:.3g} s{self._doubt})")

    @property
    def _doubt(self) -> str:
        """What else may be wrong: gRPC does not tell a refused handshake from a silent peer."""
        if self.access.tls is None:
            return ", without TLS"
        return ", over TLS: the certificates may not be those that the other side trusts"

    def typed(self, error: grpc.RpcError) -> CorunError:
        """The error to raise for a failed call; where the network may be at fault, it names the address."""
        typed = from_rpc_error(error)
        if isinstance(typed, (UnavailableError, DeadlineError)):
            return type(typed)(f"router {self.address}: {typed.message}")
        return typed


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One checked prompt, ready to be sent."""

    request: pb.GenerateRequest
    n: int

    def assembler(self) -> Assembler:
        is_text = self.request.WhichOneof("prompt") == "text"
        return Assembler(self.n, None if is_text else self.request.token_ids.ids)


def make_job(prompt: Prompt, params: SamplingParams | None, seed: int | None, request_id: str | None) -> Job:
    """Raises InvalidArgumentError for what no model could take."""
    params = params or SamplingParams()
    return Job(request=wire.generate_request(prompt, params, seed=seed, request_id=request_id or ""), n=params.n)


def make_jobs(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    seeds: Sequence[int | None] | None,
) -> list[Job]:
    """All prompts of a batch, checked before the first is sent; an error names the prompt's index."""
    if isinstance(prompts, str):
        raise InvalidArgumentError("prompts", prompts, "must be a sequence of prompts")
    each_params = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
    each_seed = [None] * len(prompts) if seeds is None else seeds
    _check_one_each("params", each_params, prompts)
    _check_one_each("seeds", each_seed, prompts)
    return [_job_of_batch(i, *job) for i, job in enumerate(zip(prompts, each_params, each_seed, strict=True))]


def at_index(index: int, error: InvalidArgumentError) -> InvalidArgumentError:
    """The error of one prompt of a batch, with the prompt's index."""
    return InvalidArgumentError(f"prompts[{index}].{error.field}", error.value, error.limit)


def retry_delay_s(error: OverloadedError, deadline: Deadline) -> float:
    """Seconds to wait before an overloaded router is asked again; raises `error` if the deadline comes first."""
    delay = max(_MIN_RETRY_S, error.retry_after_s)
    if delay >= deadline.remaining_s:
        raise error
    return delay


def read_chunk(response: pb.GenerateResponse) -> Chunk:
    return Chunk(
        request_id=response.request_id,
        sample_index=response.sample_index,
        seed=response.seed,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(response.logprobs),
        finish_reason=wire.finish_reason_from_proto(response.finish_reason),
        receipt=wire.receipt_from_proto(response.receipt) if response.HasField("receipt") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
    )


def check_timeout(field: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise InvalidArgumentError(field, seconds, "must be finite and above 0")


def check_concurrency(concurrency: int) -> None:
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidArgumentError("concurrency", concurrency, "must be at least 1")


def _job_of_batch(index: int, prompt: Prompt, params: SamplingParams | None, seed: int | None) -> Job:
    try:
        return make_job(prompt, params, seed, None)
    except InvalidArgumentError as error:
        raise at_index(index, error) from error


def _check_one_each(name: str, given: Sequence[object], prompts: Sequence[Prompt]) -> None:
    if len(given) != len(prompts):
        raise InvalidArgumentError(name, Shown(f"{len(given)} values"), f"must be one per prompt, {len(prompts)}")
