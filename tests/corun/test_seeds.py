"""Seeds are stable, in range and far apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError
from corun.params import MAX_SEED, derive_seed, sample_seed

SEEDS = st.integers(0, MAX_SEED)


def test_vectors() -> None:
    """Pinned: recorded receipts depend on them."""
    assert derive_seed(b"key", "request") == 4857169384336593275
    assert derive_seed(b"\0" * 64, "") == 7692387032222614188
    assert [sample_seed(42, i) for i in range(3)] == [42, 1158756173400861129, 1173447955487280679]
    assert sample_seed(MAX_SEED, 255) == 2354163679626315950


@given(SEEDS, st.integers(1, 64))
def test_neighbours_do_not_collide(seed: int, distance: int) -> None:
    """seed + i would give sample 1 of one request what sample 0 of the next one has."""
    near = [(seed + distance) % (MAX_SEED + 1), (seed - distance) % (MAX_SEED + 1)]
    own = [sample_seed(seed, i) for i in range(16)]
    others = [sample_seed(other, i) for other in near for i in range(16)]
    assert len(set(own)) == 16
    assert not set(own) & set(others)


def test_refusals() -> None:
    for key in (b"", b"x" * 65):
        with pytest.raises(InvalidArgumentError, match="seed_key = "):
            derive_seed(key, "r")
    for seed, i, field in ((-1, 0, "seed"), (MAX_SEED + 1, 1, "seed"), (0, -1, "sample_index")):
        with pytest.raises(InvalidArgumentError, match=f"^{field} = "):
            sample_seed(seed, i)
