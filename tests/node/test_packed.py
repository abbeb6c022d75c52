"""All layers of a KV block side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loading import load


@pytest.fixture(scope="module")
def vllm() -> Any:
    return load("vllm.v1.kv_cache_interface")


def config(vllm: Any, kind: str) -> Any:
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    group = vllm.KVCacheGroupSpec(["a", "b", "c"], getattr(vllm, kind)(**sizes))
    tensors = [vllm.KVCacheTensor(size=10 * 64, shared_by=[name]) for name in "abc"]
    return vllm.KVCacheConfig(num_blocks=10, kv_cache_tensors=tensors, kv_cache_groups=[group])


def test_the_layers_of_a_block_lie_side_by_side(vllm: Any) -> None:
    before = config(vllm, "FullAttentionSpec")
    packed = load("corun.node.vllm.worker").packed(before)
    assert [tensor.offset for tensor in packed.kv_cache_tensors] == [0, 64, 128]
    assert {tensor.block_stride for tensor in packed.kv_cache_tensors} == {192}
    assert {tensor.size for tensor in packed.kv_cache_tensors} == {1920}
    assert [tensor.shared_by for tensor in packed.kv_cache_tensors] == [["a"], ["b"], ["c"]]
    assert all(tensor.block_stride == 0 for tensor in before.kv_cache_tensors), "the caller's was changed"


def test_other_attention_keeps_its_layout(vllm: Any) -> None:
    before = config(vllm, "MLAAttentionSpec")
    assert load("corun.node.vllm.worker").packed(before) is before


def test_a_packed_layout_stays(vllm: Any) -> None:
    packed = load("corun.node.vllm.worker").packed(config(vllm, "FullAttentionSpec"))
    assert load("corun.node.vllm.worker").packed(packed) is packed
