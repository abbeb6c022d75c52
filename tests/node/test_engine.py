"""What an engine is refused for before it serves, and how it answers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from corun.config.fields import DecodeConfig, PrefillConfig
from corun.errors import UnavailableError
from corun.node.vllm import pin
from corun.node.vllm.start import answer, call_workers, nixl_endpoint, prepare, refuse_unfit
from corun.types import NixlEndpoint, NodeRole
from tests.loading import environment, load


def test_the_port_of_handshakes_is_held_until_the_engine_listens() -> None:
    """Nobody who takes any port gets it; ZMQ, which asks for it, does; a second node does not."""
    port = nixl_endpoint(PrefillConfig(model="m"), "e").port
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
    try:
        assert port not in {server.getsockname()[1] for server in taken}
    finally:
        for server in taken:
            server.close()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listener.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(UnavailableError, match=f"cannot be answered at 127.0.0.1:{port}: Address already in use"):
            nixl_endpoint(PrefillConfig(model="m", nixl_port=port), "e")


def test_a_start_finds_what_an_earlier_one_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's compile cache has a key over its variables, the port of NIXL's handshakes among them, and a node may have
    another port at each start."""
    envs = load("vllm.envs")

    def key(port: int, **variables: str) -> Any:
        monkeypatch.setattr(pin, "_pinned", {})
        node = DecodeConfig(model="m")
        endpoint = NixlEndpoint(engine_id=f"engine-{port}", host="127.0.0.1", port=port, tp_size=1)
        with environment(**variables):
            prepare(node, NodeRole.DECODE, endpoint)
            return envs.compile_factors()

    assert key(7001) == key(7002)
    assert key(7001, VLLM_NIXL_SIDE_CHANNEL_PORT="7001") != key(7001, VLLM_NIXL_SIDE_CHANNEL_PORT="7002")


def config(role: str = "kv_consumer", tensor_parallel_size: int = 1, **changes: Any) -> Any:
    """The parts of a `VllmConfig` that are read back."""
    values: dict[str, Any] = {
        "async_scheduling": True,
        "prefix_caching_hash_algo": "sha256",
        "disable_cascade_attn": True,
        "enable_flashinfer_autotune": False,
        "fuse_allreduce_rms": False,
        "disable_custom_all_reduce": tensor_parallel_size > 2,
        "inductor": dict(pin.GPU_INDUCTOR),
        "speculative_config": None,
        "is_diffusion": False,
        "splits": 1,
        **changes,
    }
    one = SimpleNamespace(**values, tensor_parallel_size=tensor_parallel_size)
    parts = ("scheduler_config", "cache_config", "model_config", "kernel_config", "parallel_config")
    compilation = SimpleNamespace(pass_config=one, inductor_compile_config=values["inductor"])
    transfer = SimpleNamespace(kv_role=role)
    return SimpleNamespace(
        **dict.fromkeys(parts, one),
        speculative_config=values["speculative_config"],
        compilation_config=compilation,
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=values["splits"]),
        kv_transfer_config=transfer,
    )


GPU = {
    "platform": "cuda",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_kinds": ["FullAttentionSpec"],
    "runner": "v2 GPUModelRunner",
    "split_policy": "none",
}
CPU = {
    **GPU,
    "platform": "cpu",
    "attention_backend": "CPU_ATTN",
    "runner": "v1 CPUModelRunner",
    "split_policy": "split-kv off",
}
MAX_32 = {**GPU, "split_policy": "at most 32 splits by the batch"}
OWN_LENGTH = {**GPU, "split_policy": "own-length 2048 max 16"}
SPLITS = {**CPU, "split_policy": "split-kv on"}
ON_CPU = {"async_scheduling": False, "inductor": {}}  # vLLM's choice there
PREFILL_ON_CPU = {**ON_CPU, "role": "kv_producer"}


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, GPU),
        ({"tensor_parallel_size": 4}, GPU),
        ({"role": "kv_producer"}, GPU),
        ({"role": "kv_producer", "splits": 16}, GPU),
        ({"splits": 16}, OWN_LENGTH),
        (ON_CPU, CPU),
        (PREFILL_ON_CPU, CPU),
        ({**PREFILL_ON_CPU, "enable_prefix_caching": True}, CPU),
    ],
)
def test_what_keeps_the_contract_is_fit(settings: dict[str, Any], seen: dict[str, Any]) -> None:
    refuse_unfit(config(**settings), seen)


