"""What a worker says of what it loaded and of its processor, and how it lays out KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from tests.loading import load


@pytest.fixture(scope="module")
def worker() -> Any:
    return load("corun.node.vllm.worker")


@pytest.fixture
def model(torch: Any) -> Any:
    """Parameters of several parts, strided ones, a scalar, nothing at all."""
    model = torch.nn.Module()
    numbers = torch.arange(60, dtype=torch.float32)
    tensors = {
        "wide": numbers.view(4, 15),
        "strided": numbers.view(5, 12).t(),
        "half_precision": numbers.to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 7),
        "flags": numbers > 7,
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor.clone(memory_format=torch.preserve_format))
    return model


def test_the_digest_is_of_names_shapes_dtypes_and_bytes(worker: Any, torch: Any, model: Any) -> None:
    digest = worker.weights_digest(model)
    assert len(digest) == 64
    for name in ("wide", "strided", "half_precision", "scalar", "flags"):
        old = getattr(model, name)
        changed = old.clone(memory_format=torch.preserve_format)
        changed[(-1,) * changed.dim()] = 0
        for other in (changed, old.reshape(1, *old.shape), old.to(torch.float64)):
            setattr(model, name, other)
            assert worker.weights_digest(model) != digest
        setattr(model, name, old)
    assert worker.weights_digest(model) == digest


@pytest.mark.parametrize("part_bytes", [1, 16, 60, 10**6])
def test_strides_and_threads_are_not_part_of_it(
    worker: Any, torch: Any, model: Any, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PART_BYTES", part_bytes)
    digest = worker.weights_digest(model)
    monkeypatch.setattr(worker, "HASH_THREADS", 1)
    model.strided = model.strided.contiguous()
    assert worker.weights_digest(model) == digest


def test_parts_are_all_rows_in_order(worker: Any, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PART_BYTES", 32)
    rows = torch.arange(20, dtype=torch.float32).view(5, 4)
    parts = list(worker._parts(rows))
    assert [part.shape[0] for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat(parts), rows)


def test_a_worker_ends_with_the_core_of_its_engine(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It watches from the first moment on, and not by vLLM's own way, which may hang."""
    began: list[str] = []
    monkeypatch.setattr(worker, "end_with_parent", lambda: began.append("watches"))
    monkeypatch.setattr(worker.pin, "set_switches", lambda *args: began.append("switches"))
    monkeypatch.setattr(worker.PlatformWorker, "init_device", lambda self: began.append("device"))
    for name in ("nap_instead", "poll_with_timeout"):
        monkeypatch.setattr(worker.busy_wait, name, lambda: None)
    made = object.__new__(worker.NodeWorker)
    made.parallel_config = SimpleNamespace(world_size=2)
    made.init_device()
    assert began == ["watches", "switches", "device"]


def test_a_gpu_worker_tells_how_many_multiprocessors_it_sees(
    worker: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and MIG give a process fewer than the GPU has."""
    graphs = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[4, 2])
    model = torch.nn.Module()
    runner = SimpleNamespace(attn_groups=[], get_model=lambda: model)
    scheduler = SimpleNamespace(max_num_batched_tokens=4096)
    config = SimpleNamespace(compilation_config=graphs, scheduler_config=scheduler)
    node = SimpleNamespace(device="cuda:1", vllm_config=config, model_runner=runner, unfit_attention="")
    on_cpu = worker.NodeWorker._observe_device(node)
    assert (on_cpu["multiprocessors"], on_cpu["kernel_packages"]) == (0, [])
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: False)
    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {"cuda:1": properties}.__getitem__)
    assert worker.NodeWorker._observe_device(node) == {
        "split_policy": "unknown: there is no attention",
        "graph": "FULL [2, 4]",
        "traced_tokens": 4096,
        "multiprocessors": 66,
        "kernel_packages": [],
    }
    model.gate = type("GateLinear", (torch.nn.Module,), {})()
    assert worker.NodeWorker._observe_device(node)["kernel_packages"] == []
    model.gate = type("OneKernelGate", (type(model.gate),), {})()
    assert worker.NodeWorker._observe_device(node)["kernel_packages"] == ["OneKernelGate"]
    node.unfit_attention = "unknown: a builder has no limit"
    assert worker.NodeWorker._observe_device(node)["split_policy"] == node.unfit_attention


def test_attention_is_fixed_once_its_builders_are_there(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that there is nothing to fix, and graphs are captured right after it."""
    builder = SimpleNamespace()
    group = SimpleNamespace(metadata_builders=[builder])

    def make_builders(node: Any, config: Any) -> None:
        node.model_runner.attn_groups = [[group]]

    monkeypatch.setattr(worker.PlatformWorker, "initialize_from_config", make_builders)
    monkeypatch.setattr(worker, "packed", lambda config: config)
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: False)
    node = object.__new__(worker.NodeWorker)
    node.model_runner = SimpleNamespace(attn_groups=[])
    node.vllm_config = SimpleNamespace(attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=1))
    node.initialize_from_config(None)
    assert node.unfit_attention == "unknown: SimpleNamespace has no max_num_splits"


