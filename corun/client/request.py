"""One request of a client: how it is checked and sent, what has come of it, and when it is sent again.

Routers keep nothing for a client that lost its connection. They need not: output is a function of the request, so any
router can run the request again, check the received part by its digest and send the rest. Nothing here does I/O. This
module must not know channels.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from corun.client.routers import MIN_RETRY_S, Backoff, Deadline
from corun.completion import Assembler, Chunk, Prompt, Scores
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    InvalidArgumentError,
    OverloadedError,
    Shown,
    UnavailableError,
    is_answered,
    renaming,
)
from corun.observe.trace_context import Metadata, of_caller
from corun.params import SamplingParams
from corun.receipt import OutputDigest, Receipt, output_digest, prompt_digest
from corun.records.rows import PromptRow
from corun.rpc import codec
from corun.types import Priority, ResumePoint
from corun.v1 import cluster_service_pb2 as pb

DEFAULT_CONCURRENCY = 256
"""The number of prompts in flight at once: as many as one decode node has slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """One checked prompt, ready to be sent."""

    request: pb.GenerateRequest
    """The message to send. It has a request id, so that it can be resumed. It asks for log probabilities, so that its
    output can be checked."""
    params: SamplingParams
    """The caller's parameters, which say whether log probabilities were asked for, and so the texts of tokens, too."""
    metadata: Metadata = ()
    """The call's metadata: it names the caller's span, if there is one."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt's token ids; empty for a text, whose token ids come with the first chunk."""
        return self.request.token_ids.ids

    def assembler(self) -> Assembler:
        return Assembler(self.params.n, self.token_ids)

    def row(self, index: int) -> PromptRow:
        """Return the request as the row of a batch, where its results are kept in a file."""
        request = self.request
        return PromptRow(
            id=str(index),
            prompt=request.text or tuple(self.token_ids),
            params=self.params,
            seed=request.seed if request.HasField("seed") else None,
            where=f"prompts[{index}]",
        )


def prepare(
    prompt: Prompt,
    params: SamplingParams | None,
    seed: int | None,
    request_id: str | None,
    priority: Priority | str = Priority.NORMAL,
) -> PreparedRequest:
    """Return the checked request of one prompt. Raises InvalidArgumentError for values that no model could accept."""
    params = SamplingParams() if params is None else _checked("sampling_params", params)
    request = codec.generate_request(
        prompt,
        replace(params, logprobs=True),
        seed=seed,
        request_id=request_id or secrets.token_hex(16),
        priority=read_priority(priority),
        token_texts=params.logprobs,
    )
    return PreparedRequest(request=request, params=params, metadata=of_caller())


def prepare_all(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    seeds: Sequence[int | None] | None,
    n: int | None,
    priority: Priority | str,
) -> list[PreparedRequest]:
    """Return the requests of a batch. All are checked before the first is sent.

    n: the number of samples of each prompt; None: what the parameters say.

    Raises InvalidArgumentError, which names the prompt's index.
    """
    prompts = _listed("prompts", prompts, "must be a sequence of prompts")
    each_params: Any = params
    if not isinstance(each_params, Sequence) or isinstance(each_params, (str, bytes)):
        each_params = [params if params is None else _checked("params", params)] * len(prompts)
    each_seed = [None] * len(prompts) if seeds is None else _listed("seeds", seeds, "must be a sequence of seeds")
    for name, given in (("params", each_params), ("seeds", each_seed)):
        if len(given) != len(prompts):
            raise InvalidArgumentError(name, Shown(f"{len(given)} values"), f"must be one per prompt, {len(prompts)}")
    known, requests = read_priority(priority), []
    for index, prompt in enumerate(prompts):
        with at_index(index):
            requests.append(prepare(prompt, _with_n(each_params[index], n), each_seed[index], None, known))
    return requests


def read_priority(priority: Priority | str) -> Priority:
    """Return a priority by its name. Raises InvalidArgumentError if there is no such priority."""
    try:
        return Priority(priority)
    except ValueError:
        limit = "must be " + ", ".join(known.value for known in Priority)
        raise InvalidArgumentError("priority", priority, limit) from None


def at_index(index: int) -> AbstractContextManager[None]:
    """Add the index of one prompt of a batch to the field of an InvalidArgumentError."""
    return renaming(lambda field: f"prompts[{index}].{field}")


def retry_delay_s(error: OverloadedError, deadline: Deadline) -> float:
    """Return the number of seconds before an overloaded router is asked again.

    Raises `error` if the deadline comes first.
    """
    delay = max(MIN_RETRY_S, error.retry_after_s)
    if delay >= deadline.remaining_s:
        raise error
    return delay


def check_concurrency(concurrency: int) -> None:
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidArgumentError("concurrency", concurrency, "must be at least 1")


def _listed(field: str, values: Any, limit: str) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidArgumentError(field, values, limit)
    return list(values)


