"""The engine of a colocated node: one vLLM engine that both sides use, each through its own class.

Owns: the engine's arguments, and which side gets which of its KV and its outputs. Must not know: gRPC, routers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from colocated_node.shares import BUCKETS, SLOTS, prompt_blocks
from corun.config.fields import ColocatedConfig
from corun.node.certificate import untested
from corun.node.vllm import start as base
from corun.node.vllm.facts import decode_contract, model_contract, prefill_contract
from corun.types import Freedom, NixlEndpoint, NodeRef, NodeRole
from decode_node.engine import VllmDecodeEngine, certify_rows
from decode_node.slots import smaller_than
from prefill_node.engine import MAX_SEQUENCES, VllmPrefillEngine, contract_buckets, long_steps


def arguments(config: ColocatedConfig, endpoint: NixlEndpoint) -> Any:
    """Pin the environment, then return the engine's `AsyncEngineArgs`.

    Raises InvalidArgumentError for a setting that this platform cannot keep.
    """
    base.prepare(config, NodeRole.DECODE, endpoint)
    from vllm import AsyncEngineArgs

    base.check_split(config.decode_split)
    # Rows take a part of it. vLLM wants a token for each sequence.
    tokens = max(base.compiled_tokens(), config.slots + max(config.chunk_size, MAX_SEQUENCES))
    buckets = contract_buckets(config.chunk_size)
    shares = {SLOTS: config.slots, BUCKETS: list(buckets)}
    made = AsyncEngineArgs(
        **base.shared_arguments(config, [NodeRole.PREFILL, NodeRole.DECODE], endpoint, **shares),
        scheduler_cls="colocated_node.scheduler.ColocatedScheduler",
        worker_cls="colocated_node.worker.ColocatedWorker",
        max_num_seqs=config.slots + MAX_SEQUENCES,
        max_num_batched_tokens=tokens,
        long_prefill_token_threshold=config.chunk_size,
    )
    if base.on_gpu():
        sizes = sorted({*buckets, *smaller_than(config.slots), config.slots, *long_steps(tokens, config.chunk_size)})
        made.compilation_config = base.gpu_graphs("FULL_AND_PIECEWISE", sizes)
        made.attention_config = base.gpu_attention(made, config.decode_split)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class ColocatedEngine:
    """The two sides of one engine."""

    prefill: VllmPrefillEngine
    decode: VllmDecodeEngine

    @classmethod
    async def launch(cls, config: ColocatedConfig, prefill_ref: NodeRef, endpoint: NixlEndpoint) -> ColocatedEngine:
        """Load the model and start the engine (`base.started`)."""
        made = arguments(config, endpoint)
        llm, seen, facts = await base.started(made)
        model = model_contract(llm, config, seen)
        buckets = tuple(made.kv_transfer_config.kv_connector_extra_config[BUCKETS])
        prefill_part = prefill_contract(model, seen, config.chunk_size, buckets)
        decode_part = decode_contract(model, seen, facts)
        of_prompts, _ = await base.certify_freedoms(
            llm,
            untested(config, NodeRole.PREFILL, facts.finding),
            base.deciding_facts(llm, config, prefill_part, seen, facts),
        )
        sizes, of_rows = await certify_rows(
            llm,
            untested(config, NodeRole.DECODE, facts.finding)[Freedom.ROWS],
            base.deciding_facts(llm, config, decode_part, seen, facts),
        )

        prompts = prompt_blocks(facts.kv_blocks, facts.block_size, facts.max_model_len)
        prefill = await VllmPrefillEngine.of(
            llm,
            replace(facts, kv_blocks=prompts),
            prefill_part,
            prefill_ref,
            endpoint,
            config,
            of_prompts,
        )
        decode = VllmDecodeEngine.of(
            llm,
            replace(facts, kv_blocks=facts.kv_blocks - prompts),
            decode_part,
            of_rows,
            endpoint.engine_id,
            [*sizes, config.slots],
        )
        engine = cls(prefill=prefill, decode=decode)
        llm.on_outputs, llm.on_dead = engine._take, engine._note_dead
        return engine

    def _take(self, outputs: list[Any]) -> None:
        """Give each side its outputs: only a prompt's says where its KV is, or that it is scored. A first token is sent
        before the answer to its prompt is made."""
        if of_samples := [one for one in outputs if one.kv_transfer_params is None]:
            self.decode.take(of_samples)
        self.prefill.take(outputs)

    def _note_dead(self) -> None:
        self.prefill.note_dead()
        self.decode.note_dead()
