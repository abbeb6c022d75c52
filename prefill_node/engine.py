"""The prefill node's vLLM engine: its steps compute prompts, and their KV is kept for NIXL readers.

Owns: the engine's arguments, and the conversion of vLLM's `kv_transfer_params` to a `KvHandle`. Must not know: gRPC,
routers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from corun.config.fields import PrefillConfig
from corun.contract import Contract
from corun.errors import InternalError, InvalidArgumentError, UnavailableError
from corun.node.certificate import Certificate, untested
from corun.node.kv.handle import (
    BEGAN_PARAM,
    CACHED,
    CHECK_PARAM,
    FREEDOMS_PARAM,
    IDLE_PARAM,
    OWNERS_PARAM,
    STAMPS_PARAM,
    STEPS_PARAM,
    TARGETS_PARAM,
    bound,
    is_checked,
    owner,
)
from corun.node.kv.stamps import stamps
from corun.node.vllm import start as base
from corun.node.vllm.facts import model_contract, prefill_contract
from corun.params import check_lengths, check_scored_lengths
from corun.receipt import prompt_digest
from corun.types import Freedom, KvHandle, KvOwner, NixlEndpoint, NodeRef, NodeRole, TokenScores
from prefill_node.recheck import Computation, Digests
from prefill_node.sharing import PromptRequest

MAX_SEQUENCES = 128
"""The most prompts of two steps together: with asynchronous scheduling those of the step before, whose output has not
been read back yet, keep their places. Enough for two full steps of a colocated node with prompts of 128 tokens."""
TILE = 128
"""The rows of a matrix product's tile: padding up to a whole one costs nothing."""
RELEASE_TIMEOUT_S = 30.0
HELD_TIMEOUT_S = 1.0
UNIQUE = "must be unique to one attempt"
log = logging.getLogger(__name__)


def prefill_buckets(chunk_size: int) -> tuple[int, ...]:
    """Return the step lengths that get a CUDA graph, ascending: denser where padding costs most, at most the chunk.

    A prompt alone is never longer than a chunk. Steps of several prompts may be; see `long_steps`.
    """
    sizes = [*range(16, 128, 16), *range(128, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 256)]
    return tuple(size for size in sizes if size <= chunk_size)


def contract_buckets(chunk_size: int) -> tuple[int, ...]:
    """Return the step lengths to which a prompt alone is padded, as the contract of both kinds of nodes has them. The
    graphs of longer steps are none of these: only what is certified runs them."""
    return prefill_buckets(chunk_size) if base.on_gpu() else ()


