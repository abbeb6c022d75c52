"""What a client sends and reads: checked requests, responses, and when to ask an overloaded router again.

Nothing here does I/O. This module must not know channels.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corun.client.routers import MIN_RETRY_S, Deadline
from corun.completion import Assembler, Chunk, Prompt
from corun.errors import InvalidArgumentError, OverloadedError, Shown
from corun.observe.trace_context import Metadata, of_caller
from corun.params import SamplingParams
from corun.rpc import codec
from corun.types import Priority, ResumePoint
from corun.v1 import cluster_service_pb2 as pb

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 600.0
"""The deadline of one prompt in seconds, from the call to its last token."""
DEFAULT_CONNECT_TIMEOUT_S = 20.0
"""The number of seconds that a router has to become reachable. They are part of a call's deadline."""
DEFAULT_CONCURRENCY = 256
"""The number of prompts in flight at once: as many as one decode node has slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One checked prompt, ready to be sent."""

    request: pb.GenerateRequest
    """The message to send. It has a request id, so that it can be resumed. It asks for log probabilities, so that its
    output can be checked."""
    n: int
    logprobs: bool
    """Whether the caller asked for log probabilities, and so for the texts of tokens, too."""
    metadata: Metadata = ()
    """The call's metadata: it names the caller's span, if there is one."""

    def resumed(self, points: Sequence[ResumePoint], fingerprint: str) -> Job:
        """Return the job that asks for the output after `points`."""
        return replace(self, request=codec.resumed_request(self.request, points, fingerprint))

    def assembler(self) -> Assembler:
        is_text = self.request.WhichOneof("prompt") == "text"
        return Assembler(self.n, None if is_text else self.request.token_ids.ids)


def make_job(
    prompt: Prompt,
    params: SamplingParams | None,
    seed: int | None,
    request_id: str | None,
    priority: Priority | str = Priority.NORMAL,
) -> Job:
    """Return the job of one prompt. Raises InvalidArgumentError for values that no model could accept."""
    params = SamplingParams() if params is None else _checked("sampling_params", params)
    request = codec.generate_request(
        prompt,
        replace(params, logprobs=True),
        seed=seed,
        request_id=request_id or secrets.token_hex(16),
        priority=read_priority(priority),
        token_texts=params.logprobs,
    )
    return Job(request=request, n=params.n, logprobs=params.logprobs, metadata=of_caller())


def make_jobs(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    seeds: Sequence[int | None] | None,
    priority: Priority | str = Priority.NORMAL,
) -> list[Job]:
    """Return the jobs of a batch. All are checked before the first is sent.

    Raises InvalidArgumentError, which names the prompt's index.
    """
    if isinstance(prompts, str):
        raise InvalidArgumentError("prompts", prompts, "must be a sequence of prompts")
    if params is None or isinstance(params, SamplingParams):
        each_params: Sequence[SamplingParams | None] = [params] * len(prompts)
    else:
        each_params = params if _is_sequence(params) else [_checked("params", params)]
    each_seed = [None] * len(prompts) if seeds is None else seeds
    _check_one_each("params", each_params, prompts)
    _check_one_each("seeds", each_seed, prompts)
    known = read_priority(priority)
    jobs = enumerate(zip(prompts, each_params, each_seed, strict=True))
    return [_job_of_batch(i, *job, known) for i, job in jobs]


def read_priority(priority: Priority | str) -> Priority:
    """Return a priority by its name. Raises InvalidArgumentError if there is no such priority."""
    try:
        return Priority(priority)
    except ValueError:
        limit = "must be " + ", ".join(known.value for known in Priority)
        raise InvalidArgumentError("priority", priority, limit) from None


def at_index(index: int, error: InvalidArgumentError) -> InvalidArgumentError:
    """Return the error of one prompt of a batch, with the prompt's index in its field."""
    return InvalidArgumentError(f"prompts[{index}].{error.field}", error.value, error.limit)


def retry_delay_s(error: OverloadedError, deadline: Deadline) -> float:
    """Return the number of seconds before an overloaded router is asked again.

    Raises `error` if the deadline comes first.
    """
    delay = max(MIN_RETRY_S, error.retry_after_s)
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
        finish_reason=codec.finish_reason_from_proto(response.finish_reason),
        receipt=codec.receipt_from_proto(response.receipt) if response.HasField("receipt") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        fingerprint=response.fingerprint,
        token_texts=tuple(response.token_texts),
    )


def check_concurrency(concurrency: int) -> None:
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidArgumentError("concurrency", concurrency, "must be at least 1")


def _checked(field: str, params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidArgumentError(field, params, "must be SamplingParams, as in SamplingParams(max_tokens=64)")
    return params


def _is_sequence(params: object) -> bool:
    return isinstance(params, Sequence) and not isinstance(params, (str, bytes))


def _job_of_batch(
    index: int, prompt: Prompt, params: SamplingParams | None, seed: int | None, priority: Priority
) -> Job:
    try:
        return make_job(prompt, params, seed, None, priority)
    except InvalidArgumentError as error:
        raise at_index(index, error) from error


def _check_one_each(name: str, given: Sequence[object], prompts: Sequence[Prompt]) -> None:
    if len(given) != len(prompts):
        raise InvalidArgumentError(name, Shown(f"{len(given)} values"), f"must be one per prompt, {len(prompts)}")
