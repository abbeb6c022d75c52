"""How attention cuts KV: vLLM's own metadata builders are made to keep the rule, and are noticed where they do not.

The builders are vLLM's own. FlashAttention 3, which exists on a GPU only, is replaced where they ask it for a schedule.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corun.node.vllm import pin
from tests.loading import environment, load

NONE, OWN = pin.SPLIT_POLICY.values()
PROCESSORS = 132


@pytest.fixture(scope="module")
def attention() -> Any:
    return load("corun.node.vllm.attention")


class Fa3:
    """The schedule of FlashAttention 3: {query tokens, splits, heads in L2}, each for rows up to a multiple of four."""

    def __init__(self, torch: Any, *, sorts: bool = False, leads: int = 0) -> None:
        self.torch = torch
        self.sorts = sorts
        self.leads = leads
        self.is_without_splits = False

    def __call__(self, **given: Any) -> Any:
        lengths, heads = given["cache_seqlens"].tolist(), given["num_heads_kv"]
        count, most = len(lengths), given["num_splits"] or 32
        blocks = [-(-length // 128) for length in lengths]
        share = max(1, -(-sum(blocks) * 11 * heads // (10 * PROCESSORS)))
        splits = [max(1, min(-(-each // share), most)) for each in blocks]
        if self.sorts:
            splits.sort(reverse=True)
        queries = given["cu_seqlens_q"].diff().tolist()
        is_causal = given["max_seqlen_q"] > 1 or 64 < given["headdim"] <= 128
        has_splits = most > 1 and count <= 992 and not self.is_without_splits
        vectors = [queries, *([splits] if has_splits else []), *([[1] * count] if is_causal else [])]
        values = [value for each in vectors for value in [*each, *[0] * (-count % 4)]]
        return self.torch.tensor([*[0] * self.leads, *values, 0], dtype=self.torch.int32)


def config(mode: str, seqs: int, tokens: int, most: int, head_size: int) -> Any:
    """The parts of a `VllmConfig` that builders read."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 32,
        get_num_kv_heads=lambda parallel: 8,
        get_head_size=lambda: head_size,
        rswa_window=None,
        max_model_len=4096,
        dtype=load("torch").bfloat16,
        hf_text_config=SimpleNamespace(
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
    )
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: mode == "FULL")
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        compilation_config=SimpleNamespace(
            cudagraph_mode=graphs, max_cudagraph_capture_size=min(seqs, 64), static_forward_context={"layer": Layer()}
        ),
        attention_config=SimpleNamespace(
            flash_attn_max_num_splits_for_cuda_graph=most, use_prefill_query_quantization=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        kv_transfer_config=None,
        speculative_config=None,
    )


class PromptAttention:
    """What computes the long chunks of prompts in MLA (mla/prefill/flash_attn.py: `FlashAttnPrefillBackend`)."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.flash_attn_varlen_func: Any = functools.partial(lambda **given: self.calls.append(given), fa_version=3)

    def clone(self) -> PromptAttention:
        return PromptAttention()

    def prepare_metadata(self, metadata: Any) -> None:
        pass


class Layer:
    prefill_backend = PromptAttention()


@pytest.fixture
def fa3(torch: Any) -> Fa3:
    return Fa3(torch)


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    return load("vllm.v1.attention.backends.flash_attn")


@pytest.fixture(scope="module")
def mla() -> Iterator[ModuleType]:
    """vLLM's module, which cannot be imported without the extensions of FlashAttention."""
    stub = ModuleType("vllm.vllm_flash_attn")
    stub.flash_attn_varlen_func = stub.get_scheduler_metadata = None  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, environment():
        patch.setitem(sys.modules, stub.__name__, stub)
        name = "vllm.v1.attention.backends.mla.flashattn_mla"
        yield importlib.import_module(name)
        sys.modules.pop(name)