def long_steps(tokens: int, chunk_size: int) -> tuple[int, ...]:
    """Return the step lengths above a chunk that get a CUDA graph, too, ascending to a full step of `tokens`.

    To launch the kernels of a step takes the engine's thread tens of milliseconds, with a small model or many experts
    longer than the GPU takes to run them. Each length is an eighth less than the next, so that not much of a step is
    padding: a large model would compute the rest in less time. A prompt that is computed as the contract says never
    runs one of these graphs: there are some only where a full step has two chunks and more.
    """
    found = list[int]()
    while 2 * chunk_size <= tokens and (length := found[-1] * 7 // 8 // TILE * TILE if found else tokens) > chunk_size:
        found.append(length)
    return tuple(reversed(found))


def arguments(config: PrefillConfig, endpoint: NixlEndpoint) -> Any:
    """Pin the environment, then return the engine's `AsyncEngineArgs`."""
    base.prepare(config, NodeRole.PREFILL, endpoint)
    from vllm import AsyncEngineArgs

    step_tokens = max(base.STEP_TOKENS, config.chunk_size)
    made = AsyncEngineArgs(
        **base.shared_arguments(config, [NodeRole.PREFILL], endpoint),
        scheduler_cls="prefill_node.scheduler.PrefillScheduler",
        worker_cls="prefill_node.worker.PrefillWorker",
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=max(base.compiled_tokens(), config.chunk_size),
        max_num_scheduled_tokens=step_tokens,
        long_prefill_token_threshold=config.chunk_size,
    )
    if base.on_gpu():
        # There is one graph per bucket. A step is padded to the next bucket above its own length, so other requests
        # cannot change the shape of a prompt's own step.
        sizes = [*prefill_buckets(config.chunk_size), *long_steps(step_tokens, config.chunk_size)]
        made.compilation_config = base.gpu_graphs("PIECEWISE", sizes)
        made.attention_config = base.gpu_attention(made)
    return made


def salt(scope: str, freedoms: Collection[str]) -> str:
    """Return what vLLM adds to the hash of a prompt's first block: only prompts with the same salt share cached KV."""
    return json.dumps([scope, *sorted(freedoms)])


def cached(request_id: str, owners: Iterable[tuple[str, int]]) -> int:
    """Return how many of a prompt's blocks others have computed. owners: as in `OWNERS_PARAM`."""
    return sum(count for name, count in owners if name != request_id)


def _core_request(request_id: str, prompt_token_ids: Sequence[int], given: dict[str, Any], cache_salt: str) -> Any:
    """Return what the core is given for a prompt, with `given` as its own part of vLLM's `kv_transfer_params`."""
    from vllm.sampling_params import SamplingParams

    # The single token that prefill draws is discarded: decode draws every token, including the first.
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"do_remote_prefill": False, **given}},
    )
    return base.core_request(request_id, prompt_token_ids, sampling, cache_salt)