@pytest.mark.parametrize(
    ("settings", "seen", "reason"),
    [
        ({}, {**GPU, "attention_backend": "FLASHMLA"}, "attention backend FLASHMLA must be one of"),
        ({}, {**GPU, "kv_cache_kinds": ["FullAttentionSpec", "MambaSpec"]}, "it has MambaSpec in its KV cache"),
        ({}, {**GPU, "kv_cache_kinds": ["SlidingWindowSpec"]}, "SlidingWindowSpec in its KV cache"),
        ({}, {**GPU, "runner": "v1 GPUModelRunner"}, "the model runner is 'v1 GPUModelRunner' in the engine, but was"),
        (ON_CPU, {**CPU, "runner": "v2 GPUModelRunner"}, "was set to 'v1 CPUModelRunner'"),
        ({"async_scheduling": False}, GPU, "vLLM's async_scheduling is 'False' in the engine, but was set to 'True'"),
        ({"async_scheduling": None}, GPU, "async_scheduling is 'None'"),
        ({"prefix_caching_hash_algo": "xxhash"}, GPU, "prefix_caching_hash_algo is 'xxhash'"),
        # Both come from a model's config.json alone.
        ({"speculative_config": {"method": "eagle3"}}, GPU, "speculative decoding is 'True'"),
        ({"is_diffusion": True}, GPU, "is_diffusion is 'True'"),
        ({"disable_cascade_attn": False}, GPU, "disable_cascade_attn is 'False'"),
        ({"enable_flashinfer_autotune": True}, GPU, "enable_flashinfer_autotune is 'True'"),
        ({"fuse_allreduce_rms": True}, GPU, "fuse_allreduce_rms is 'True'"),
        ({"tensor_parallel_size": 4, "disable_custom_all_reduce": False}, GPU, "disable_custom_all_reduce is 'False'"),
        ({"inductor": {"combo_kernels": False}}, GPU, "inductor deterministic is 'None' in the engine, but was set to"),
        ({"inductor": {**pin.GPU_INDUCTOR, "combo_kernels": False}}, GPU, "inductor combo_kernels is 'False'"),
        ({"inductor": {**pin.GPU_INDUCTOR, "benchmark_combo_kernel": True}}, GPU, "benchmark_combo_kernel is 'True'"),
        ({}, MAX_32, "attention's split-KV is 'at most 32 splits by the batch' in the engine, but was set to 'none'"),
        ({}, OWN_LENGTH, "split-KV is 'own-length 2048 max 16' in the engine, but was set to 'none'"),
        ({"splits": 16}, GPU, "split-KV is 'none' in the engine, but was set to 'own-length 2048 max 16'"),
        ({"splits": 32}, MAX_32, "was set to 'one of none, own-length 2048 max 16'"),
        ({"role": "kv_producer"}, MAX_32, "split-KV is 'at most 32 splits by the batch'"),
        ({"role": "kv_producer", "splits": 16}, OWN_LENGTH, "split-KV is 'own-length 2048 max 16'"),
        ({}, {**GPU, "split_policy": "unknown: a builder has no limit"}, "split-KV is 'unknown: a builder has no"),
        (ON_CPU, SPLITS, "split-KV is 'split-kv on' in the engine, but was set to 'split-kv off'"),
        (PREFILL_ON_CPU, SPLITS, "split-KV is 'split-kv on'"),
    ],
)
def test_what_cannot_keep_the_contract_is_refused(settings: dict[str, Any], seen: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnavailableError, match=reason):
        refuse_unfit(config(**settings), seen)


async def test_a_step_is_handed_on_whole_and_counted_where_vllm_counts() -> None:
    """What vLLM's own output loop would have told its metrics of a step, and nothing when nobody asked for metrics. The
    token that a prompt draws for nobody is not counted."""
    stats: list[tuple[Any, Any, int]] = []
    taken: list[list[Any]] = []
    output = SimpleNamespace(new_token_ids=[7, 0xBDCCCCCD], kv_transfer_params=None)
    of_prompt = SimpleNamespace(new_token_ids=[7, 0xBDCCCCCD], kv_transfer_params={"remote_block_ids": [[1]]})
    steps = [SimpleNamespace(outputs=[output, of_prompt, output], scheduler_stats="s1", engine_index=0)]
    steps.append(SimpleNamespace(outputs=[], scheduler_stats="s2", engine_index=0))

    async def get_output_async() -> Any:
        if not steps:
            raise RuntimeError("the engine is dead")
        return steps.pop(0)

    def record(scheduler: Any, step: Any, *, engine_idx: int) -> None:
        stats.append((scheduler, step and step.num_generation_tokens, engine_idx))

    cls = load("corun.node.vllm.start").step_llm()
    llm = type("Llm", (cls,), {"__del__": lambda self: None, "__init__": lambda self: None})()
    llm.engine_core = SimpleNamespace(get_output_async=get_output_async)
    llm.on_outputs = taken.append
    llm.logger_manager = SimpleNamespace(record=record)
    await llm._pump()
    assert taken == [[output, of_prompt, output]]
    assert stats == [("s1", 2, 0), ("s2", None, 0)]
    steps.append(SimpleNamespace(outputs=[output]))
    llm.logger_manager = None
    await llm._pump()
    assert taken[1:] == [[output]]


class Llm:
    """The calls of `AsyncLLM` that an answer takes."""

    def __init__(self) -> None:
        self.errored = False
        self.result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def is_sleeping(self) -> bool:
        return await self.result


async def test_a_question_ends_with_its_answer_or_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves it unanswered when the engine dies."""
    monkeypatch.setattr("corun.node.vllm.start.ANSWER_POLL_S", 0.01)
    llm, other, failing = Llm(), Llm(), Llm()
    asking = asyncio.create_task(answer(llm))
    await asyncio.sleep(0.03)
    assert not asking.done()
    llm.errored = True
    with pytest.raises(UnavailableError, match="the engine died"):
        await asking
    assert llm.result.cancelled()
    other.result.set_result(False)
    await answer(other)
    failing.result.set_exception(RuntimeError("EngineDeadError"))
    with pytest.raises(UnavailableError, match="the engine died"):
        await answer(failing)


@pytest.mark.parametrize("dead", [True, False])
async def test_only_a_dead_engine_makes_a_failed_call_to_its_workers_unavailable(dead: bool) -> None:
    """Routers then know of a lost node. What a living worker raises is still a fault of its own."""
    died = load("vllm.v1.engine.exceptions").EngineDeadError()

    async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        raise died if dead else RuntimeError("Call to share_kv failed")

    llm = SimpleNamespace(collective_rpc=collective_rpc)
    with pytest.raises(UnavailableError if dead else RuntimeError, match="the engine died" if dead else "share_kv"):
        await call_workers(llm, "share_kv", "r", ["d0"], timeout_s=1.0)