@pytest.fixture(params=["plain", "mla"])
def make(request: pytest.FixtureRequest, torch: Any, fa3: Fa3, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a real builder of each kind, on which FlashAttention 3 is a fake one."""
    module = request.getfixturevalue(request.param)
    is_mla = request.param == "mla"
    kind = module.FlashAttnMLAMetadataBuilder if is_mla else module.FlashAttentionMetadataBuilder
    monkeypatch.setattr(module, "get_scheduler_metadata", fa3, raising=False)
    monkeypatch.setattr(module, "get_flash_attn_version", lambda *args, **kwargs: 3)
    if not is_mla:
        monkeypatch.setattr(module, "_get_sliding_window_configs", lambda config: {None})

    def builder(mode: str = "FULL", *, seqs: int = 8, tokens: int = 8, most: int = 1, kind: Any = kind) -> Any:
        spec = load("vllm.v1.kv_cache_interface").FullAttentionSpec(
            block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        return kind(spec, ["layer"], config(mode, seqs, tokens, most, 576 if is_mla else 128), torch.device("cpu"))

    builder.kind = kind  # type: ignore[attr-defined]
    return builder


def test_the_rule_is_the_one_that_was_measured(torch: Any, attention: Any) -> None:
    lengths = torch.arange(40_000, dtype=torch.int32)
    assert torch.equal(attention.own_length(lengths), (-(-lengths // 2048)).clamp(1, 16))
    assert attention.own_length(lengths).dtype == torch.int32


@pytest.mark.parametrize(("mode", "tokens"), [("PIECEWISE", 2048), ("FULL", 2048), ("FULL", 8)])
def test_no_step_of_an_engine_has_more_than_one_split(make: Any, attention: Any, mode: str, tokens: int) -> None:
    """vLLM's own limit holds in captured graphs alone: a prompt, and what is longer than a graph, goes by the batch."""
    builder = make(mode, tokens=tokens)
    if (mode, tokens) != ("FULL", 8):
        assert attention.policy([builder]) != NONE
    assert attention.fix([builder], 1) == ""
    assert attention.policy([builder]) == NONE


@pytest.mark.parametrize("make", ["mla"], indirect=True)
def test_mla_computes_long_chunks_of_prompts_with_one_split(make: Any, attention: Any) -> None:
    builder = make("PIECEWISE", tokens=2048)
    attention.fix([builder], 1)
    builder._prefill_backend.flash_attn_varlen_func(causal=True)
    assert builder._prefill_backend.calls == [{"fa_version": 3, "num_splits": 1, "causal": True}]
    builder._prefill_backend = PromptAttention()
    assert attention.policy([builder]) == f"MLA's prompts by the batch and {NONE}"


@pytest.mark.parametrize("seqs", [1, 3, 4, 8, 256])
def test_each_row_gets_its_own_number_of_splits(torch: Any, make: Any, attention: Any, seqs: int) -> None:
    """The numbers are in the schedule that the graph reads, whoever is in the batch; idle rows are long or short."""
    builder = make(seqs=seqs, tokens=seqs, most=16)
    assert attention.fix([builder], 16) == ""
    assert attention.policy([builder]) == OWN
    for lengths in ([40_000], [5000] + [0] * (seqs - 1), [1] * (seqs - 1) + [5000]):
        batch = attention._batch(builder.device, [1] * len(lengths), lengths)
        rows = attention._rows(builder.build_for_cudagraph_capture(batch))
        assert rows.scheduler_metadata.data_ptr() == builder.scheduler_metadata.data_ptr()
        assert rows.max_num_splits == 16
        assert attention._counts(rows).tolist() == attention.own_length(batch.seq_lens).tolist()
        before = attention._rounded(len(lengths))
        assert rows.scheduler_metadata[: len(lengths)].tolist() == [1] * len(lengths)
        after = rows.scheduler_metadata[before + len(lengths) : 2 * before].tolist()
        assert after == [0] * (before - len(lengths))


def test_a_decode_engine_of_vllm_goes_by_the_batch(make: Any, attention: Any) -> None:
    """The control: with the same limit and nothing written, rows have FlashAttention's own numbers."""
    assert "at most 16 splits by the batch" in attention.policy([make(most=16)])
    assert "at most 16 splits by the batch" in attention.policy([make(seqs=1, tokens=1, most=16)])


def test_a_colocated_node_cuts_rows_by_their_own_length_and_prompts_never(make: Any, attention: Any) -> None:
    """Each kind has steps of its own, and the limit is set before each. The cut of rows comes back unchanged."""
    builder = make(tokens=4096, most=16)
    builder.vllm_config.kv_transfer_config = SimpleNamespace(kv_role="kv_both")
    assert attention.fix([builder], 16) == ""
    batch = attention._batch(builder.device, [1, 1, 1], [5000, 1, 2049])
    for most, expected in ((16, OWN), (1, NONE), (16, OWN)):
        attention.limit([builder], most)
        assert attention.policy([builder]) == expected
        rows = attention._rows(builder.build(0, batch))
        assert rows.max_num_splits == most
        if most > 1:
            assert attention._counts(rows).tolist() == [3, 1, 2]


def test_prompts_in_steps_that_cut_rows_are_noticed(make: Any, attention: Any) -> None:
    """The control: were the limit of rows also that of prompts, they would be cut by the batch."""
    builder = make(tokens=4096, most=16)
    builder.vllm_config.kv_transfer_config = SimpleNamespace(kv_role="kv_both")
    assert attention.fix([builder], 16) == ""
    found = attention._policy_of(builder, [4096], [4096])
    assert found == (NONE if "mla" in type(builder).__module__ else "at most 16 splits by the batch")


def test_a_limit_that_is_not_ours_is_left_to_vllm(make: Any, attention: Any) -> None:
    builder = make(most=32)
    assert attention.fix([builder], 32) == ""
    assert attention.policy([builder]).endswith("at most 32 splits by the batch")


def test_a_builder_that_ignores_the_limit_is_noticed(make: Any, attention: Any) -> None:
    class Deaf(make.kind):  # type: ignore[misc, name-defined]
        """Has all the attributes, and uses none of them."""

        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            attention._rows(metadata).max_num_splits = 0
            return metadata

    hearing, deaf = make(), make(kind=Deaf)
    assert attention.fix([hearing, deaf], 1) == ""
    assert attention.policy([hearing]) == NONE
    assert attention.policy([deaf]) == "splits by the batch"
    assert attention.policy([hearing, deaf]) == f"{NONE} and splits by the batch"


def test_rows_that_are_cut_otherwise_are_noticed(make: Any, attention: Any) -> None:
    builder = make(most=16)
    attention.fix([builder], 16)
    written = builder.build

    def build(*args: Any, **kwargs: Any) -> Any:
        metadata = written(*args, **kwargs)
        attention._counts(attention._rows(metadata))[0] += 1
        return metadata

    builder.build = build
    assert attention.policy([builder]) == "at most 16 splits by the batch"


@pytest.mark.parametrize("name", ["max_num_splits", "use_full_cuda_graph", "max_cudagraph_size"])
def test_a_builder_without_a_known_attribute_is_refused(make: Any, attention: Any, name: str) -> None:
    builder = make()
    delattr(builder, name)
    assert attention.fix([builder], 1) == f"unknown: {type(builder).__name__} has no {name}"


def test_an_unknown_call_for_prompts_is_refused(make: Any, attention: Any) -> None:
    builder = make()
    builder._prefill_backend = SimpleNamespace(flash_attn_varlen_func=print)
    assert "flash_attn_varlen_func for prompts, but SimpleNamespace" in attention.fix([builder], 1)


@pytest.mark.parametrize(
    ("seqs", "changes", "reason"),
    [
        (8, {"sorts": True}, "row 4 of 5 is long, but the schedule has [15, 1, 1, 1, 1] as numbers of splits"),
        (8, {"leads": 4}, "row 0 of 5 is long, but the schedule has [1, 0, 0, 0, 15] as numbers of splits"),
        (8, {"is_without_splits": True}, "the schedule of 5 rows has 17 values, and 17 without splits"),
        (993, {}, "the schedule of 993 rows has 1993 values, and 1993 without splits"),
    ],
)
def test_another_layout_of_the_schedule_is_refused(
    make: Any, attention: Any, fa3: Fa3, seqs: int, changes: dict[str, Any], reason: str
) -> None:
    """FlashAttention that sorts rows, puts something else before them, or has no splits for so many."""
    for name, value in changes.items():
        setattr(fa3, name, value)
    builder = make(seqs=seqs, tokens=seqs, most=16)
    found = attention.fix([builder], 16)
    assert found.startswith("unknown: ")
    if "mla" not in type(builder).__module__:  # Its schedule has no heads in L2.
        assert found == f"unknown: {reason}"


def test_without_a_schedule_no_row_has_a_number_of_its_own(make: Any, attention: Any) -> None:
    """FlashAttention 2 and 4 have none. One split for all rows needs no schedule."""
    for most, reason in ((1, ""), (16, "unknown: there is no schedule: it is not FlashAttention 3")):
        builder = make(most=most)
        builder.aot_schedule = builder.fa_aot_schedule = False
        assert attention.fix([builder], most) == reason
        if most == 1:
            assert attention.policy([builder]) == NONE


def test_all_builders_of_a_runner_are_found(attention: Any) -> None:
    groups = [[SimpleNamespace(metadata_builders=["a"]), SimpleNamespace(metadata_builders=["b"])], []]
    assert attention.builders_of(SimpleNamespace(attn_groups=groups)) == ["a", "b"]
    assert attention.policy([]) == "unknown: there is no attention"