class VllmPrefillEngine:
    """Implements `prefill_node.sharing.PrefillEngine` on `AsyncLLM`. Build it with `launch`."""

    def __init__(
        self,
        llm: Any,
        facts: base.EngineFacts,
        contract: Contract,
        ref: NodeRef,
        endpoint: NixlEndpoint,
        check_fraction: float,
        certificate: Certificate,
    ) -> None:
        self.facts = facts
        self.contract = contract
        self.certificate = certificate
        """What the node may do, by its own test and by what was found in service, and why it may not do the rest."""
        self.freedoms: frozenset[str] = certificate.held
        """What prompts may make use of now, unless they are to be isolated: `corun.types.Freedom` and `CACHED`, by
        name. Nothing needs to be forgotten when one is taken away: what was computed with it is found only with it
        (`salt`)."""
        self.endpoint = endpoint
        """Where the node's NIXL handshakes are answered, with the addresses of its stamp tables."""
        self.on_death: Callable[[], None] = lambda: None
        self.on_finding: Callable[[str], None] = lambda finding: None
        self.steps = 0
        """Always 0. The steps of a prompt are not visible from outside, but the core answers between them."""
        self.on_checked: Callable[[Computation], None] = lambda computation: None
        """Called with each prompt that is checked and was not computed as the contract says."""
        self.expired_claims = 0
        """The number of prompts whose KV was not read before its lease ended, by the worker's last report."""
        self._llm = llm
        self._ref = ref
        self._check_fraction = check_fraction
        self._kept: dict[str, list[int]] = {}  # request id -> ids of KV blocks, until the worker no longer holds them
        self._fresh: set[str] = set()  # Prefills kept since the worker was last asked; it may not know them yet.
        self._asking = asyncio.Lock()
        self._computing: dict[str, asyncio.Future[Any]] = {}

    @classmethod
    async def launch(cls, config: PrefillConfig, ref: NodeRef, endpoint: NixlEndpoint) -> VllmPrefillEngine:
        """Load the model and start the engine (`base.started`)."""
        made = arguments(config, endpoint)
        buckets = contract_buckets(config.chunk_size)
        llm, seen, facts = await base.started(made)
        contract = prefill_contract(model_contract(llm, config, seen), seen, config.chunk_size, buckets)
        decided_by = base.deciding_facts(llm, config, contract, seen, facts)
        certificate, _ = await base.certify_freedoms(llm, untested(config, NodeRole.PREFILL, facts.finding), decided_by)
        engine = await cls.of(llm, facts, contract, ref, endpoint, config, certificate)
        llm.on_outputs, llm.on_dead = engine.take, engine.note_dead
        return engine

    @classmethod
    async def of(
        cls,
        llm: Any,
        facts: base.EngineFacts,
        contract: Contract,
        ref: NodeRef,
        endpoint: NixlEndpoint,
        config: PrefillConfig,
        certificate: Certificate,
    ) -> VllmPrefillEngine:
        """Return the prefill side of a started engine, which does not hear of its outputs yet."""
        addresses = await base.call_workers(llm, "stamp_address", timeout_s=base.OBSERVE_TIMEOUT_S)
        endpoint = replace(endpoint, stamp_addresses=tuple(addresses))
        engine = cls(llm, facts, contract, ref, endpoint, config.kv_check_fraction, certificate)
        if config.prefix_caching:
            engine.freedoms |= {CACHED}
        return engine

    @property
    def engine_id(self) -> str:
        return self.endpoint.engine_id

    def withdraw(self, finding: str) -> None:
        """See `PrefillEngine.withdraw`."""
        self.freedoms = frozenset()
        for freedom in Freedom:
            self.certificate = self.certificate.without(freedom, finding)
        self.on_finding(finding)

    async def prefill(self, prompt: PromptRequest) -> tuple[KvHandle, float]:
        """See `PrefillEngine.prefill`.

        Raises:
            InvalidArgumentError: no node can compute the prompt (field "prompt.token_ids"), it can never fit this
                node's KV, or KV is still held here under the same id.
        """
        request_id, token_ids = prompt.request_id, prompt.token_ids
        self._check(request_id, token_ids)
        freedoms = frozenset() if prompt.isolated else self._allowed(prompt.scope)
        given = {
            "do_remote_decode": True,
            STAMPS_PARAM: self._stamps(request_id, token_ids),
            CHECK_PARAM: is_checked(request_id, self._check_fraction),
            FREEDOMS_PARAM: sorted(freedoms),
            IDLE_PARAM: prompt.reader == self._ref,  # Only `recompute` reads its own prompts.
        }
        request = _core_request(request_id, token_ids, given, salt(prompt.scope, freedoms))
        params = (await self._run(request)).kv_transfer_params
        if params is None:
            raise InternalError(f"the engine kept no KV for prefill {request_id}")
        self._kept[request_id] = [*itertools.chain(*params["remote_block_ids"])]
        self._fresh.add(request_id)
        owners = tuple(KvOwner(request_id=name, num_blocks=count) for name, count in params[OWNERS_PARAM])
        cached_blocks = cached(request_id, params[OWNERS_PARAM])
        handle = KvHandle(
            prefill_node=self._ref,
            engine_id=params["remote_engine_id"],
            request_id=params["remote_request_id"],
            block_ids=tuple(tuple(group) for group in params["remote_block_ids"]),
            host=params["remote_host"],
            port=params["remote_port"],
            tp_size=params["tp_size"],
            num_tokens=params["remote_num_tokens"],
            prompt_digest=prompt_digest(token_ids),
            reader=prompt.reader,
            owners=owners,
            cached_tokens=cached_blocks * self.facts.block_size,
        )
        has_whole_block = len(token_ids) >= self.facts.block_size  # Only these are compared.
        if given[CHECK_PARAM] and has_whole_block and (freedoms - {CACHED} or cached_blocks):
            await self._tell_checked(token_ids, handle, freedoms, params[STEPS_PARAM])
        return bound(handle), params[BEGAN_PARAM]

    async def score(
        self, request_id: str, token_ids: Sequence[int], num_scored: int, scope: str = ""
    ) -> tuple[TokenScores, float]:
        """See `PrefillEngine.score`. The last token itself is not computed: no token after it is scored.

        Raises InvalidArgumentError as `prefill` does.
        """
        prompt, targets = list(token_ids[:-1]), list(token_ids[-num_scored:])
        self._check(request_id, token_ids, more=0)
        freedoms = self._allowed(scope)
        given = {
            "do_remote_decode": False,
            TARGETS_PARAM: targets,
            STAMPS_PARAM: self._stamps(request_id, prompt),
            FREEDOMS_PARAM: sorted(freedoms),
        }
        output = await self._run(_core_request(request_id, prompt, given, salt(scope, freedoms)))
        params, found = output.kv_transfer_params, output.new_prompt_logprobs_tensors
        if params is None or found is None:
            raise InternalError(f"the engine did not score {request_id}")
        logprobs, top_logprobs = found.logprobs.T.tolist()
        scores = TokenScores(
            logprobs=tuple(logprobs),
            top_token_ids=tuple(found.logprob_token_ids.tolist()),
            top_logprobs=tuple(top_logprobs),
            cached_tokens=cached(request_id, params[OWNERS_PARAM]) * self.facts.block_size,
        )
        return scores, params[BEGAN_PARAM]

    def _check(self, request_id: str, token_ids: Sequence[int], more: int = 1) -> None:
        """Raise InvalidArgumentError if these tokens cannot be computed here. more: the tokens that follow them."""
        # Routers check lengths and token ids before they begin. The engine has no tokenizer, and a token id that the
        # model does not have would crash it.
        if more:
            check_lengths(len(token_ids), more, self.facts.max_model_len)
        else:
            check_scored_lengths(1, [len(token_ids) - 1], self.facts.max_model_len)
        if (largest := max(token_ids)) >= self.facts.vocab_size:
            raise InvalidArgumentError("prompt.token_ids", largest, f"must be in [0, {self.facts.vocab_size})")
        room = self.facts.kv_blocks * self.facts.block_size - more
        if len(token_ids) > room:
            raise InvalidArgumentError("prompt_token_ids", f"{len(token_ids)} tokens", f"must be at most {room} tokens")
        if request_id in self._kept or request_id in self._computing:
            raise InvalidArgumentError("request_id", request_id, UNIQUE)

    def _allowed(self, scope: str) -> frozenset[str]:
        """Return what a prompt of this scope may make use of."""
        return self.freedoms if scope else self.freedoms - {CACHED}

    def _stamps(self, request_id: str, prompt: Sequence[int]) -> bytes:
        block_size = self.facts.block_size
        return stamps([(owner(request_id, self._ref), -(-len(prompt) // block_size))], prompt, block_size)

    async def _tell_checked(
        self,
        prompt_token_ids: Sequence[int],
        handle: KvHandle,
        freedoms: Collection[str],
        steps: Sequence[Sequence[int]],
    ) -> None:
        """Pass a computation on to be repeated, if the worker tells its digests soon: a client waits for the handle."""
        try:
            digests = await self._digests(handle, HELD_TIMEOUT_S)
        except UnavailableError as error:
            log.warning("prefill %s is not checked: %s", handle.request_id, error)
            return
        self.on_checked(
            Computation(
                prompt_token_ids=tuple(prompt_token_ids),
                digests=digests,
                freedoms=freedoms,
                cached_tokens=handle.cached_tokens,
                steps=steps,
            )
        )

    async def recompute(self, prompt_token_ids: Sequence[int]) -> Digests:
        """See `PrefillEngine.recompute`."""
        name = f"recheck-{secrets.token_hex(12)}"
        try:
            handle, _ = await self.prefill(PromptRequest(name, prompt_token_ids, self._ref, isolated=True))
            del self._kept[name]  # No reader waits for it.
            self._fresh.discard(name)
            return await self._digests(handle, RELEASE_TIMEOUT_S)
        finally:
            with suppress(UnavailableError):  # Then its lease ends it.
                await asyncio.shield(self.release(name, name))

    async def _digests(self, handle: KvHandle, timeout_s: float) -> Digests:
        """Return the digests of a held prompt's whole blocks. The rest of its last block is not the prompt's."""
        (blocks,) = handle.block_ids
        whole = blocks[: handle.num_tokens // self.facts.block_size]
        return await base.call_workers(self._llm, "kv_contents", whole, timeout_s=timeout_s)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        """See `PrefillEngine.share`. All ranks must still hold the KV, because a read from a rank without it fails."""
        answers = await base.call_workers(self._llm, "share_kv", request_id, readers, timeout_s=RELEASE_TIMEOUT_S)
        if any(answers) and not all(answers):
            for reader in readers:
                await self.release(request_id, reader)
        return all(answers)

    def holds(self, request_id: str) -> bool:
        return request_id in self._kept

    async def release(self, request_id: str, reader: str) -> None:
        await base.call_workers(self._llm, "release_kv", request_id, reader, timeout_s=RELEASE_TIMEOUT_S)

    async def held_kv_blocks(self) -> int:
        """See `PrefillEngine.held_kv_blocks`. If the engine is busy with a long step, or is being asked already, return
        the last known number."""
        if self._llm.errored:  # If no prefill is running, only this check notices.
            self.on_death()
        # Asking keeps an idle worker spinning for a second (device_communicators/shm_broadcast.py). Of two parallel
        # questions, one could drop prefills that the other still holds as fresh.
        if not self._kept or self._asking.locked():
            return self.known_kv_blocks
        async with self._asking:
            fresh, self._fresh = self._fresh, set()
            try:
                held = await base.call_workers(self._llm, "held_kv", timeout_s=HELD_TIMEOUT_S)
            except (UnavailableError, asyncio.CancelledError) as error:
                self._fresh |= fresh
                if isinstance(error, asyncio.CancelledError):
                    raise
                return self.known_kv_blocks
            known = fresh | self._fresh | {name for rank in held for name in rank["names"]}
            self.expired_claims = held[0]["expired"]
            self._kept = {name: blocks for name, blocks in self._kept.items() if name in known}
        return self.known_kv_blocks

    @property
    def known_kv_blocks(self) -> int:
        """The number of KV blocks that are held, as far as is known without asking the worker. A block that several
        prompts hold counts once."""
        return len(set().union(*self._kept.values()))

    async def answer(self) -> None:
        """See `corun.node.watchdog.Engine.answer`."""
        await base.answer(self._llm)

    def computed_s(self) -> float:
        """See `corun.node.watchdog.Engine.computed_s`."""
        return base.computed_s(self.contract)

    async def close(self) -> None:
        """End the engine's processes."""
        base.end(self._llm)

    async def _run(self, request: Any) -> Any:
        """Compute a prompt, given as `_core_request` returns it; return its last output.

        Raises InvalidArgumentError if the engine still has a prompt of this id, which nobody here knows of any more.
        """
        request_id = request.request_id
        done = self._computing[request_id] = asyncio.get_running_loop().create_future()
        try:
            await base.unless_dead(self._llm.engine_core.add_request_async(request), self.on_death)
            output = await done
            if str(output.finish_reason) == "error":  # Its scheduler knows the id (corun/node/vllm/scheduler.py).
                raise InvalidArgumentError("request_id", request_id, UNIQUE)
            return output
        except asyncio.CancelledError:
            # It may have ended just before. So its id counts as that of held KV until the worker says otherwise.
            self._kept[request_id] = []
            self._fresh.add(request_id)
            await asyncio.shield(self._llm.engine_core.abort_requests_async([request_id]))
            raise
        finally:
            del self._computing[request_id]

    def take(self, outputs: Sequence[Any]) -> None:
        """Take what one engine step says about prompts."""
        for output in outputs:
            done = self._computing.get(output.request_id)
            if done is not None and output.finish_reason is not None and not done.done():
                done.set_result(output)

    def note_dead(self) -> None:
        for done in self._computing.values():
            if not done.done():
                done.set_exception(UnavailableError("the engine died"))
        self.on_death()
