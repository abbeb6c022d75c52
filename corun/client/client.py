"""The client SDK: `Client`, and `AsyncClient` with the same methods to await.

Every call has a deadline and raises nothing but the errors of `corun.errors`. What the two clients share is in
`corun.client.request`; here is what differs, blocking and awaiting. This module must not know nodes, files or
terminals.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from corun.client.progress import ProgressBar
from corun.client.request import (
    DEFAULT_ADDRESS,
    DEFAULT_CONCURRENCY,
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Job,
    at_index,
    check_concurrency,
    make_job,
    make_jobs,
    read_chunk,
    retry_delay_s,
)
from corun.client.resume import Resumption
from corun.client.routers import Deadline, Endpoint, Links, Search, read_addresses
from corun.completion import Chunk, Generation, Prompt
from corun.config.fields import TlsConfig
from corun.errors import CancelledByPeerError, InvalidArgumentError, OverloadedError
from corun.params import SamplingParams
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
from corun.rpc.channel import Access, channel, sync_channel
from corun.types import ClusterStatus, Priority
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceStub

C = TypeVar("C", bound="_Cancellable")

_PROBE = "/grpc.health.v1.Health/Check"
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Client:
    """A cluster's client; blocks. Safe to use from several threads.

    address: host:port of a router, or several ("a:1,b:2", or a sequence) that are tried in turn. timeout_s: deadline of
    a call that names none. connect_timeout_s: how much of it may pass before a router is reachable. tls: for routers
    that serve TLS. token: for those that want one. Connects when first used. A generation survives its connection and
    its router: until its deadline it is resumed, with any router.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        tls: TlsConfig | None = None,
        token: str = "",
    ) -> None:
        self._endpoint = Endpoint(
            addresses=read_addresses(address),
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            access=Access(tls=tls, token=token),
        )
        self._links = Links(
            [_SyncLink(each, sync_channel(each, access=self._endpoint.access)) for each in self._endpoint.addresses]
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call in flight."""
        self._links.closed = True
        for link in self._links.all:
            link.channel.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Generation:
        """All samples of one prompt, text or token ids, once they are finished and checked against their receipts.

        priority: "high", "normal" or "low": which of the requests that wait for a slot come first.
        """
        job = make_job(prompt, params, seed, request_id, priority)
        return self._generate(job, self._endpoint.deadline(timeout_s), _Calls())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """The same as it is drawn; samples interleave. Leaving the loop ends the request and frees its slot."""
        job = make_job(prompt, params, seed, request_id, priority)
        return self._chunks(job, self._endpoint.deadline(timeout_s), _Calls())

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        priority: Priority | str = Priority.LOW,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Generation]:
        """The generations of many prompts, in order; at most `concurrency` at once.

        params: for all, or one per prompt. priority: low, so that a batch gives way to single prompts and may wait for
        as long as its time allows. timeout_s: of each prompt. progress=None shows a bar on a terminal when
        the batch takes longer than a second. An overloaded router is asked again when it says so. The first other
        error ends the batch.
        """
        check_concurrency(concurrency)
        jobs, calls = make_jobs(prompts, params, seeds, priority), _Calls()
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
        link = self._link(self._endpoint.connect_s(deadline), calls)
        try:
            return codec.cluster_status_from_proto(
                link.stub.GetCluster(pb.GetClusterRequest(), timeout=deadline.remaining_s)
            )
        except grpc.RpcError as error:
            raise self._links.failed(link, error) from error

    def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition] = (),
        *,
        order_seed: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[VerifyResult]:
        """Runs cases again and compares every bit; a result per case and condition (none given: all), as they come.

        In idle slots and at the lowest priority. A router ends a long call with DeadlineError: ask it for the rest.
        """
        request = codec.verify_request(cases, conditions, order_seed=order_seed)
        return self._verify(request, self._endpoint.deadline(timeout_s), _Calls())

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
        for chunk in self._chunks(job, deadline, calls):
            assembler.add(chunk)
        return assembler.finish()

    def _chunks(self, job: Job, deadline: Deadline, calls: _Calls) -> Iterator[Chunk]:
        rest = Resumption(job, self._endpoint, deadline)
        while not rest.is_whole:
            link = self._link(rest.connect_s, calls)
            asked = link.stub.Generate(rest.job().request, timeout=deadline.remaining_s, metadata=job.metadata)
            with calls.hold(asked) as call:
                try:
                    for response in call:
                        yield rest.take(read_chunk(response))
                    rest.finish()
                except grpc.RpcError as error:
                    self._links.failed(link, error)
                    lost = error
            if not rest.is_whole:
                calls.sleep(rest.retry_s(lost, link.address))

    def _verify(self, request: pb.VerifyRequest, deadline: Deadline, calls: _Calls) -> Iterator[VerifyResult]:
        link = self._link(self._endpoint.connect_s(deadline), calls)
        with calls.hold(link.stub.Verify(request, timeout=deadline.remaining_s)) as call:
            try:
                for response in call:
                    yield codec.verify_result_from_proto(response)
            except grpc.RpcError as error:
                raise self._links.failed(link, error) from error

    def _link(self, wait_s: float, calls: _Calls) -> _SyncLink:
        """The first link whose router answers anything at all; after that the same, until a call finds it gone."""
        search = Search(self._endpoint, wait_s)
        while not self._links.reached:
            link = self._links.check_open().current
            with calls.hold(link.probe.future(b"", timeout=search.probe_s)) as answer:
                code = answer.code()
            if code is grpc.StatusCode.CANCELLED:
                raise CancelledByPeerError("the call ended before a router answered")
            if code not in _NO_ANSWER:
                self._links.reached = True
                return link
            self._links.leave(link)
            calls.sleep(search.pause_s())
        return self._links.check_open().current


class AsyncClient:
    """A cluster's client; to await, in one event loop. See `Client`, whose methods and arguments it has."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        tls: TlsConfig | None = None,
        token: str = "",
    ) -> None:
        self._endpoint = Endpoint(
            addresses=read_addresses(address),
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            access=Access(tls=tls, token=token),
        )
        self._opened: Links[_AsyncLink] | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call in flight."""
        if self._opened is not None:
            self._opened.closed = True
            for link in self._opened.all:
                await link.channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Generation:
        """All samples of one prompt, text or token ids, once they are finished and checked against their receipts.

        priority: "high", "normal" or "low": which of the requests that wait for a slot come first.
        """
        job = make_job(prompt, params, seed, request_id, priority)
        return await self._generate(job, self._endpoint.deadline(timeout_s))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """The same as it is drawn; samples interleave. Leaving the loop ends the request and frees its slot."""
        job = make_job(prompt, params, seed, request_id, priority)
        return self._chunks(job, self._endpoint.deadline(timeout_s))

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        priority: Priority | str = Priority.LOW,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Generation]:
        """The generations of many prompts, in order; at most `concurrency` at once. See `Client.generate_many`."""
        check_concurrency(concurrency)
        jobs, gate = make_jobs(prompts, params, seeds, priority), asyncio.Semaphore(concurrency)
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
        link = await self._link(self._endpoint.connect_s(deadline))
        try:
            response = await link.stub.GetCluster(pb.GetClusterRequest(), timeout=deadline.remaining_s)
        except grpc.RpcError as error:
            raise self._links.failed(link, error) from error
        return codec.cluster_status_from_proto(response)

    def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition] = (),
        *,
        order_seed: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[VerifyResult]:
        """Runs cases again and compares every bit; a result per case and condition (none given: all), as they come.

        In idle slots and at the lowest priority. A router ends a long call with DeadlineError: ask it for the rest.
        """
        request = codec.verify_request(cases, conditions, order_seed=order_seed)
        return self._verify(request, self._endpoint.deadline(timeout_s))

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
        async with aclosing(self._chunks(job, deadline)) as chunks:
            async for chunk in chunks:
                assembler.add(chunk)
        return assembler.finish()

    async def _chunks(self, job: Job, deadline: Deadline) -> AsyncGenerator[Chunk, None]:
        rest = Resumption(job, self._endpoint, deadline)
        while not rest.is_whole:
            link = await self._link(rest.connect_s)
            call = link.stub.Generate(rest.job().request, timeout=deadline.remaining_s, metadata=job.metadata)
            try:
                async for response in call:
                    yield rest.take(read_chunk(response))
                rest.finish()
            except grpc.RpcError as error:
                self._links.failed(link, error)
                lost = error
            finally:
                call.cancel()
            if not rest.is_whole:
                await asyncio.sleep(rest.retry_s(lost, link.address))

    async def _verify(self, request: pb.VerifyRequest, deadline: Deadline) -> AsyncGenerator[VerifyResult, None]:
        link = await self._link(self._endpoint.connect_s(deadline))
        call = link.stub.Verify(request, timeout=deadline.remaining_s)
        try:
            async for response in call:
                yield codec.verify_result_from_proto(response)
        except grpc.RpcError as error:
            raise self._links.failed(link, error) from error
        finally:
            call.cancel()

    async def _link(self, wait_s: float) -> _AsyncLink:
        """See `Client._link`."""
        search = Search(self._endpoint, wait_s)
        while not self._links.reached:
            link = self._links.check_open().current
            answer = link.probe(b"", timeout=search.probe_s)
            try:
                code = await answer.code()
            finally:
                answer.cancel()
            if code not in _NO_ANSWER:
                self._links.reached = True
                return link
            self._links.leave(link)
            await asyncio.sleep(search.pause_s())
        return self._links.check_open().current

    @property
    def _links(self) -> Links[_AsyncLink]:
        if self._opened is None:  # Channels need the running loop, so they are not made in the constructor.
            access = self._endpoint.access
            self._opened = Links([_AsyncLink(each, channel(each, access=access)) for each in self._endpoint.addresses])
        return self._opened


class _Link:
    """One router, from a client's side."""

    def __init__(self, address: str, channel: Any) -> None:
        self.address = address
        # gRPC's own wait for a channel polls it in a thread, which dies of a traceback if the channel closes meanwhile.
        self.probe: Any = channel.unary_unary(_PROBE, bytes, bytes)
        self.stub: Any = ClusterServiceStub(channel)  # type: ignore[no-untyped-call]


class _SyncLink(_Link):
    def __init__(self, address: str, channel: grpc.Channel) -> None:
        super().__init__(address, channel)
        self.channel = channel


class _AsyncLink(_Link):
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        super().__init__(address, channel)
        self.channel = channel


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
