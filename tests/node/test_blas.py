"""What cuBLASLt is asked, and what follows from its answers. The library itself answers only beside a GPU."""

# ruff: noqa: N802, N815  # The names are those of a C library.
from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.loading import environment, load

GOOD = (66, 20, 1, 0, 0, 3, 35, 0, 4)
"""An algorithm: id, tile, K splits, reduction scheme, swizzle, custom option, stages, inner shape, cluster shape."""


@pytest.fixture(scope="module")
def blas() -> ModuleType:
    return load("corun.node.vllm.blas")


class Library:
    """libcublasLt as `Heuristic` calls it: it keeps what it is told, and answers by the number of rows."""

    def __init__(self, answer: Callable[[int], tuple[int, ...] | None] = lambda rows: GOOD) -> None:
        self.answer = answer
        self.set: dict[int, dict[int, int]] = {}
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.alive: set[int] = set()
        self.asked: list[tuple[int, ...]] = []

    def _make(self, made: Any) -> int:
        handle = len(self.set) + 1
        self.set[handle] = {}
        self.alive.add(handle)
        made._obj.value = handle
        return handle

    def cublasLtCreate(self, made: Any) -> int:
        self._make(made)
        return 0

    cublasLtMatmulPreferenceCreate = cublasLtCreate

    def cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> int:
        self.set[self._make(made)] = {-1: compute.value, -2: scale.value}
        return 0

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: Any, rows: Any, columns: Any, leading: Any) -> int:
        self.layouts[self._make(made)] = (kind.value, rows.value, columns.value, leading.value)
        return 0

    def _attribute(self, target: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.set[target.value][attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute = _attribute
    cublasLtMatrixLayoutSetAttribute = _attribute

    def _destroy(self, target: Any) -> int:
        self.alive.remove(target.value)
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self,
        handle: Any,
        operation: Any,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        preference: Any,
        count: int,
        result: Any,
        n: Any,
    ) -> int:
        assert c is d
        rows = {self.set[layout.value][3] for layout in (b, c)}
        assert len(rows) == 1
        self.asked.append((operation.value, a.value, b.value, c.value, preference.value))
        found = self.answer(rows.pop())
        n._obj.value = 0 if found is None else count
        for index, value in enumerate(found or ()):
            result[index // 2] |= value << 32 * (index % 2)  # All within the 64 bytes of an algorithm.
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, result: Any, number: int, value: Any, size: Any, written: Any
    ) -> int:
        assert size.value == (2 if number in (7, 8) else 4)
        value._obj.value = result[number // 2] >> 32 * (number % 2)
        return 0


def product(blas: ModuleType, torch: Any, most: int = 40, n: int = 24, k: int = 16, bias: bool = False) -> Any:
    layer = torch.nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    return blas.Product(n, k, torch.bfloat16, torch.bfloat16, bias, (layer,), most)


def test_it_asks_as_torch_does(blas: ModuleType, torch: Any) -> None:
    library = Library()
    heuristic = blas.Heuristic(library)
    assert blas.algorithms(heuristic, product(blas, torch)) == {blas.Algorithm(*GOOD): list(range(1, 41))}
    operation, a, b, c, preference = library.asked[-1]
    # 32-bit sums; the weight is transposed, x is not; no bias.
    assert library.set[operation] == {-1: 68, -2: 0, 3: 1, 4: 0}
    # bf16, columns first: W.T is [16, 24], x.T is [16, rows], the product's [24, rows].
    assert (library.layouts[a], library.layouts[b][:2], library.layouts[c][:2]) == (
        (14, 16, 24, 16),
        (14, 16),
        (14, 24),
    )
    assert library.set[b][3] == library.set[c][3] == 40
    # 1 KiB of workspace, no reduction scheme, all matrices aligned to 256 bytes.
    assert library.set[preference] == {1: 1024, 3: 0, 5: 256, 6: 256, 7: 256, 8: 256}
    assert len(library.asked) == 40
    assert len(library.alive) == 2  # the handle and the preferences


def test_a_bias_is_part_of_the_question(blas: ModuleType, torch: Any) -> None:
    library, wanted = Library(), product(blas, torch, bias=True)
    blas.algorithms(blas.Heuristic(library), wanted)
    asked = library.set[library.asked[0][0]]
    assert (asked[7], asked[8]) == (4, wanted.layers[0].bias.data_ptr())


def test_a_product_may_have_results_of_another_type(blas: ModuleType, torch: Any) -> None:
    """As a router layer has: 16-bit weights, 32-bit scores of experts."""
    library, wanted = Library(), replace(product(blas, torch), out_dtype=torch.float32)
    blas.algorithms(blas.Heuristic(library), wanted)
    _, a, b, c, _ = library.asked[-1]
    assert [library.layouts[layout][0] for layout in (a, b, c)] == [14, 14, 0]


def changed(at: int, value: int) -> tuple[int, ...]:
    return (*GOOD[:at], value, *GOOD[at + 1 :])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (changed(2, 2), "splits K for 17 rows"),
        (changed(3, 2), "splits K for 17 rows"),
        (None, "has no algorithm in cuBLASLt for 17 rows"),
    ],
    ids=["two splits", "a reduction scheme", "no answer"],
)
def test_a_split_at_any_number_of_rows_is_refused(
    blas: ModuleType, torch: Any, bad: tuple[int, ...] | None, words: str
) -> None:
    library = Library(lambda rows: bad if rows == 17 else GOOD)
    with pytest.raises(blas.RefusedError, match=f"the product with 1 weights of 24 x 16 {words}"):
        blas.algorithms(blas.Heuristic(library), product(blas, torch))


