"""One request that may take several calls: what has been received so far, and what to ask for next.

Routers keep nothing for a client that lost its connection. They need not: output is a function of the request, so any
router can run the request again, check the received part by its digest and send the rest. Nothing here does I/O.
"""

from __future__ import annotations

import time
from dataclasses import replace

import grpc

from corun.client.request import Job
from corun.client.routers import Backoff, Deadline, Endpoint, typed_error
from corun.completion import Chunk, check_facts
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    OverloadedError,
    UnavailableError,
    is_answered,
)
from corun.receipt import OutputDigest, Receipt
from corun.types import ResumePoint


class Received:
    """The part of one sample that a client has received."""

    def __init__(self, index: int, *, with_token_texts: bool = False) -> None:
        self.done = False
        self._index = index
        self._with_token_texts = with_token_texts
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

    def add(self, chunk: Chunk) -> None:
        """Add a chunk.

        Raises DataLossError if the chunk does not continue the sample, or if its receipt differs from the sample.
        """
        if self.done:
            raise DataLossError(f"sample {self._index} went on after its end")
        if self._seed not in (None, chunk.seed):
            raise DataLossError(f"sample {self._index} began with seed {self._seed} and went on with {chunk.seed}")
        if len(chunk.logprobs) != len(chunk.token_ids):
            limit = f"{len(chunk.logprobs)} log probabilities for {len(chunk.token_ids)} tokens"
            raise DataLossError(f"sample {self._index} came with {limit}")
        if self._with_token_texts and len(chunk.token_texts) != len(chunk.token_ids):
            limit = f"{len(chunk.token_texts)} texts for {len(chunk.token_ids)} tokens"
            raise DataLossError(f"sample {self._index} came with {limit}: the router may be older than this client")
        self._seed = chunk.seed
        self._text_bytes += len(chunk.text.encode())
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            self._digest.update(token_id, logprob)
        if chunk.receipt is not None:
            self._check(chunk, chunk.receipt)
            self.done = True

    def _check(self, chunk: Chunk, receipt: Receipt) -> None:
        facts: dict[str, tuple[object, object]] = {
            "seed": (chunk.seed, receipt.seed),
            "finish reason": (chunk.finish_reason, receipt.finish_reason),
            "number of tokens": (self._digest.num_tokens, receipt.num_output_tokens),
            "output digest": (self._digest.hexdigest(), receipt.output_digest),
        }
        if receipt.tokens_digest:  # A router of an earlier version sends no tokens digest.
            facts["tokens digest"] = (self._digest.tokens_hexdigest(), receipt.tokens_digest)
        check_facts(self._index, facts)


class Resumption:
    """Sends a request again until all of its output has been received, or until trying again cannot help."""

    def __init__(self, job: Job, endpoint: Endpoint, deadline: Deadline) -> None:
        self._job = job
        self._endpoint = endpoint
        self._deadline = deadline
        self._samples = [Received(index, with_token_texts=job.logprobs) for index in range(job.n)]
        self._prompt: tuple[int, ...] = ()
        self._fingerprint = ""
        self._has_begun = False
        self._backoff = Backoff()
        self._failing_since: float | None = None

    @property
    def is_whole(self) -> bool:
        return all(sample.done for sample in self._samples)

    @property
    def connect_s(self) -> float:
        """The number of seconds to wait for a router. Once there is output, this is all the time that the call has."""
        return self._deadline.remaining_s if self._has_begun else self._endpoint.connect_s(self._deadline)

    def job(self) -> Job:
        """Return the job that asks for everything that has not been received."""
        points = [point for sample in self._samples if (point := sample.point) is not None]
        return self._job.resumed(points, self._fingerprint) if points else self._job

    def take(self, chunk: Chunk) -> Chunk:
        """Return the chunk as the caller gets it.

        Raises DataLossError or ContractMismatchError if the chunk does not continue the request.
        """
        if chunk.sample_index >= len(self._samples):
            raise DataLossError(f"the router sent sample {chunk.sample_index} of {len(self._samples)}")
        fingerprint, prompt = self._new_fingerprint(chunk.fingerprint), self._new_prompt(chunk.prompt_token_ids)
        self._samples[chunk.sample_index].add(chunk)
        self._has_begun, self._failing_since, self._backoff = True, None, Backoff()
        logprobs = chunk.logprobs if self._job.logprobs else ()
        return replace(chunk, logprobs=logprobs, prompt_token_ids=prompt, fingerprint=fingerprint)

    def finish(self) -> None:
        """Note that the router has ended the stream. Raises DataLossError if a sample is not complete."""
        for index, sample in enumerate(self._samples):
            if not sample.done:
                raise DataLossError(f"the stream ended before sample {index} did")

    def retry_s(self, error: grpc.RpcError, address: str) -> float:
        """Return the number of seconds until the request should be sent again.

        Raises the typed error if trying again would not help, or if there is no time for it. Once output has arrived,
        there is time until the deadline. Before that, there is only the time for making a connection.
        """
        typed = typed_error(error, address)
        delay = self._delay_s(error, typed)
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        left = self._deadline.remaining_s
        if not self._has_begun:
            left = min(left, self._failing_since + self._endpoint.connect_timeout_s - now)
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

    def _new_fingerprint(self, fingerprint: str) -> str:
        """Return the fingerprint if the caller has not been told it yet, else empty text.

        Raises ContractMismatchError if the contract has changed.
        """
        if not self._fingerprint:
            self._fingerprint = fingerprint
            return fingerprint
        if fingerprint not in ("", self._fingerprint):
            differences = {"fingerprint": (self._fingerprint, fingerprint)}
            raise ContractMismatchError("the request went on under another contract", differences)
        return ""

    def _new_prompt(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt's tokens if the caller has not been told them yet, else none.

        Raises DataLossError if the prompt has changed.
        """
        if not self._prompt:
            self._prompt = token_ids
            return token_ids
        if token_ids and token_ids != self._prompt:
            raise DataLossError("the request went on from another prompt")
        return ()
