"""What an engine is refused every freedom for, by name."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.vllm.structure import has_one_tile, one_kernel_gates, packs_contexts, refused
from corun.types import Freedom
from tests.loading import load

ALL = {Freedom.PACKED, Freedom.CHUNKS, Freedom.MIXED, Freedom.SCORES}


class Linear:
    pass


class GateLinear(Linear):
    pass


class OneKernelGate(GateLinear):
    pass


class Router(GateLinear):
    """A subclass of vLLM's."""


class FusedProjection(Linear):
    def __init__(self, few_rows: bool) -> None:
        self._use_min_latency_gemm = few_rows


def engine(*, modules: tuple[Any, ...] = (Linear(),), **changes: Any) -> tuple[Any, Any]:
    """The parts of a `VllmConfig` that are read, and a model."""
    values: dict[str, Any] = {
        "mode": "VLLM_COMPILE",
        "backend": "inductor",
        "rms_norm": ["native"],
        "fused_add_rms_norm": ["native"],
        "compile_sizes": [],
        "ranges": 1,
        "use_mla": False,
        "head_size": 128,
        **changes,
    }
    compilation = SimpleNamespace(
        mode=SimpleNamespace(name=values["mode"]),
        backend=values["backend"],
        compile_sizes=values["compile_sizes"],
        get_compile_ranges=lambda: [None] * values["ranges"],
    )
    priority = SimpleNamespace(rms_norm=values["rms_norm"], fused_add_rms_norm=values["fused_add_rms_norm"])
    config = SimpleNamespace(
        compilation_config=compilation,
        kernel_config=SimpleNamespace(ir_op_priority=priority),
        model_config=SimpleNamespace(use_mla=values["use_mla"], get_head_size=lambda: values["head_size"]),
    )
    return config, SimpleNamespace(modules=lambda: modules)


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_size": 256}, {"rms_norm": []}, {"modules": (OneKernelGate(), FusedProjection(few_rows=False))}],
)
def test_nothing_is_known_against_a_compiled_engine(changes: dict[str, Any]) -> None:
    assert refused(*engine(**changes)) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "NONE"}, "norms run eagerly"),
        ({"backend": "eager"}, "norms run eagerly"),
        ({"rms_norm": ["vllm_c", "native"]}, "rms_norm is computed by 'vllm_c'"),
        ({"fused_add_rms_norm": ["oink"]}, "fused_add_rms_norm is computed by 'oink'"),
        ({"compile_sizes": [1]}, "compile_sizes"),
        ({"ranges": 2}, "compile_ranges_endpoints"),
        ({"modules": (Linear(), Router())}, "its router (GateLinear)"),
        ({"head_size": 64}, "its heads have 64 numbers"),
        ({"use_mla": True, "mode": "NONE"}, "norms run eagerly"),
        ({"use_mla": True, "modules": (GateLinear(),)}, "its router (GateLinear)"),
        (
            {"use_mla": True, "modules": (FusedProjection(few_rows=True),)},
            "(FusedProjection) has another kernel for up to 16",
        ),
    ],
)
def test_what_is_known_refuses_all(changes: dict[str, Any], reason: str) -> None:
    found = refused(*engine(**changes))
    assert found.keys() == ALL
    assert all(reason in words for words in found.values())


def test_mla_may_pack_but_neither_cut_nor_mix_and_no_context_shares_a_step() -> None:
    """Its heads are none of FlashAttention's plain ones."""
    config, model = engine(use_mla=True, head_size=576)
    assert refused(config, model).keys() == ALL - {Freedom.PACKED}
    assert not packs_contexts(config)
    assert packs_contexts(engine()[0])


def test_gates_with_one_kernel_are_those_that_took_the_place_of_vllms() -> None:
    assert one_kernel_gates(engine(modules=(Linear(), OneKernelGate()))[1])
    assert not one_kernel_gates(engine(modules=(Linear(), GateLinear(), Router()))[1])