def test_algorithms_have_the_rows_that_they_are_picked_for(blas: ModuleType, torch: Any) -> None:
    other = changed(1, 31)
    heuristic = blas.Heuristic(Library(lambda rows: other if 8 <= rows < 20 else GOOD))
    (found,) = blas.surveyed(heuristic, [product(blas, torch, most=30)])
    assert found == {
        blas.Algorithm(*GOOD): [*range(1, 8), *range(20, 31)],
        blas.Algorithm(*other): list(range(8, 20)),
    }


def test_every_algorithm_is_compared_at_the_ends_of_its_range(
    blas: ModuleType, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`linear` is replaced by one whose rows do not depend on each other, then by one with another order at 20 rows."""
    seen: list[int] = []
    other: set[int] = set()

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        seen.append(len(x))
        y = (x.float().unsqueeze(1) * weight.float()).sum(-1).to(x.dtype)
        return y + 1 if len(x) in other else y

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    wanted = product(blas, torch, most=300)
    found = {blas.Algorithm(*GOOD): [1, 2, 3, 20], blas.Algorithm(*changed(1, 3)): list(range(4, 20))}
    with torch.inference_mode():
        blas.check(wanted, found)
        assert {1, 20, 4, 19, 256} <= set(seen)
        other.add(20)
        with pytest.raises(blas.RefusedError, match="have other bits among 20 rows than among 256"):
            blas.check(wanted, found)


def latent_attention(torch: Any, heads: int = 2, nope: int = 8, rope: int = 4, rank: int = 16, size: int = 8) -> Any:
    """The parts of vLLM's layer that multiply by head, with the strides that it gives them."""
    module = load("vllm.model_executor.layers.attention.mla_attention")
    layer = torch.nn.Module()
    sizes = {"num_heads": heads, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "kv_lora_rank": rank}
    vars(layer).update(**sizes, v_head_dim=size, is_aiter_triton_fp4_bmm_enabled=False)
    layer.is_aiter_triton_fp8_bmm_enabled, layer.layer_name = False, "attention"
    layer.quant_config = SimpleNamespace(get_quant_method=lambda *_, **__: object())  # It asks for no default scales.
    layer.kv_b_proj = torch.nn.Linear(rank, heads * (nope + size), bias=False, dtype=torch.bfloat16)
    layer.kv_b_proj.quant_method = None
    with environment():  # It imports more of vLLM, with warnings.
        module.MLAAttention.process_weights_after_loading(layer, torch.bfloat16)
    layer._v_up_proj = module.MLAAttention._v_up_proj.__get__(layer)
    return layer


def test_products_by_head_are_compared_at_every_number_of_rows(
    blas: ModuleType, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bmm` is replaced by one whose rows do not depend on each other, then by one with another order at 20 rows."""
    seen: dict[int, set[int]] = {16: set(), 8: set()}
    other: set[tuple[int, int]] = set()

    def bmm(x: Any, weights: Any, out: Any) -> None:
        (_, number, _), size = x.shape, weights.shape[-1]
        seen[size].add(number)
        y = (x.float().unsqueeze(2) * weights.float().transpose(1, 2).unsqueeze(1)).sum(-1)
        out.copy_(y + 1 if (size, number) in other else y)

    monkeypatch.setattr(torch, "bmm", bmm)
    model = torch.nn.ModuleList(latent_attention(torch) for _ in range(3))
    with torch.inference_mode():
        blas.check_by_head(model, 30)
        assert all(numbers == {*range(1, 31), 256} for numbers in seen.values())
        for size, name in ((16, "queries_by_head"), (8, "results_by_head")):
            other.clear()
            other.add((size, 20))
            with pytest.raises(blas.RefusedError, match=f"MLA's {name} have other bits among 20 rows than among 256"):
                blas.check_by_head(model, 30)


def test_products_by_head_are_those_of_vllm(blas: ModuleType, torch: Any) -> None:
    """They are the halves of the weights with which a longer chunk's keys and values are computed."""
    layer = latent_attention(torch)
    keys, values = layer.kv_b_proj.weight.view(2, 16, 16).float().split([8, 8], dim=1)
    x = torch.randn(3, 2, 12, dtype=torch.bfloat16)
    with torch.inference_mode():
        found = blas._queries_by_head(layer, x)
        assert torch.allclose(found.float(), torch.einsum("mhp,hpl->mhl", x[..., :8].float(), keys), atol=0.05)
        back = blas._results_by_head(layer, found.contiguous())
        expected = torch.einsum("mhl,hvl->mhv", found.float(), values).flatten(1)
        assert torch.allclose(back.float(), expected, atol=0.05)
    text = Path(load("vllm.model_executor.layers.attention.mla_attention").__file__).read_text(encoding="utf-8")
    assert "torch.bmm(mqa_q_nope, self.W_UK_T, out=mqa_ql_nope)" in text


def test_a_model_without_the_products_that_were_looked_for_is_refused(blas: ModuleType, torch: Any) -> None:
    with pytest.raises(blas.RefusedError, match="no products by head"):
        blas.check_by_head(torch.nn.ModuleList([torch.nn.Linear(2, 2)]), 8)


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


def model(torch: Any, *, method: Any = UnquantizedLinearMethod) -> Any:
    """Two layers of two products each, and an lm_head that is also the table of embeddings."""

    class LinearBase(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, n: int, k: int, bias: bool = False) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(n, k, dtype=torch.bfloat16), requires_grad=False)
            self.bias = torch.nn.Parameter(torch.empty(n, dtype=torch.bfloat16)) if bias else None
            self.quant_method = method()

    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({"a": LinearBase(8, 4), "b": LinearBase(4, 8, True)}) for _ in "12"
    )
    made.gate = LinearBase(8, 4)
    made.gate.allow_cublas_router_gemm = True
    made.embed = torch.nn.Embedding(32, 4, dtype=torch.bfloat16)
    made.embed.quant_method = UnquantizedLinearMethod()
    made.lm_head = made.embed
    return made


def test_the_products_of_a_model_are_its_linear_layers_by_shape(blas: ModuleType, torch: Any) -> None:
    found = blas.products(model(torch), budget=4096, sequences=64)
    shapes = {(one.n, one.k, one.out_dtype, one.has_bias, len(one.layers), one.most_rows) for one in found}
    half, single = torch.bfloat16, torch.float32
    assert shapes == {
        (4, 8, half, True, 2, 4096),
        (8, 4, half, False, 2, 4096),
        (8, 4, single, False, 1, 4096),
        (32, 4, half, False, 1, 64),
    }


def test_layers_whose_kernels_are_not_known_are_refused(blas: ModuleType, torch: Any) -> None:
    with pytest.raises(blas.RefusedError, match=r"layers\.0\.a is computed by Fp8LinearMethod"):
        blas.products(model(torch, method=Fp8LinearMethod), 64, 8)


def test_weights_for_which_torch_may_split_k_are_refused(blas: ModuleType, torch: Any) -> None:
    made = model(torch)
    made.gate.weight = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.float32))
    with pytest.raises(blas.RefusedError, match=r"gate has weights of torch\.float32"):
        blas.products(made, 64, 8)


def installed(pattern: str) -> Path:
    """Return the first file of NVIDIA's packages with such a name; skip the test if there is none."""
    found = importlib.util.find_spec("nvidia")
    roots = (found.submodule_search_locations or ()) if found else ()
    paths = [path for root in roots for path in Path(root).glob(pattern)]
    if not paths:
        pytest.skip(f"{pattern} is not installed")
    return paths[0]


def test_the_numbers_are_those_of_the_headers(blas: ModuleType, torch: Any) -> None:
    folder = installed("*/include/cublasLt.h").parent
    text = "".join((folder / name).read_text() for name in ("cublasLt.h", "cublas_api.h", "library_types.h"))

    def number(name: str) -> int:
        found = re.search(rf"\b{name}\s*=\s*(\d+)", text)
        assert found, name
        return int(found[1])

    names = {
        "CUBLASLT_MATMUL_DESC_TRANSA": blas.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_TRANSB": blas.DESC_TRANSB,
        "CUBLASLT_MATMUL_DESC_EPILOGUE": blas.DESC_EPILOGUE,
        "CUBLASLT_MATMUL_DESC_BIAS_POINTER": blas.DESC_BIAS_POINTER,
        "CUBLASLT_EPILOGUE_BIAS": blas.EPILOGUE_BIAS,
        "CUBLASLT_MATRIX_LAYOUT_COLS": blas.LAYOUT_COLS,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": blas.PREF_MAX_WORKSPACE_BYTES,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": blas.PREF_REDUCTION_SCHEME_MASK,
        "CUBLAS_COMPUTE_32F": blas.COMPUTE_32F,
        "CUDA_R_32F": blas.DATA_TYPES[torch.float32],
        "CUDA_R_16F": blas.DATA_TYPES[torch.float16],
        "CUDA_R_16BF": blas.DATA_TYPES[torch.bfloat16],
        "CUBLASLT_REDUCTION_SCHEME_NONE": 0,
        "CUBLAS_OP_T": 1,
    }
    assert {name: number(name) for name in names} == names
    alignments = tuple(number(f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{matrix}_BYTES") for matrix in "ABCD")
    assert alignments == blas.PREF_MIN_ALIGNMENT_BYTES
    kinds = ("ID", "TILE_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING", "CUSTOM_OPTION", "STAGES_ID")
    attributes = [number(f"CUBLASLT_ALGO_CONFIG_{kind}") for kind in (*kinds, "INNER_SHAPE_ID", "CLUSTER_SHAPE_ID")]
    assert attributes == [attribute for attribute, _ in blas.ALGO_ATTRIBUTES]


def test_the_library_that_is_installed_knows_all_calls_and_refuses_without_a_gpu(blas: ModuleType, torch: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    library = ctypes.CDLL(str(installed("*/lib/libcublasLt.so.*")))
    for name in dir(Library):
        if name.startswith("cublasLt"):
            assert hasattr(library, name)
    with pytest.raises(blas.RefusedError, match="cuBLASLt answers cublasLtCreate with status 1"):
        blas.Heuristic(library)