def _with_n(params: SamplingParams | None, n: int | None) -> SamplingParams | None:
    if n is None:
        return params
    return replace(SamplingParams() if params is None else _checked("params", params), n=n)


def _checked(field: str, params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidArgumentError(field, params, "must be SamplingParams, as in SamplingParams(max_tokens=64)")
    return params


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
        top_logprobs=codec.alternatives_from_proto(response),
    )


def checked_scores(request: pb.ScoreRequest, found: Scores) -> Scores:
    """Return the scores of an answer. Raises DataLossError unless they are of these tokens, with the bits that the
    router computed the digests of."""
    if len(found.scores) != len(request.continuations):
        raise DataLossError(f"{len(found.scores)} scores came for {len(request.continuations)} continuations")
    if request.prompt.WhichOneof("value") == "token_ids" and found.prompt_token_ids != (*request.prompt.token_ids.ids,):
        raise DataLossError("the scores are those of another prompt")
    for index, (asked, score) in enumerate(zip(request.continuations, found.scores, strict=True)):
        if asked.WhichOneof("value") == "token_ids" and score.token_ids != (*asked.token_ids.ids,):
            raise DataLossError(f"score {index} is that of another continuation")
        columns: list[Sequence[Any]] = [score.logprobs, score.top_token_ids, score.top_logprobs]
        columns += [score.token_texts, score.top_token_texts] if request.token_texts else []
        if {len(score.token_ids)} != set(map(len, columns)):
            raise DataLossError(f"score {index} is not complete")
        if output_digest(score.token_ids, score.logprobs) != score.output_digest:
            raise DataLossError(f"score {index} differs from its digest")
    return found


class _Received:
    """The part of one sample that a client has received."""

    def __init__(self, index: int, params: SamplingParams, params_digest: str) -> None:
        """Begin with nothing. params: the caller's, with their digest."""
        self.done = False
        self._params, self._params_digest = params, params_digest
        self._index = index
        self._name = f"sample {index}"
        self._seed: int | None = None
        self._digest = OutputDigest()
        self._text_bytes = 0

    @property
    def point(self) -> ResumePoint | None:
        """The point to continue from. None if nothing has been received."""
        if self._seed is None:
            return None
        return ResumePoint(
            sample_index=self._index,
            seed=self._seed,
            num_tokens=self._digest.num_tokens,
            output_digest=self._digest.hexdigest(),
            text_bytes=self._text_bytes,
            done=self.done,
        )

    def add(self, chunk: Chunk, prompt: str) -> None:
        """Add a chunk. prompt: the digest of the prompt.

        Raises DataLossError if the chunk does not continue the sample, or if its receipt differs from sample or prompt.
        """
        count = len(chunk.token_ids)
        if self.done:
            raise DataLossError(f"{self._name} went on after its end")
        if self._seed not in (None, chunk.seed):
            raise DataLossError(f"{self._name} began with seed {self._seed} and went on with {chunk.seed}")
        if len(chunk.logprobs) != count:
            raise DataLossError(f"{self._name} came with {len(chunk.logprobs)} log probabilities for {count} tokens")
        if self._params.logprobs and len(chunk.token_texts) != count:
            raise DataLossError(f"{self._name} came with {len(chunk.token_texts)} texts for {count} tokens")
        self._check_alternatives(chunk)
        self._seed = chunk.seed
        self._text_bytes += len(chunk.text.encode())
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            self._digest.update(token_id, logprob)
        if chunk.receipt is not None:
            self._check(chunk, chunk.receipt, prompt)
            self.done = True

    def _check_alternatives(self, chunk: Chunk) -> None:
        """Raise DataLossError unless each token has its alternatives: a router or node of an older version sends none.
        A token that is among them has its own log probability there."""
        most = self._params.top_logprobs
        if not most:
            return
        if len(chunk.top_logprobs) != len(chunk.token_ids):
            found = f"{len(chunk.top_logprobs)} times top_logprobs for {len(chunk.token_ids)} tokens"
            raise DataLossError(f"{self._name} came with {found}")
        for token_id, logprob, tops in zip(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, strict=True):
            counts = {len(tops.token_ids), len(tops.logprobs), len(tops.texts)}
            if len(counts) != 1 or not 1 <= len(tops.token_ids) <= most:
                raise DataLossError(f"{self._name} came with {len(tops.token_ids)} top_logprobs of {most} for a token")
            if dict(zip(tops.token_ids, tops.logprobs, strict=True)).get(token_id, logprob) != logprob:
                raise DataLossError(f"{self._name} came with two log probabilities of token {token_id} at one place")

    def _check(self, chunk: Chunk, receipt: Receipt, prompt: str) -> None:
        facts: dict[str, tuple[object, object]] = {
            "seed": (chunk.seed, receipt.seed),
            "finish reason": (chunk.finish_reason, receipt.finish_reason),
            "number of tokens": (self._digest.num_tokens, receipt.num_output_tokens),
            "output digest": (self._digest.hexdigest(), receipt.output_digest),
            "tokens digest": (self._digest.tokens_hexdigest(), receipt.tokens_digest),
            # An older router does not see parameters that it does not know.
            "parameters' digest": (self._params_digest, receipt.params_digest),
        }
        for name, (found, stated) in facts.items():
            if found != stated:
                raise DataLossError(f"{self._name}: its {name} is {found}, its receipt says {stated}")
        if receipt.prompt_digest != prompt:
            raise DataLossError(f"{self._name} was computed from another prompt than the one sent")