def test_vllm_has_what_is_read() -> None:
    """The names, in the vLLM that is installed."""
    compilation = load("vllm.config.compilation")
    assert compilation.CompilationMode.VLLM_COMPILE.name == "VLLM_COMPILE"
    made = compilation.CompilationConfig(compile_ranges_endpoints=[2048])
    assert len(made.get_compile_ranges()) == 1
    priority = load("vllm.config.kernel").IrOpPriorityConfig()
    assert hasattr(priority, "rms_norm")
    assert hasattr(priority, "fused_add_rms_norm")
    assert load("vllm.model_executor.layers.fused_moe.router.gate_linear").GateLinear.__name__ == "GateLinear"
    assert "self._use_min_latency_gemm" in source("vllm.model_executor.models.deepseek_v2")
    # That of the only backend for MLA (corun/node/vllm/start.py: `gpu_attention`), which cannot be imported here.
    backend = source("vllm.v1.attention.backends.mla.flashattn_mla")
    assert "query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN" in backend
    assert "reorder_batch_threshold: int = 512" in backend


def source(name: str) -> str:
    """Return the text of an installed module."""
    found = importlib.util.find_spec(name)
    assert found
    assert found.origin
    return Path(found.origin).read_text(encoding="utf-8")


def batch(torch: Any, lengths: list[int]) -> Any:
    """What a builder of attention's metadata reads of a step with these chunks."""
    return SimpleNamespace(
        max_query_len=max(lengths),
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        query_start_loc_cpu=torch.tensor([0, *itertools.accumulate(lengths)]),
    )


@pytest.mark.parametrize("lengths", [[5], [600], [512, 513], [512, 1, 3000, 513, 17], [2048, 2048], [512, 512, 1]])
def test_the_way_of_an_mla_chunk_follows_from_its_length_alone(torch: Any, lengths: list[int]) -> None:
    """The runner puts short chunks first, and those are computed as rows are."""
    sort = load("vllm.v1.worker.gpu.model_runner").sort_batch_req_ids
    split = load("vllm.v1.attention.backends.utils").split_decodes_and_prefills
    chunks = {str(number): length for number, length in enumerate(lengths)}
    ordered = [chunks[name] for name in sort(chunks, 1)]
    short = [length for length in ordered if length <= 512]
    rest = len(ordered) - len(short), sum(ordered) - sum(short)
    assert split(batch(torch, ordered), decode_threshold=512) == (len(short), rest[0], sum(short), rest[1])


def test_a_backend_that_wants_equal_rows_would_choose_the_way_by_the_company(torch: Any) -> None:
    split = load("vllm.v1.attention.backends.utils").split_decodes_and_prefills
    found = [split(batch(torch, lengths), decode_threshold=512, require_uniform=True)[0] for lengths in ([9], [3, 9])]
    assert found == [1, 1], "the chunk of 9 tokens is computed as rows are when it is alone, and not beside another"


def test_vllm_takes_the_first_prompts_of_a_step_for_those_with_context(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it does not, MLA's contexts need not be alone (`packs_contexts`)."""
    build = load("vllm.model_executor.layers.attention.mla_attention").build_mla_chunked_context_metadata
    for name in ("empty", "zeros"):  # Memory is pinned only beside a GPU.
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, made=made, **k: made(*a, **{**k, "pin_memory": False}))

    def tokens_with_context(contexts: list[int]) -> int:
        found = build(
            context_lens_cpu=torch.tensor(contexts, dtype=torch.int32),
            prefill_query_start_loc_cpu=torch.tensor([0, 600, 1300], dtype=torch.int32),
            num_prefills=2,
            chunked_prefill_workspace=torch.zeros(1),
            chunked_prefill_workspace_size=4096,
            block_size=16,
            align_chunk_to_block=True,
            device=torch.device("cpu"),
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        )
        return int(found.prefill_tokens_with_context)

    assert tokens_with_context([2048, 0]) == 600
    assert tokens_with_context([0, 2048]) == 600, "the tokens of the prompt without context; those of the other are 700"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"head": 256}, True),
        ({"head": 64}, False),
        ({"mla": True}, False),
        ({"window": 4096}, False),
        ({"cache": "fp8"}, False),
    ],
)
def test_attention_has_one_tile_for_all_queries_only_if_it_is_known_to(changes: dict[str, Any], expected: bool) -> None:
    values = {"head": 128, "mla": False, "window": None, "cache": "auto"} | changes
    model = SimpleNamespace(
        use_mla=values["mla"],
        get_head_size=lambda: values["head"],
        get_sliding_window=lambda: values["window"],
    )
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype=values["cache"]))
    assert has_one_tile(config) is expected
