"""What a worker says of what it loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.vllm import processor
from tests.loading import load


@pytest.fixture(scope="module")
def worker() -> Any:
    return load("corun.node.vllm.worker")


@pytest.fixture(scope="module")
def torch() -> Any:
    return load("torch")


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


def test_a_worker_tells_what_its_processor_is(worker: Any) -> None:
    found = worker.NodeWorker.model_facts(SimpleNamespace(weights_digest="w"))
    here = processor.read()
    assert (found["device"], found["cpu_features"]) == (here.name, list(here.features))
    assert found["cpu_caches"] == list(here.caches)


def test_a_gpu_worker_tells_how_many_multiprocessors_it_sees(
    worker: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and MIG give a process fewer than the GPU has."""
    on_cpu = worker.NodeWorker._observe_device(SimpleNamespace())
    assert (on_cpu["multiprocessors"], on_cpu["kernel_packages"]) == (0, [])
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: False)
    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {"cuda:1": properties}.__getitem__)
    node = SimpleNamespace(device="cuda:1", _max_splits=lambda: 1, _graphs=lambda: "g")
    found = worker.NodeWorker._observe_device(node)
    assert (found["multiprocessors"], found["kernel_packages"]) == (66, [])


def test_the_digest_is_of_names_shapes_dtypes_and_bytes(worker: Any, torch: Any, model: Any) -> None:
    digest = worker.weights_digest(model)
    assert len(digest) == 64
    assert worker.weights_digest(model) == digest
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


def test_runners_of_one_class_name_are_told_apart(worker: Any) -> None:
    def runner(module: str) -> Any:
        return type("GPUModelRunner", (), {"__module__": f"vllm.v1.worker.{module}"})()

    assert worker.runner_name(runner("gpu.model_runner")) == "v2 GPUModelRunner"
    assert worker.runner_name(runner("gpu_model_runner")) == "v1 GPUModelRunner"
    assert worker.runner_name(runner("cpu.model_runner")) == "v2 GPUModelRunner"
    assert worker.runner_name(runner("cpu_model_runner")) == "v1 GPUModelRunner"
