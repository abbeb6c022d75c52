"""What an engine is refused for, before it serves."""

from __future__ import annotations

import pytest

from corun.errors import UnavailableError
from corun.node.engine import refuse_unfit

FIT = {"attention_backend": "FLASH_ATTN", "kv_cache_kinds": ["FullAttentionSpec"]}


def test_full_attention_is_fit() -> None:
    refuse_unfit(FIT)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"attention_backend": "FLASHMLA"}, "attention backend FLASHMLA must be one of"),
        ({"kv_cache_kinds": ["FullAttentionSpec", "MambaSpec"]}, "MambaSpec in its KV cache"),
        ({"kv_cache_kinds": ["SlidingWindowSpec"]}, "SlidingWindowSpec in its KV cache"),
    ],
)
def test_what_cannot_keep_the_contract_is_refused(seen: dict[str, object], reason: str) -> None:
    with pytest.raises(UnavailableError, match=reason):
        refuse_unfit({**FIT, **seen})
