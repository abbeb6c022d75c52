"""Checkpoints with random weights: what is written is what a loader reads, and the shapes are the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.checkpoints import CONFIGS, INDEX, shapes, shards, write
from tests.loading import load

BILLIONS = {
    "smollm2-135m": 0.1345,
    "qwen3-1.7b": 1.72,
    "qwen3-8b": 8.2,
    "qwen3-30b-a3b": 30.5,
    "qwen3-30b-a3b-12l": 8.1,
    "deepseek-v3-small": 6.35,
    "deepseek-v3-small-fp32-router": 6.35,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_size_is_that_of_the_model(name: str, billions: float) -> None:
    parameters = sum(math.prod(shape) for shape in shapes(CONFIGS[name]).values())
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["moe-tiny", "mla-tiny"])
def test_a_checkpoint_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    size = write(name, tmp_path, "cpu")
    index = json.loads((tmp_path / INDEX).read_text())
    tensors = {key: value for file in tmp_path.glob("*.safetensors") for key, value in load_file(file).items()}
    assert {key: tuple(value.shape) for key, value in tensors.items()} == shapes(CONFIGS[name])
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(value.nbytes for value in tensors.values()) == size == index["metadata"]["total_size"]
    for key, value in tensors.items():
        assert value.dtype == (torch.float32 if "correction_bias" in key else torch.bfloat16)
        if key.endswith("norm.weight"):
            assert (value == 1).all()
        elif value.numel() > 1000:
            expected = 1.0 if "embed" in key else CONFIGS[name]["initializer_range"]
            assert float(value.float().std()) == pytest.approx(expected, rel=0.1)


def test_a_complete_checkpoint_is_left_alone_and_a_torn_one_is_written_again_with_the_same_bits(tmp_path: Path) -> None:
    def layers() -> list[bytes]:
        return [(tmp_path / f"layer-00{number}.safetensors").read_bytes() for number in (0, 1)]

    assert write("moe-tiny", tmp_path, "cpu") > 0
    before = layers()
    assert before[0] != before[1]
    assert write("moe-tiny", tmp_path, "cpu") == 0
    (tmp_path / INDEX).unlink()
    (tmp_path / "layer-000.safetensors").unlink()
    assert write("moe-tiny", tmp_path, "cpu") > 0
    assert layers() == before


def test_only_some_layers_of_deepseek_have_experts() -> None:
    config = CONFIGS["deepseek-v3-small"]
    names = shapes(config)
    routers = [name for name in names if name.endswith("mlp.gate.weight")]
    assert len(routers) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.shared_experts.gate_proj.weight" in names


def test_every_tensor_is_aligned() -> None:
    for name, config in CONFIGS.items():
        for tensors in shards(shapes(config)).values():
            assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in tensors), name


def test_a_variant_has_router_layers_for_which_vllm_has_kernels_for_few_rows() -> None:
    wanted = load("vllm.model_executor.models.deepseek_v2")._get_moe_router_dtype
    names = ("deepseek-v3-small", "deepseek-v3-small-fp32-router")
    assert [wanted(SimpleNamespace(**CONFIGS[name])) for name in names] == [None, torch.float32]
