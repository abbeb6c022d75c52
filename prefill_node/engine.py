"""The prefill node's vLLM engine: one prompt a step, KV kept for a NIXL reader.

Owns: the engine's arguments and the way from vLLM's `kv_transfer_params` to a `KvHandle`. Must not know: gRPC, routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from corun.config.fields import PrefillConfig
from corun.contract import Contract
from corun.errors import InternalError, InvalidArgumentError, Shown, UnavailableError
from corun.node.kv.handle import bound, is_checked, owner
from corun.node.kv.owners import CHECK_PARAM, OWNER_PARAM
from corun.node.vllm import start as base
from corun.node.vllm.facts import model_contract, prefill_contract
from corun.params import check_lengths
from corun.receipt import prompt_digest
from corun.types import KvHandle, NixlEndpoint, NodeRef, NodeRole

# One computes; the others are done and wait for their output to be read back (async scheduling).
MAX_SEQUENCES = 8
RELEASE_TIMEOUT_S = 30.0
HELD_TIMEOUT_S = 1.0


def prefill_buckets(chunk_size: int) -> tuple[int, ...]:
    """Step lengths that get a CUDA graph, ascending: finer where padding would cost most, none above the chunk."""
    sizes = [*range(16, 128, 16), *range(128, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 256)]
    return tuple(size for size in sizes if size <= chunk_size)


def arguments(config: PrefillConfig, endpoint: NixlEndpoint) -> Any:
    """The engine's `AsyncEngineArgs`; pins the environment first."""
    base.prepare(config, NodeRole.PREFILL, endpoint)
    from vllm import AsyncEngineArgs

    made = AsyncEngineArgs(
        **base.shared_arguments(config, NodeRole.PREFILL, endpoint),
        scheduler_cls="prefill_node.scheduler.IsolatedPrefillScheduler",
        worker_cls="prefill_node.worker.PrefillWorker",
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=config.chunk_size,
    )
    if base.on_gpu():
        # A graph per bucket: a step is padded to the next bucket of its own length, which nobody else can change.
        made.compilation_config = base.gpu_graphs("PIECEWISE", prefill_buckets(config.chunk_size))
        made.attention_config = base.gpu_attention(made)
    return made