def test_memory_for_kv_is_what_this_process_leaves_of_its_share(
    worker: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines on the GPU may load meanwhile: how much of it is free is never asked."""
    gib, asked = 2**30, []
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: False)
    for name in ("reset_peak_memory_stats", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20 * gib)
    runner = SimpleNamespace(profile_run=lambda: asked.append("profile_run"))
    compilation = SimpleNamespace(cudagraph_capture_sizes=[2048, 8])
    node = SimpleNamespace(
        device="cuda:1",
        model_runner=runner,
        requested_memory=60 * gib,
        vllm_config=SimpleNamespace(compilation_config=compilation),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    # Of the 4 GiB that a step of 8192 tokens needs, graphs of up to 2048 keep a quarter.
    assert worker.NodeWorker.determine_available_memory(node) == 38 * gib
    compilation.cudagraph_capture_sizes = []
    assert worker.NodeWorker.determine_available_memory(node) == 39 * gib
    del asked[3:]
    assert asked == ["reset_peak_memory_stats", "profile_run", "empty_cache"]


@pytest.mark.parametrize("longest", [8, 4096])
def test_a_cpu_warms_up_with_a_short_step(worker: Any, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is told its room for KV and compiles nothing: a step of 4096 tokens shows nothing, and takes long."""
    seen: list[int] = []
    monkeypatch.setattr(
        worker.PlatformWorker, "determine_available_memory", lambda self: seen.append(self.model_runner.max_num_tokens)
    )
    node = object.__new__(worker.NodeWorker)
    node.model_runner = SimpleNamespace(max_num_tokens=longest)
    node.determine_available_memory()
    assert (seen, node.model_runner.max_num_tokens) == ([min(longest, worker.CPU_WARM_UP_TOKENS)], longest)


def test_runners_of_one_class_name_are_told_apart(worker: Any) -> None:
    for module, generation in (("gpu.", "v2"), ("gpu_", "v1"), ("cpu.", "v2"), ("cpu_", "v1")):
        runner = type("GPUModelRunner", (), {"__module__": f"vllm.v1.worker.{module}model_runner"})()
        assert worker.runner_name(runner) == f"{generation} GPUModelRunner"


ASKED = {name: name for name in ("stamp_address", "connect", "warm", "mapped_pids", "unmap")}
ASKED |= {"share_kv": "share", "release_kv": "release", "held_kv": "held", "handoffs": "figures"}
"""The connector's methods, by the names that engines call."""


def test_what_engines_ask_of_the_connector_reaches_it(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = MagicMock(spec=load("corun.node.kv.connector").CorunNixlConnector)
    monkeypatch.setattr(worker, "get_kv_transfer_group", lambda: connector)
    node = object.__new__(worker.NodeWorker)
    for name in ASKED:
        getattr(node, name)("r", ["s"])
    assert connector.method_calls == [getattr(call, name)("r", ["s"]) for name in ASKED.values()]


X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse2 smep avx2 f16c fma avx512f avx512_bf16 misalignsse amx_tile amx_bf16

processor\t: 1
flags\t\t: fpu
"""
ARM = """\
processor\t: 0
Features\t: fp asimd evtstrm aes asimdhp sve bf16 i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
XEON = "Intel(R) Xeon(R) Processor, vendor_id GenuineIntel, cpu family 6, model 143"
EXTENSIONS = ["amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512f", "f16c", "fma", "sse2"]


@pytest.mark.parametrize(
    ("text", "name", "extensions"),
    [
        (X86, XEON, EXTENSIONS),
        (X86.replace("fpu sse2 smep", "sse2 erms fpu"), XEON, EXTENSIONS),  # order, and other flags
        (X86.replace(" amx_tile amx_bf16", ""), XEON, EXTENSIONS[2:]),  # a virtual machine of that name
        (ARM, "CPU implementer 0x41, CPU part 0xd40", ["asimd", "asimdhp", "bf16", "fp", "i8mm", "sve"]),
        ("", "", []),
    ],
)
def test_a_processor_is_its_model_and_the_extensions_that_kernels_are_chosen_by(
    worker: Any, text: str, name: str, extensions: list[str]
) -> None:
    assert worker.processor(text) == (name, extensions)


def test_a_worker_tells_what_its_processor_is(worker: Any) -> None:
    found = worker.NodeWorker.model_facts(SimpleNamespace(weights_digest="w"))
    assert found["device"]
    assert found["cpu_features"] == sorted(found["cpu_features"]) != []
    assert len(found["cpu_caches"]) == 3
    assert found == worker.NodeWorker.model_facts(SimpleNamespace(weights_digest="w"))


def config(torch: Any, kind: str) -> Any:
    vllm = load("vllm.v1.kv_cache_interface")
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    group = vllm.KVCacheGroupSpec(["a", "b", "c"], getattr(vllm, kind)(**sizes))
    tensors = [vllm.KVCacheTensor(size=10 * 64, shared_by=[name]) for name in "abc"]
    return vllm.KVCacheConfig(num_blocks=10, kv_cache_tensors=tensors, kv_cache_groups=[group])


def test_the_layers_of_a_block_lie_side_by_side(worker: Any, torch: Any) -> None:
    before = config(torch, "FullAttentionSpec")
    packed = worker.packed(before)
    found = [(one.offset, one.block_stride, one.size, one.shared_by) for one in packed.kv_cache_tensors]
    assert found == [(0, 192, 1920, ["a"]), (64, 192, 1920, ["b"]), (128, 192, 1920, ["c"])]
    assert all(tensor.block_stride == 0 for tensor in before.kv_cache_tensors), "the caller's was changed"
    assert worker.packed(packed) is packed
    other = config(torch, "MLAAttentionSpec")
    assert worker.packed(other) is other
