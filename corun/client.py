"""The client SDK: `Client`, and `AsyncClient` with the same methods to await.

Every call has a deadline and raises nothing but the errors of `corun.errors`. What the two clients share is in
`corun.calls`; here is what differs, blocking and awaiting. This module must not know nodes, files or terminals.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from corun import wire
from corun.calls import (
    DEFAULT_ADDRESS,
    DEFAULT_CONCURRENCY,
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Deadline,
    Endpoint,
    Job,
    at_index,
    check_concurrency,
    make_job,
    make_jobs,
    read_chunk,
    retry_delay_s,
)
from corun.channel import Access, channel, sync_channel
from corun.cluster import ClusterStatus, Condition, VerifyCase, VerifyResult
from corun.config import TlsConfig
from corun.errors import CancelledByPeerError, CorunError, InvalidArgumentError, OverloadedError, UnavailableError
from corun.generation import Chunk, Generation, Prompt
from corun.params import SamplingParams
from corun.progress import ProgressBar
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceStub

C = TypeVar("C", bound="_Cancellable")
T = TypeVar("T")


class Client:
    """A router's client; blocks. Safe to use from several threads.

    address: host:port of a router. timeout_s: the deadline of a call that names none. connect_timeout_s: how much of
    it may pass before a router is reachable. tls: for a router that serves TLS. token: for one that wants it. Connects
    when first used.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        tls: TlsConfig | None = None,
        token: str = "",
    ) -> None:
        self._endpoint = Endpoint(
            address=address,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            access=Access(tls=tls, token=token),
        )
        self._channel = sync_channel(address, access=self._endpoint.access)
        # gRPC's own wait for a channel polls it in a thread, which dies of a traceback if the channel closes meanwhile.
        self._probe: Any = self._channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        self._reached = False
        self._stub: Any = ClusterServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call in flight."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """All samples of one prompt, text or token ids, once they are finished and checked against their receipts."""
        job = make_job(prompt, params, seed, request_id)
        return self._generate(job, self._endpoint.deadline(timeout_s), _Calls())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """The same as it is drawn; samples interleave. Leaving the loop ends the request and frees its slot."""
        job = make_job(prompt, params, seed, request_id)
        return self._responses(
            self._stub.Generate, job.request, read_chunk, self._endpoint.deadline(timeout_s), _Calls()
        )

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Generation]:
        """The generations of many prompts, in order; at most `concurrency` at once.

        params: for all, or one per prompt. timeout_s: of each prompt. progress=None shows a bar on a terminal when
        the batch takes longer than a second. An overloaded router is asked again when it says so. The first other
        error ends the batch.
        """
        check_concurrency(concurrency)
        jobs, calls = make_jobs(prompts, params, seeds), _Calls()
        pool = ThreadPoolExecutor(max_workers=max(1, min(concurrency, len(jobs))), thread_name_prefix="corun-client")
        with ProgressBar(len(jobs), "prompts", shown=progress) as bar, pool:
            futures = [pool.submit(self._retrying, i, job, timeout_s, calls) for i, job in enumerate(jobs)]
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.advance()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                calls.end()
                raise
        return [future.result() for future in futures]

    def get_cluster(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """What the cluster is made of and how busy it is."""
        deadline, calls = self._endpoint.status_deadline(timeout_s), _Calls()
        self._wait_for_router(deadline, calls)
        try:
            return wire.cluster_status_from_proto(
                self._stub.GetCluster(pb.GetClusterRequest(), timeout=deadline.remaining_s)
            )
        except grpc.RpcError as error:
            raise self._failed(error) from error

    def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition] = (),
        *,
        order_seed: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[VerifyResult]:
        """Runs cases again and compares every bit; a result per case and condition (none given: all), as they come."""
        request = wire.verify_request(cases, conditions, order_seed=order_seed)
        read, deadline = wire.verify_result_from_proto, self._endpoint.deadline(timeout_s)
        return self._responses(self._stub.Verify, request, read, deadline, _Calls())

    def _retrying(self, index: int, job: Job, timeout_s: float | None, calls: _Calls) -> Generation:
        deadline = self._endpoint.deadline(timeout_s)
        while True:
            try:
                return self._generate(job, deadline, calls)
            except OverloadedError as error:
                delay = retry_delay_s(error, deadline)
            except InvalidArgumentError as error:
                raise at_index(index, error) from error
            calls.sleep(delay)

    def _generate(self, job: Job, deadline: Deadline, calls: _Calls) -> Generation:
        assembler = job.assembler()
        for chunk in self._responses(self._stub.Generate, job.request, read_chunk, deadline, calls):
            assembler.add(chunk)
        return assembler.finish()

    def _responses(
        self, method: Any, request: Any, read: Callable[[Any], T], deadline: Deadline, calls: _Calls
    ) -> Iterator[T]:
        self._wait_for_router(deadline, calls)
        with calls.hold(method(request, timeout=deadline.remaining_s)) as call:
            try:
                for response in call:
                    yield read(response)
            except grpc.RpcError as error:
                raise self._failed(error) from error

    def _wait_for_router(self, deadline: Deadline, calls: _Calls) -> None:
        """Returns once a router answers anything at all; after that, until a call finds it gone."""
        if self._reached:
            return
        wait_s = self._endpoint.connect_s(deadline)
        with calls.hold(self._probe.future(b"", timeout=wait_s, wait_for_ready=True)) as answer:
            code = answer.code()
        if code is grpc.StatusCode.CANCELLED:
            raise CancelledByPeerError("the call ended before a router answered")
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            raise self._endpoint.unreachable(wait_s)
        self._reached = True

    def _failed(self, error: grpc.RpcError) -> CorunError:
        typed = self._endpoint.typed(error)
        self._reached &= not isinstance(typed, UnavailableError)
        return typed


class AsyncClient:
    """A router's client; to await, in one event loop. See `Client`, whose methods and arguments it has."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        tls: TlsConfig | None = None,
        token: str = "",
    ) -> None:
        self._endpoint = Endpoint(
            address=address,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            access=Access(tls=tls, token=token),
        )
        self._open: tuple[grpc.aio.Channel, Any] | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call in flight."""
        if self._open is not None:
            await self._open[0].close(None)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """All samples of one prompt, text or token ids, once they are finished and checked against their receipts."""
        return await self._generate(make_job(prompt, params, seed, request_id), self._endpoint.deadline(timeout_s))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """The same as it is drawn; samples interleave. Leaving the loop ends the request and frees its slot."""
        job = make_job(prompt, params, seed, request_id)
        return self._responses("Generate", job.request, read_chunk, self._endpoint.deadline(timeout_s))

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Generation]:
        """The generations of many prompts, in order; at most `concurrency` at once. See `Client.generate_many`."""
        check_concurrency(concurrency)
        jobs, gate = make_jobs(prompts, params, seeds), asyncio.Semaphore(concurrency)
        with ProgressBar(len(jobs), "prompts", shown=progress) as bar:

            async def run(index: int, job: Job) -> Generation:
                async with gate:
                    done = await self._retrying(index, job, timeout_s)
                bar.advance()
                return done

            tasks = [asyncio.create_task(run(i, job)) for i, job in enumerate(jobs)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def get_cluster(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """What the cluster is made of and how busy it is."""
        deadline = self._endpoint.status_deadline(timeout_s)
        stub = await self._router(deadline)
        try:
            response = await stub.GetCluster(pb.GetClusterRequest(), timeout=deadline.remaining_s)
        except grpc.RpcError as error:
            raise self._endpoint.typed(error) from error
        return wire.cluster_status_from_proto(response)

    def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition] = (),
        *,
        order_seed: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[VerifyResult]:
        """Runs cases again and compares every bit; a result per case and condition (none given: all), as they come."""
        request = wire.verify_request(cases, conditions, order_seed=order_seed)
        return self._responses("Verify", request, wire.verify_result_from_proto, self._endpoint.deadline(timeout_s))

    async def _retrying(self, index: int, job: Job, timeout_s: float | None) -> Generation:
        deadline = self._endpoint.deadline(timeout_s)
        while True:
            try:
                return await self._generate(job, deadline)
            except OverloadedError as error:
                delay = retry_delay_s(error, deadline)
            except InvalidArgumentError as error:
                raise at_index(index, error) from error
            await asyncio.sleep(delay)

    async def _generate(self, job: Job, deadline: Deadline) -> Generation:
        assembler = job.assembler()
        async for chunk in self._responses("Generate", job.request, read_chunk, deadline):
            assembler.add(chunk)
        return assembler.finish()

    async def _responses(
        self, method: str, request: Any, read: Callable[[Any], T], deadline: Deadline
    ) -> AsyncGenerator[T, None]:
        stub = await self._router(deadline)
        call = getattr(stub, method)(request, timeout=deadline.remaining_s)
        try:
            async for response in call:
                yield read(response)
        except grpc.RpcError as error:
            raise self._endpoint.typed(error) from error
        finally:
            call.cancel()

    async def _router(self, deadline: Deadline) -> Any:
        """The stub, once the router is reachable."""
        channel, stub = self._open = self._open or self._connect()
        wait_s = self._endpoint.connect_s(deadline)
        try:
            await asyncio.wait_for(channel.channel_ready(), wait_s)
        except asyncio.TimeoutError:
            raise self._endpoint.unreachable(wait_s) from None
        return stub

    def _connect(self) -> tuple[grpc.aio.Channel, Any]:
        # Needs the running loop, so not in the constructor.
        opened = channel(self._endpoint.address, access=self._endpoint.access)
        return opened, ClusterServiceStub(opened)  # type: ignore[no-untyped-call]


class _Cancellable(Protocol):
    def cancel(self) -> Any: ...


class _Calls:
    """What one method of `Client` has in flight, so that another thread can end all of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._held: dict[int, _Cancellable] = {}

    @contextmanager
    def hold(self, call: C) -> Iterator[C]:
        """Cancels the call on the way out, and earlier if everything is ended."""
        with self._lock:
            self._held[id(call)] = call
        try:
            if self._ended.is_set():
                call.cancel()
            yield call
        finally:
            with self._lock:
                del self._held[id(call)]
            call.cancel()

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            held = list(self._held.values())
        for call in held:
            call.cancel()

    def sleep(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise CancelledByPeerError("the batch ended")