class Resumption:
    """Sends a request again until all of its output has been received, or until trying again cannot help.

    connect_timeout_s: the most seconds that may pass before a router is reachable, while there is no output.
    """

    def __init__(self, prepared: PreparedRequest, deadline: Deadline, connect_timeout_s: float) -> None:
        self._prepared = prepared
        self._deadline = deadline
        self._connect_timeout_s = connect_timeout_s
        params, digest = prepared.params, prepared.params.digest()
        self._samples = [_Received(index, params, digest) for index in range(params.n)]
        self._prompt = tuple(prepared.token_ids)
        self._prompt_digest = prompt_digest(self._prompt)
        self._fingerprint = ""
        self._has_begun = False
        self._backoff = Backoff()
        self._failing_since: float | None = None
        self._sent_at = time.monotonic()

    @property
    def is_whole(self) -> bool:
        return all(sample.done for sample in self._samples)

    @property
    def connect_s(self) -> float:
        """The number of seconds to wait for a router. Once there is output, this is all the time that the call has."""
        left = self._deadline.remaining_s
        return left if self._has_begun else min(left, self._connect_timeout_s)

    def request(self) -> pb.GenerateRequest:
        """Return the request for everything that has not been received. It is sent now."""
        self._sent_at = time.monotonic()
        points = [point for sample in self._samples if (point := sample.point) is not None]
        request = self._prepared.request
        return codec.resumed_request(request, points, self._fingerprint) if points else request

    def take(self, chunk: Chunk) -> Chunk:
        """Return the chunk as the caller gets it: without what it has been told before.

        Raises DataLossError or ContractMismatchError if the chunk does not continue the request.
        """
        if chunk.sample_index >= len(self._samples):
            raise DataLossError(f"the router sent sample {chunk.sample_index} of {len(self._samples)}")
        known, fingerprint, prompt = self._fingerprint, chunk.fingerprint, chunk.prompt_token_ids
        if known and fingerprint not in ("", known):
            differences = {"fingerprint": (known, fingerprint)}
            raise ContractMismatchError("the request went on under another contract", differences)
        if self._prompt and prompt not in ((), self._prompt):
            raise DataLossError("the request went on from another prompt")
        told = replace(
            chunk,
            logprobs=chunk.logprobs if self._prepared.params.logprobs else (),
            prompt_token_ids=() if self._prompt else prompt,
            fingerprint="" if known else fingerprint,
        )
        if prompt and not self._prompt:
            self._prompt, self._prompt_digest = prompt, prompt_digest(prompt)
        self._samples[chunk.sample_index].add(chunk, self._prompt_digest)
        self._fingerprint = known or fingerprint
        self._has_begun, self._failing_since, self._backoff = True, None, Backoff()
        return told

    def finish(self) -> None:
        """Note that the router has ended the stream. Raises DataLossError if a sample is not complete."""
        for index, sample in enumerate(self._samples):
            if not sample.done:
                raise DataLossError(f"the stream ended before sample {index} did")

    def retry_s(self, error: grpc.RpcError, typed: CorunError) -> float:
        """Return the number of seconds until the request should be sent again. typed: what `error` means.

        Raises the typed error if trying again would not help, or if there is no time for it. Once output has arrived,
        there is time until the deadline. Before that, there is only the time for making a connection.
        """
        delay = self._delay_s(error, typed)
        now = time.monotonic()
        if now - self._sent_at > self._connect_timeout_s:
            self._failing_since = None  # A router had the request for longer than any connection takes.
        self._failing_since = now if self._failing_since is None else self._failing_since
        left = self._deadline.remaining_s
        if not self._has_begun:
            left = min(left, self._failing_since + self._connect_timeout_s - now)
        if delay is None or delay >= left:
            raise typed from error
        return delay

    def _delay_s(self, error: grpc.RpcError, typed: CorunError) -> float | None:
        if isinstance(typed, UnavailableError):
            if not is_answered(error):
                return self._backoff.next_s()
            return None if typed.retry_after_s is None else max(self._backoff.next_s(), typed.retry_after_s)
        if isinstance(typed, OverloadedError) and self._has_begun:  # The caller could only wait, too.
            return max(self._backoff.next_s(), typed.retry_after_s)
        return None