class VllmPrefillEngine:
    """Implements `prefill_node.service.PrefillEngine` on `AsyncLLM`. Build it with `launch`."""

    def __init__(
        self,
        llm: Any,
        facts: base.EngineFacts,
        contract: Contract,
        ref: NodeRef,
        endpoint: NixlEndpoint,
        check_fraction: float,
    ) -> None:
        self.facts = facts
        self.contract = contract
        self.endpoint = endpoint
        """With the addresses of the stamps."""
        self.on_death: Callable[[], None] = lambda: None
        self.steps = 0
        """Always: a prompt's steps are not seen from outside, but the core answers between them."""
        self.expired_claims = 0
        """Prompts whose KV nobody read before its lease ended; as the worker last said."""
        self._llm = llm
        self._ref = ref
        self._check_fraction = check_fraction
        self._kept: dict[str, int] = {}  # request id -> KV blocks, until the worker no longer holds them
        self._fresh: set[str] = set()  # kept since the worker was last asked, and maybe not known to it yet
        self._asking = asyncio.Lock()

    @classmethod
    async def launch(cls, config: PrefillConfig, ref: NodeRef, endpoint: NixlEndpoint) -> VllmPrefillEngine:
        """Loads the model and starts the engine; blocks the event loop meanwhile (25-90 s)."""
        made = arguments(config, endpoint)
        from vllm.v1.engine.async_llm import AsyncLLM

        buckets = tuple(made.compilation_config.cudagraph_capture_sizes or ())
        llm = AsyncLLM.from_engine_args(made)
        seen = await base.observe(llm)
        facts = base.facts(llm, finding=await base.certify(llm))
        model = model_contract(llm, config, seen)
        contract = prefill_contract(model, seen, config.chunk_size, buckets)
        stamps = await base.call_workers(llm, "stamp_address", timeout_s=base.OBSERVE_TIMEOUT_S)
        endpoint = replace(endpoint, stamp_addresses=tuple(stamps))
        return cls(llm, facts, contract, ref, endpoint, config.kv_check_fraction)

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        """See `PrefillEngine.prefill`.

        Raises:
            InvalidArgumentError: no node can compute the prompt (field "prompt.token_ids"), it can never fit this
                node's KV, or the id still names KV that is held here.
        """
        self._check_prompt(prompt_token_ids)
        self._check_fits(len(prompt_token_ids))
        if request_id in self._kept:  # vLLM's scheduler dies of an id that it still knows.
            raise InvalidArgumentError("request_id", request_id, "must be unique to one attempt")
        digest = prompt_digest(prompt_token_ids)
        params = await self._run(request_id, prompt_token_ids, owner(request_id, self._ref, digest))
        self._kept[request_id] = sum(len(group) for group in params["remote_block_ids"])
        self._fresh.add(request_id)
        handle = KvHandle(
            prefill_node=self._ref,
            engine_id=params["remote_engine_id"],
            request_id=params["remote_request_id"],
            block_ids=tuple(tuple(group) for group in params["remote_block_ids"]),
            host=params["remote_host"],
            port=params["remote_port"],
            tp_size=params["tp_size"],
            num_tokens=params["remote_num_tokens"],
            prompt_digest=digest,
            reader=reader,
        )
        return bound(handle)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        """See `PrefillEngine.share`. Of several ranks all must hold it: one that has let go would be read in vain."""
        answers = await base.call_workers(self._llm, "share_kv", request_id, readers, timeout_s=RELEASE_TIMEOUT_S)
        if any(answers) and not all(answers):
            for reader in readers:
                await self.release(request_id, reader)
        return all(answers)

    def holds(self, request_id: str) -> bool:
        """See `PrefillEngine.holds`."""
        return request_id in self._kept

    async def release(self, request_id: str, reader: str) -> None:
        """See `PrefillEngine.release`."""
        await base.call_workers(self._llm, "release_kv", request_id, reader, timeout_s=RELEASE_TIMEOUT_S)

    async def held_kv_blocks(self) -> int:
        """See `PrefillEngine.held_kv_blocks`. While the engine is deep in a step, the last known number."""
        if self._llm.errored:  # With no prefill under way, nobody else notices.
            self.on_death()
        if not self._kept:  # Asking keeps an idle worker spinning for a second (device_communicators/shm_broadcast.py).
            return 0
        async with self._asking:  # Else the second of two would take what the first has yet to hear of for gone.
            await self._ask_held()
        return self.known_kv_blocks

    @property
    def known_kv_blocks(self) -> int:
        """KV blocks that are held, as far as is known without asking."""
        return sum(self._kept.values())

    async def _ask_held(self) -> None:
        fresh, self._fresh = self._fresh, set()
        try:
            held = await base.call_workers(self._llm, "held_kv", timeout_s=HELD_TIMEOUT_S)
        except UnavailableError:
            self._fresh |= fresh
        except asyncio.CancelledError:
            self._fresh |= fresh
            raise
        else:
            known = fresh | self._fresh | {name for rank in held for name in rank["names"]}
            self.expired_claims = held[0]["expired"]
            self._kept = {name: blocks for name, blocks in self._kept.items() if name in known}

    async def answer(self) -> None:
        """See `corun.node.watchdog.Engine.answer`."""
        await base.answer(self._llm)

    def computed_s(self) -> float:
        """See `corun.node.watchdog.Engine.computed_s`."""
        return base.computed_s(self.contract)

    async def close(self) -> None:
        """Ends the engine's processes."""
        self._llm.shutdown()

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Routers check the same before they begin. The engine, which has no tokenizer, ends of a token that the model
        does not have."""
        check_lengths(len(prompt_token_ids), 1, self.facts.max_model_len)
        if (largest := max(prompt_token_ids)) >= self.facts.vocab_size:
            raise InvalidArgumentError("prompt.token_ids", largest, f"must be in [0, {self.facts.vocab_size})")

    def _check_fits(self, num_tokens: int) -> None:
        room = self.facts.kv_blocks * self.facts.block_size - 1
        if num_tokens > room:
            raise InvalidArgumentError("prompt_token_ids", f"{num_tokens} tokens", f"must be at most {room} tokens")

    async def _run(self, request_id: str, prompt_token_ids: Sequence[int], owner_name: int) -> dict[str, Any]:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        # The one token that prefill draws is discarded: decode draws every token, the first included.
        transfer = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            OWNER_PARAM: owner_name,
            CHECK_PARAM: is_checked(request_id, self._check_fraction),
        }
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer},
        )
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
        params: dict[str, Any] | None = None
        try:
            async for output in self._llm.generate(prompt, sampling, request_id):
                params = output.kv_transfer_params or params
        except EngineDeadError:
            self.on_death()
            raise
        except ValueError as error:  # vLLM's validation errors are such.
            raise InvalidArgumentError(
                "prompt.token_ids", Shown(f"{len(prompt_token_ids)} tokens"), str(error)
            ) from None
        if params is None:
            raise InternalError(f"the engine kept no KV for prefill {request_id}")
        return params
