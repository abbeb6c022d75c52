"""Digests of KV blocks: what they notice, and that nothing but the bytes matters."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading import load

torch: Any = pytest.importorskip("torch")
digest = load("corun.node.kv.digest")

BLOCKS, WORDS, LAYERS = 8, 96, 3
PINNED = 0xA669629456C839EC


def layers(seed: int = 1) -> list[Any]:
    """Memory of three layers, [blocks, words] each, as a KV cache of another type would be viewed."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn((BLOCKS, WORDS), generator=draw).view(torch.int32) for _ in range(LAYERS)]


def of(memory: list[Any], *blocks: int) -> list[int]:
    return [int(value) for value in digest.KvDigest(memory).of(blocks)]


def test_equal_bytes_have_equal_digests_wherever_they_lie() -> None:
    here, there = layers(), layers(2)
    for a, b in zip(here, there, strict=True):
        b[[7, 0, 3]] = a[[1, 2, 5]]
    assert of(here, 1, 2, 5) == of(there, 7, 0, 3)
    assert len({*of(here, *range(BLOCKS)), *of(layers(2), *range(BLOCKS))}) == 2 * BLOCKS


def test_a_digest_is_what_its_definition_says() -> None:
    """Both sides of a transfer compute it, on other devices and maybe in other builds."""
    first, second = range(-40, WORDS - 40), [2**31 - 1] * WORDS
    memory = [torch.tensor([words], dtype=torch.int32) for words in (first, second)]
    weights, (a, b) = digest.weights(WORDS).tolist(), digest.weights(2).tolist()
    total = a * sum(map(operator.mul, first, weights)) + b * sum(map(operator.mul, second, weights))
    assert of(memory, 0) == [total % 2**64] == [PINNED]


@settings(max_examples=200)
@given(st.integers(0, LAYERS - 1), st.integers(0, WORDS - 1), st.integers(0, 31))
def test_one_flipped_bit_is_noticed(layer: int, word: int, bit: int) -> None:
    memory = layers()
    before = of(memory, *range(BLOCKS))
    memory[layer][4, word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    after = of(memory, *range(BLOCKS))
    assert [i for i in range(BLOCKS) if before[i] != after[i]] == [4]


def test_what_changed_places_is_noticed() -> None:
    memory = layers()
    (before,) = of(memory, 4)
    for swap in (
        [memory[1], memory[0], memory[2]],
        [memory[0].roll(1, dims=1), *memory[1:]],
        [memory[0].flip(1), *memory[1:]],
        [torch.cat([memory[0][:, 48:], memory[0][:, :48]], 1), *memory[1:]],
    ):
        assert of(swap, 4) != [before]
    assert of(memory, 4, 5) == of(memory, 5, 4)[::-1] != of(memory, 5, 4)


@pytest.mark.parametrize("at_a_time", [1, WORDS, 3 * WORDS, 10**9])
def test_the_size_of_the_parts_does_not_matter(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of(layers(), *range(BLOCKS))
    monkeypatch.setattr(digest, "MAX_WORDS", at_a_time)
    assert of(layers(), *range(BLOCKS)) == whole


def test_weights_are_odd_and_differ_and_no_digest_is_zero() -> None:
    """Zero means that it was not computed."""
    assert of([torch.zeros((2, WORDS), dtype=torch.int32)], 0, 1) == [1, 1]
    weights = digest.weights(10_000)
    assert len(set(weights.tolist())) == 10_000
    assert all(weights % 2)
    assert digest.weights(10).tolist() == weights[:10].tolist()


def test_a_region_is_the_registered_bytes() -> None:
    """Whatever the type, shape and strides of the tensor that shares the memory, and where in it the region begins."""
    memory = torch.randn(2, 6, 4, 8).to(torch.bfloat16)
    view = memory[1].permute(1, 0, 2)
    region = digest.region_words(view, memory[1].data_ptr(), 4 * 8 * 2, 6)
    assert region.shape == (6, 16)
    assert torch.equal(region, memory[1].contiguous().view(6, 32).view(torch.int32))
    assert region.data_ptr() == memory[1].data_ptr()


@pytest.mark.parametrize(("offset", "size", "count"), [(0, 64, 13), (-4, 64, 1), (2, 64, 1), (0, 66, 1)])
def test_memory_that_is_not_there_is_refused(offset: int, size: int, count: int) -> None:
    memory = torch.zeros(12 * 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="blocks of"):
        digest.region_words(memory, memory.data_ptr() + offset, size, count)
