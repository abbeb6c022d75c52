"""The client SDK: `AsyncClient`, and `Client` with the same methods to call without an event loop.

Every call has a deadline and raises only the errors of `corun.errors`, and OSError where it is given a file. This
module must not know nodes, files or terminals.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from corun.client.generations import Generations, KeptResults
from corun.client.loop_thread import LoopThread
from corun.client.outputs import Outputs
from corun.client.progress import ProgressBar
from corun.client.request import (
    DEFAULT_CONCURRENCY,
    PreparedRequest,
    Resumption,
    at_index,
    check_concurrency,
    checked_scores,
    prepare,
    prepare_all,
    read_chunk,
    read_priority,
    retry_delay_s,
)
from corun.client.routers import (
    DEFAULT_ADDRESS,
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Deadline,
    RouterLink,
    Routers,
    check_timeout,
    closed,
    read_addresses,
)
from corun.completion import Chunk, Generation, Prompt, Scores
from corun.config.fields import TlsConfig
from corun.errors import CorunError, OverloadedError
from corun.observe.trace_context import of_caller
from corun.params import SamplingParams, check_text, check_token_ids
from corun.records.rows import PromptRow
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
from corun.rpc.channel import Access
from corun.types import ClusterStatus, Priority, TemplateSource, Tokens
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceStub

T = TypeVar("T")
P = ParamSpec("P")

STATUS_TIMEOUT_S = 30.0
_LOOP_THREAD = LoopThread()


class AsyncClient:
    """A client of a cluster whose methods are awaited. Use it in one event loop.

    Arguments and errors are those of `Client`.

    Example:
        async with AsyncClient("localhost:50051") as client:
            print((await client.generate("Once upon a time", SamplingParams(max_tokens=64))).text)
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
        check_timeout("timeout_s", timeout_s)
        check_timeout("connect_timeout_s", connect_timeout_s)
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._routers = Routers(read_addresses(address), Access(tls=tls, token=token), ClusterServiceStub)
        self._outputs: dict[RouterLink, Outputs[Chunk]] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._routers.is_closed

    async def close(self) -> None:
        """Close the connections and end every call in flight.

        Example:
            await client.close()
        """
        await self._routers.close()

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
        """Generate all samples of one prompt. Return when they are finished and checked against their receipts.

        Args:
            prompt: text, or token ids.
            params: how tokens are drawn, and how many samples. None: the defaults of SamplingParams.
            seed: the request's seed, in [0, 2^63). None: the router derives one from the request id.
            request_id: the request's id, of at most 128 characters. None: a random id.
            priority: "high", "normal" or "low": which of the waiting requests come first.
            timeout_s: the call's deadline in seconds. None: the client's.

        Raises:
            InvalidArgumentError: a value is outside its limit, or prompt and output do not fit the model.
            OverloadedError: there is no room for the request now. The call does not try again by itself.
            DeadlineError: the samples were not finished in time.
            DataLossError: a sample is incomplete, or differs from its receipt.
            CorunError: all other errors that the class lists.

        Example:
            done = await client.generate("Once upon a time", SamplingParams(max_tokens=64, n=2), seed=7)
            print(done.samples[1].text, done.receipt.output_digest)
        """
        prepared = prepare(prompt, params, seed, request_id, priority)
        return await self._generate(prepared, self._deadline(timeout_s))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the output of one prompt as it is drawn. The chunks of several samples interleave.

        Closing the iterator ends the request and frees its slots. Leaving the loop of a blocking client closes it at
        once. That of an AsyncClient is closed a little later, when Python finalizes it: `contextlib.aclosing` helps.

        The arguments are those of `generate`. The deadline begins with this call, not with the first chunk.

        Raises:
            InvalidArgumentError: at once, if a value is outside the limits of every model.
            CorunError: while iterating, the same errors as `generate`. The router is asked at the first chunk.

        Example:
            async for chunk in client.stream("Once upon a time", SamplingParams(max_tokens=64)):
                print(chunk.text, end="", flush=True)
        """
        prepared = prepare(prompt, params, seed, request_id, priority)
        return self._chunks(prepared, self._deadline(timeout_s))

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        seeds: Sequence[int | None] | None = None,
        results: str | Path | None = None,
        priority: Priority | str = Priority.LOW,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> Generations:
        """Generate the samples of many prompts and return the generations in the order of the prompts.

        An overloaded router is asked again after the delay that it names. The first other error ends the batch. A
        prompt is computed once for all its samples. What is returned is a list, and can be had as a table:
        `to_pandas()`, `to_arrow()`, or `columns()` without any package.

        Args:
            prompts: texts or token ids. All are checked before the first is sent.
            params: the parameters of all prompts, or a sequence with one for each. None: the defaults.
            n: the number of samples of each prompt, at most 256. None: what `params` say.
            seeds: a seed for each prompt, in [0, 2^63), or None for a derived one. None: all are derived. Sample i of a
                prompt has a seed of its own, which follows from the prompt's.
            results: a file for the results, as `corun batch` writes it and `corun verify` reads it. Prompts that have a
                result there are not run again, so the same call goes on where an interrupted one ended. A prompt is
                known by its index. Results that go through a file have no `token_texts`. None: no file.
            priority: low by default, so that a batch gives way to single prompts and may wait until its deadline.
            concurrency: the most prompts in flight at once, at least 1.
            progress: whether to show a bar on stderr once the batch has taken a second. None: if stderr is a terminal.
            timeout_s: the deadline of each prompt in seconds, counted from when its turn comes. None: the client's.

        Raises:
            InvalidArgumentError: a value is outside its limit; the field names the prompt, as in prompts[3].seed. Or
                the file of results has the answer to another prompt.
            ContractMismatchError: the file of results has results of another contract, such as of other weights.
            OverloadedError: there was no room for a prompt until its deadline.
            OSError: the file of results cannot be read or written.
            CorunError: all other errors that `generate` raises.

        Example:
            done = await client.generate_many(["One", "Two"], SamplingParams(logprobs=True), n=8, seeds=[1, 2])
            print([sample.text for sample in done[0].samples], done.columns()["logprobs"])
        """
        check_concurrency(concurrency)
        requests, gate = prepare_all(prompts, params, seeds, n, priority), asyncio.Semaphore(concurrency)
        rows = [prepared.row(index) for index, prepared in enumerate(requests)]
        with await asyncio.to_thread(KeptResults, results, rows) as kept:
            todo = [row for row in rows if row.id not in kept.found]
            bar = ProgressBar(len(todo), "prompts", shown=progress)

            async def run(row: PromptRow) -> None:
                index = int(row.id)
                async with gate:
                    done = await self._retrying(index, requests[index], timeout_s)
                kept.found[row.id] = kept.keep(row, done)
                bar.advance()

            with bar:
                await all_or_none([run(row) for row in todo])
            return Generations(kept.found[row.id] for row in rows)

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        token_texts: bool = False,
        request_id: str | None = None,
        priority: Priority | str = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return the log probabilities of given continuations of a prompt. Nothing is drawn.

        Their bits depend on prompt and continuation alone. Where `Score.equals_generation` is true, they are the bits
        that `generate` reports with these tokens.

        Args:
            prompt: text, or token ids, at least one token.
            continuations: 1 to 256 texts or token ids, of at least one token each and at most 131072 together (or the
                model's length, if that is more). A text is tokenized apart from the prompt and without the special
                tokens that the tokenizer adds; a model may join the two differently, so token ids are the precise way.
            token_texts: whether the texts of tokens are wanted, too.
            request_id: the request's id, of at most 128 characters. None: a random id.
            priority: "high", "normal" or "low": which of the waiting requests come first.
            timeout_s: the call's deadline in seconds. None: the client's.

        Raises:
            InvalidArgumentError: a value is outside its limit, or prompt and continuation do not fit the model.
            OverloadedError: there is no room for the request now. The call does not try again by itself.
            DeadlineError: the continuations were not scored in time.
            DataLossError: the answer is incomplete, or differs from its digests.
            CorunError: all other errors that the class lists.

        Example:
            done = await client.generate("Once upon a time", SamplingParams(logprobs=True), seed=7)
            found = await client.score(done.prompt_token_ids, [done.token_ids])
            print(found.scores[0].logprobs == done.logprobs, found.scores[0].equals_generation)
        """
        request = codec.score_request(
            prompt,
            continuations,
            request_id=request_id or "",
            priority=read_priority(priority),
            token_texts=token_texts,
        )
        deadline = self._deadline(timeout_s)
        return checked_scores(request, await self._answer("Score", request, deadline, codec.scores_from_proto))

    async def get_cluster(
        self, *, samples: bool = False, contracts: bool = True, clients: bool = False, timeout_s: float | None = None
    ) -> ClusterStatus:
        """Return the members of the cluster and how busy they are.

        Where routers ask for tokens, only an operator's token gets all of it.

        Args:
            samples: return which samples hold the slots of decode nodes, too: all of them to an operator, and to others
                what their own samples are and that there are more.
            contracts: return the contract of each node. They are most of the answer, and change with a node only.
            clients: return which clients have samples, too: all of them to an operator, and to others only themselves.
            timeout_s: the call's deadline in seconds. None: the client's, but at most 30.

        Raises:
            UnauthenticatedError: the router asks for a token that the client does not have.
            UnavailableError: no router answers in time.
            CorunError: all other errors that the class lists.

        Example:
            status = await client.get_cluster()
            for node in status.nodes:
                print(node.node.ref.node_id, node.state.value)
        """
        request = pb.GetClusterRequest(with_samples=samples, without_contracts=not contracts, with_clients=clients)
        return await self._ask("GetCluster", request, timeout_s, codec.cluster_status_from_proto)

    async def get_chat_template(self, *, timeout_s: float | None = None) -> TemplateSource:
        """Return the chat template that the model brings. `corun.chat.ChatTemplate` renders chats with it.

        Args:
            timeout_s: the call's deadline in seconds. None: the client's, but at most 30.

        Raises:
            UnavailableError: no router answers in time, or it cannot read the model's template.
            CorunError: all other errors that the class lists.

        Example:
            template = ChatTemplate(await client.get_chat_template())
            text = template.render([{"role": "user", "content": "Hello"}])
            prompt = (await client.tokenize(text, add_special_tokens=False)).token_ids
        """
        return await self._ask("GetChatTemplate", pb.GetChatTemplateRequest(), timeout_s, codec.template_from_proto)

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        with_spellings: bool = False,
        timeout_s: float | None = None,
    ) -> Tokens:
        """Return the tokens that the cluster makes of a text.

        Args:
            text: the text, which may spell special tokens.
            add_special_tokens: add those that the tokenizer adds to every prompt. A rendered chat has them already.
            with_spellings: also return each token as the vocabulary spells it.
            timeout_s: the call's deadline in seconds. None: the client's, but at most 30.

        Raises:
            InvalidArgumentError: the text has no token, or more than the model takes.
            CorunError: all other errors that the class lists.

        Example:
            print((await client.tokenize("Once upon a time")).token_ids)
        """
        request = pb.TokenizeRequest(
            text=check_text("prompt.text", text),
            without_special_tokens=not add_special_tokens,
            with_spellings=with_spellings,
        )
        return await self._ask("Tokenize", request, timeout_s, codec.tokens_from_proto)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of token ids, special tokens included.

        Args:
            token_ids: at least one, and at most as many as the model's length.
            timeout_s: the call's deadline in seconds. None: the client's, but at most 30.

        Raises:
            InvalidArgumentError: there are too many, or one is outside the vocabulary.
            CorunError: all other errors that the class lists.

        Example:
            print(await client.detokenize([1, 2, 3]))
        """
        ids = check_token_ids(token_ids, None, "token_ids")
        request = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
        return await self._ask("Detokenize", request, timeout_s, attrgetter("text"))

    def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition] = (),
        *,
        order_seed: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[VerifyResult, None]:
        """Run cases again and compare every bit. Yield one result per case and condition, as they finish.

        The runs have the lowest priority; what runs beside them takes idle slots only, and gives way. A run that fails
        gives a result with `error`, and no exception.

        Args:
            cases: the samples to run again.
            conditions: the conditions to run each case under, each at most once. Empty: all of them.
            order_seed: the seed that shuffles orders and draws the other samples of a crowd.
            timeout_s: the call's deadline in seconds. None: the client's.

        Raises:
            InvalidArgumentError: at once, or while iterating, if a case is outside its limits.
            OverloadedError: another verification of this client runs.
            DeadlineError: the time is over; a router limits it, too. Ask again for the results that are missing.
            CorunError: all other errors that the class lists.

        Example:
            async for result in client.verify(cases, [Condition.CROWDED]):
                print(result.case_index, result.match, result.error)
        """
        request = codec.verify_request(cases, conditions, order_seed=order_seed)
        return self._verify(request, self._deadline(timeout_s))

    async def _ask(self, method: str, request: Any, timeout_s: float | None, read: Callable[[Any], T]) -> T:
        """Return what `read` makes of a router's one answer to a request that needs no node."""
        deadline = self._deadline(min(self._timeout_s, STATUS_TIMEOUT_S) if timeout_s is None else timeout_s)
        return await self._answer(method, request, deadline, read)

    async def _answer(self, method: str, request: Any, deadline: Deadline, read: Callable[[Any], T]) -> T:
        router = await self._reach(deadline)
        try:
            with self._routers.told():
                ask = getattr(router.stub, method)
                call = ask(request, timeout=deadline.remaining_s, metadata=of_caller())
                return codec.read_answer(read, await self._routers.track(call))
        except grpc.RpcError as error:
            raise self._routers.failed(router, error) from error

    async def _retrying(self, index: int, prepared: PreparedRequest, timeout_s: float | None) -> Generation:
        deadline = self._deadline(timeout_s)
        while True:
            try:
                with at_index(index):
                    return await self._generate(prepared, deadline)
            except OverloadedError as error:
                delay = retry_delay_s(error, deadline)
            await self._routers.pause(delay)

    async def _generate(self, prepared: PreparedRequest, deadline: Deadline) -> Generation:
        assembler = prepared.assembler()
        async with aclosing(self._chunks(prepared, deadline)) as chunks:
            async for chunk in chunks:
                assembler.add(chunk)
        return assembler.finish()

    async def _chunks(self, prepared: PreparedRequest, deadline: Deadline) -> AsyncGenerator[Chunk, None]:
        rest, routers = Resumption(prepared, deadline, self._connect_timeout_s), self._routers
        while not rest.is_whole:
            router = await routers.reach(rest.connect_s)
            if router not in self._outputs:
                self._outputs[router] = Outputs(router.stub, routers.track, read_chunk)
            chunks = self._outputs[router].generate(rest.request(), deadline, prepared.metadata)
            try:
                with routers.told():
                    async with aclosing(chunks):
                        async for chunk in chunks:
                            yield rest.take(chunk)
                rest.finish()
            except grpc.RpcError as error:
                typed = routers.failed(router, error)
                if not rest.is_whole:
                    await routers.pause(rest.retry_s(error, typed))

    async def _verify(self, request: pb.VerifyRequest, deadline: Deadline) -> AsyncGenerator[VerifyResult, None]:
        router = await self._reach(deadline)
        call = router.stub.Verify(request, timeout=deadline.remaining_s)
        try:
            with self._routers.told():
                async for response in self._routers.track(call):
                    yield codec.read_answer(codec.verify_result_from_proto, response)
        except grpc.RpcError as error:
            raise self._routers.failed(router, error) from error
        finally:
            call.cancel()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _reach(self, deadline: Deadline) -> RouterLink:
        return await self._routers.reach(min(self._connect_timeout_s, deadline.remaining_s))


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results. The first error ends the others, and is raised when they
    have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the method of `Client` that runs this one of `AsyncClient`, and waits for what it returns."""

    def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(method(client._client, *args, **kwargs))

    return _named(run, method)


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return the method of `Client` that runs this one of `AsyncClient`, and waits for each item that it yields."""

    def iterate(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return client._iterate(method(client._client, *args, **kwargs))

    return _named(iterate, method)


def _made_from(
    inner: Callable[P, AsyncClient],
) -> Callable[[Callable[[Client, AsyncClient], None]], Callable[Concatenate[Client, P], None]]:
    """Give the constructor of `Client` the arguments of the inner client, which it gets ready made."""

    def decorate(constructor: Callable[[Client, AsyncClient], None]) -> Callable[Concatenate[Client, P], None]:
        def init(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> None:
            constructor(client, inner(*args, **kwargs))

        return _named(init, AsyncClient.__init__)

    return decorate


def _named(blocking: T, method: Callable[..., Any]) -> T:
    """Return a blocking method with name, arguments and text of its original, but without `async` and `await`."""
    named: Any = blocking
    functools.update_wrapper(named, method)
    signature = inspect.signature(method)
    returned = re.sub(r"AsyncGenerator\[(\w+), None\]", r"Iterator[\1]", str(signature.return_annotation))
    named.__signature__ = signature.replace(return_annotation=returned)
    named.__annotations__ = {**method.__annotations__, "return": returned}
    named.__qualname__ = f"Client.{method.__name__}"
    named.__doc__ = re.sub(r"\b(async|await) ", "", method.__doc__ or "")
    return blocking


class Client:
    """A client of a cluster whose methods block. Several threads may share it.

    The client connects when it is first used. Use it as a context manager, or call `close`. If the connection or the
    router fails after output has begun, the request is resumed with any router until its deadline.

    Calls run on an event loop in a thread of their own, so they may block in the thread of another loop, as in a
    notebook. Ctrl-C ends a call at the router, too. gRPC does not survive a fork: spawn processes, or fork first.

    Args:
        address: host:port of a router, or several of them ("a:1,b:2", or a sequence), which are tried in turn.
        timeout_s: the deadline in seconds of a call that gives none.
        connect_timeout_s: how many seconds of a call's deadline may pass before a router is reachable.
        tls: the PEM files for routers that serve TLS. None: no TLS.
        token: the client's token, for routers that ask for one. Empty: none.

    Raises:
        InvalidArgumentError: an address, a timeout, the token or a TLS file cannot be used.

    A call may raise these errors, all of which are CorunErrors:
        InvalidArgumentError: a value is outside its limit, for any model or for the one that is served.
        UnauthenticatedError, PermissionDeniedError: the token is missing or wrong, or does not allow a value.
        OverloadedError: there is no room now; `retry_after_s` says when to try again.
        UnavailableError: no router answers in time, the cluster lacks something that the call needs, or the process
            was forked after a client was used.
        DeadlineError: the call's deadline has passed.
        CancelledByPeerError: the client was closed, or the other side ended the call.
        ContractMismatchError: a resumed request would go on under another contract than it began under.
        DataLossError: what was received differs from its receipt, or from what was received before.
        InternalError: the router has a bug; the message has an id to look up in its log. Or its answer cannot be read:
            it may be of a later version than this client.

    Example:
        with Client("localhost:50051") as client:
            print(client.generate("Once upon a time", SamplingParams(max_tokens=64)).text)
    """

    @_made_from(AsyncClient)
    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        weakref.finalize(self, _LOOP_THREAD.abandon, client._routers).atexit = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end every call in flight with CancelledByPeerError.

        Example:
            client.close()
        """
        _LOOP_THREAD.close(self._client._routers)

    generate = _blocking(AsyncClient.generate)
    stream = _iterating(AsyncClient.stream)
    generate_many = _blocking(AsyncClient.generate_many)
    score = _blocking(AsyncClient.score)
    get_cluster = _blocking(AsyncClient.get_cluster)
    get_chat_template = _blocking(AsyncClient.get_chat_template)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    verify = _iterating(AsyncClient.verify)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        answer = _LOOP_THREAD.submit(work)
        try:
            return answer.result()
        except CancelledError:
            raise closed() from None
        finally:
            answer.cancel()  # A call that Ctrl-C interrupts here ends at the router, too.

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while (item := self._run(_next(items))) is not None:
                yield item
        finally:  # This may run in any thread, even the loop's own, if the iterator is garbage. So it does not wait.
            with suppress(CorunError):
                _LOOP_THREAD.submit(items.aclose())


async def _next(items: AsyncIterator[T]) -> T | None:
    """Return the next item, or None after the last one."""
    return await anext(items, None)
