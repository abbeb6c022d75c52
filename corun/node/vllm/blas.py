"""Which algorithm cuBLASLt picks for the matrix products of a loaded model, at every number of rows, and its bits.

Owns: the question to cublasLtMatmulAlgoGetHeuristic, asked as torch 2.11 asks it for a linear layer
(aten/src/ATen/cuda/CUDABlas.cpp), and the comparison of every algorithm on real weights. An algorithm that does not
split K adds each element's products in one order, whatever its tiles are. NVIDIA does not promise this, hence the
comparison. Needs a GPU: without one the library gives no handle. Must not know: attention, steps, what follows from a
finding.

MLA's products by head are so small that they are run at every number of rows instead, which needs no imitation of how
torch asks about them (`check_by_head`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

WORKSPACE_BYTES = 1024
"""torch's workspace for cuBLASLt, as pinned (corun/node/vllm/pin.py: CUBLASLT_WORKSPACE_SIZE)."""
ALIGNMENT = 256
"""torch's allocations are aligned to 512 bytes; it tells the library at most 256."""
REFERENCE_ROWS = 256
COMPUTE_32F = 68
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t (library_types.h)."""
WEIGHTS = (torch.float16, torch.bfloat16)
"""The types of weights for which torch keeps the library from splitting K; with 32 bits it has no switch for that."""
# The numbers of attributes in cublasLt.h.
DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 4, 7, 8
EPILOGUE_BIAS = 4
LAYOUT_COLS = 3
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_MIN_ALIGNMENT_BYTES = (5, 6, 7, 8)  # of A, B, C and D
ALGO_ATTRIBUTES = (
    # number, bytes: id, tile, K splits, reduction scheme, swizzle, custom option, stages, inner shape, cluster shape
    *((0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4), (7, 2), (8, 2)),
)
RESULT_WORDS, ALGO_BYTES = 12, 64
"""cublasLtMatmulHeuristicResult_t in words of 8 bytes: the algorithm (8), workspace, status and waves, reserved (2)."""
UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's methods that call torch's `linear` (model_executor/layers/utils.py: `default_unquantized_gemm`)."""


class Algorithm(NamedTuple):
    """What the library would run."""

    id: int
    tile: int
    splits: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int

    @property
    def splits_k(self) -> bool:
        return self.splits > 1 or self.reduction != 0


@dataclass(frozen=True, slots=True)
class Product:
    """The products with one shape of weight, [n, k]: rows of [m, k] become rows of [m, n]."""

    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    layers: tuple[Any, ...]
    """The modules with such a weight, in the model's order."""
    most_rows: int

    def __str__(self) -> str:
        return f"the product with {len(self.layers)} weights of {self.n} x {self.k}"

    def rows(self, x: torch.Tensor, layer: Any) -> torch.Tensor:
        """Return the rows for x, [m, k], as vLLM computes them in this layer."""
        if self.out_dtype != self.dtype:
            return torch.mm(x, layer.weight.T, out_dtype=self.out_dtype)
        return torch.nn.functional.linear(x, layer.weight, getattr(layer, "bias", None))


class RefusedError(Exception):
    """The products of this model do not show that rows have the same bits at every number of rows; says why."""


def products(model: torch.nn.Module, budget: int, sequences: int) -> list[Product]:
    """Return the products of a step of up to `budget` tokens; lm_head has one row for each of up to `sequences`.

    Raises RefusedError for a layer that does not call torch's `linear`.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        method = getattr(module, "quant_method", None)
        is_head = name.rpartition(".")[2] == "lm_head"
        if method is None or not (is_head or "LinearBase" in {kind.__name__ for kind in type(module).__mro__}):
            continue
        if type(method).__name__ not in UNQUANTIZED:
            raise RefusedError(f"{name} is computed by {type(method).__name__}, whose choice of kernels is not known")
        if module.weight.dtype not in WEIGHTS:
            raise RefusedError(f"{name} has weights of {module.weight.dtype}")
        has_bias = getattr(module, "bias", None) is not None
        # Router layers may have fp32 results of 16-bit weights (fused_moe/router/gate_linear.py).
        out_dtype = torch.float32 if getattr(module, "allow_cublas_router_gemm", False) else module.weight.dtype
        key = (*module.weight.shape, module.weight.dtype, out_dtype, has_bias, sequences if is_head else budget)
        found.setdefault(key, []).append(module)
    return [
        Product(n, k, dtype, out_dtype, bias, tuple(layers), most)
        for (n, k, dtype, out_dtype, bias, most), layers in found.items()
    ]


class Heuristic:
    """cuBLASLt's own choice of algorithms for one product at a time."""

    def __init__(self, library: Any) -> None:
        """library: libcublasLt as ctypes loads it. Raises RefusedError if it gives no handle, as without a GPU."""
        self._library = library
        self._known: dict[bytes, Algorithm] = {}
        """The algorithms by their bytes: there are few, and to read one takes as long as the library's choice."""
        self._handle = self._made("cublasLtCreate")
        self._preference = self._made("cublasLtMatmulPreferenceCreate")
        set_preference = library.cublasLtMatmulPreferenceSetAttribute
        self._set(set_preference, self._preference, PREF_MAX_WORKSPACE_BYTES, ctypes.c_size_t(WORKSPACE_BYTES))
        # torch forbids all reduction schemes if split-K is not allowed (corun/node/vllm/pin.py: GPU_SWITCHES).
        self._set(set_preference, self._preference, PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(0))
        for attribute in PREF_MIN_ALIGNMENT_BYTES:
            self._set(set_preference, self._preference, attribute, ctypes.c_uint32(ALIGNMENT))

    @property
    def version(self) -> str:
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(self._library.cublasLtGetVersion())

    def choices(self, product: Product, rows: Iterable[int]) -> Iterator[tuple[int, Algorithm | None]]:
        """Yield the algorithm for each number of rows; None: the library has none.

        The library counts columns first: x @ W.T is W (transposed, [k, n]) times x ([k, m]).
        """
        operation = self._operation(product)
        kind, of_rows = DATA_TYPES[product.dtype], DATA_TYPES[product.out_dtype]
        weight = self._layout(kind, product.k, product.n)
        x, y = self._layout(kind, product.k, 1), self._layout(of_rows, product.n, 1)
        try:
            for number in rows:
                for layout in (x, y):
                    columns = ctypes.c_uint64(number)
                    self._set(self._library.cublasLtMatrixLayoutSetAttribute, layout, LAYOUT_COLS, columns)
                yield number, self._choice(operation, weight, x, y)
        finally:
            self._library.cublasLtMatmulDescDestroy(operation)
            for layout in (weight, x, y):
                self._library.cublasLtMatrixLayoutDestroy(layout)

    def _choice(self, operation: Any, weight: Any, x: Any, y: Any) -> Algorithm | None:
        result, count = (ctypes.c_uint64 * RESULT_WORDS)(), ctypes.c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, operation, weight, x, y, y, self._preference, 1, result, ctypes.byref(count)
        )
        if status or not count.value:
            return None
        if (opaque := bytes(result)[:ALGO_BYTES]) not in self._known:
            self._known[opaque] = Algorithm(*map(self._read(result), ALGO_ATTRIBUTES))
        return self._known[opaque]

    def _read(self, result: Any) -> Any:
        def read(attribute: tuple[int, int]) -> int:
            number, size = attribute
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            get = self._library.cublasLtMatmulAlgoConfigGetAttribute
            self._check(
                get(result, number, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)),
                "cublasLtMatmulAlgoConfigGetAttribute",
            )
            return value.value

        return read

    def _operation(self, product: Product) -> ctypes.c_void_p:
        operation = self._made("cublasLtMatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(0))
        values: dict[int, Any] = {DESC_TRANSA: ctypes.c_int32(1), DESC_TRANSB: ctypes.c_int32(0)}
        if product.has_bias:
            values[DESC_EPILOGUE] = ctypes.c_int32(EPILOGUE_BIAS)
            values[DESC_BIAS_POINTER] = ctypes.c_void_p(product.layers[0].bias.data_ptr())
        for attribute, value in values.items():
            self._set(self._library.cublasLtMatmulDescSetAttribute, operation, attribute, value)
        return operation

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        """Return the layout of a matrix whose columns lie one after the other."""
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        return self._made("cublasLtMatrixLayoutCreate", ctypes.c_int(kind), *sizes)

    def _made(self, name: str, *args: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(getattr(self._library, name)(ctypes.byref(made), *args), name)
        return made

    def _set(self, function: Any, target: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._check(function(target, attribute, ctypes.byref(value), size), f"attribute {attribute}")

    @staticmethod
    def _check(status: int, name: str) -> None:
        if status:
            raise RefusedError(f"cuBLASLt answers {name} with status {status}")


def algorithms(heuristic: Heuristic, product: Product) -> dict[Algorithm, list[int]]:
    """Return the algorithms of a product, each with the numbers of rows that it is picked for, ascending.

    Raises RefusedError if K is split, or the library has no algorithm, at any number of rows.
    """
    found: dict[Algorithm, list[int]] = {}
    for rows, algorithm in heuristic.choices(product, range(1, product.most_rows + 1)):
        if algorithm is None:
            raise RefusedError(f"{product} has no algorithm in cuBLASLt for {rows} rows")
        if algorithm.splits_k:
            raise RefusedError(f"{product} splits K for {rows} rows: {algorithm}")
        found.setdefault(algorithm, []).append(rows)
    return found


def surveyed(heuristic: Heuristic, found: Sequence[Product]) -> list[dict[Algorithm, list[int]]]:
    """Return the algorithms of all products. The library answers several threads at a time, without Python's lock."""
    with ThreadPoolExecutor(max_workers=max(len(found), 1)) as pool:
        return list(pool.map(lambda product: algorithms(heuristic, product), found))


def check(product: Product, found: dict[Algorithm, list[int]]) -> None:
    """Compare every algorithm on real weights with the same rows of steps of `REFERENCE_ROWS` rows, bit by bit.

    In the middle layer each algorithm runs at both ends of its range, in the first and last layer once.

    Raises RefusedError for a difference.
    """
    layers = product.layers
    rows = [sorted(numbers) for numbers in found.values()]
    ends = sorted({edge for numbers in rows for edge in (numbers[0], numbers[-1])})
    once = sorted({numbers[len(numbers) // 2] for numbers in rows})
    for layer, numbers in {layers[len(layers) // 2]: ends, layers[0]: once, layers[-1]: once}.items():
        _check_layer(product, layer, sorted({*numbers, *ends} if len(layers) == 1 else numbers))


def _check_layer(product: Product, layer: Any, numbers: Sequence[int]) -> None:
    x = _drawn(layer.weight, max(numbers[-1], REFERENCE_ROWS), product.k)
    _compare(str(product), lambda part: product.rows(part, layer), x, numbers)


def check_by_head(model: torch.nn.Module, budget: int) -> None:
    """Compare MLA's products by head at every number of rows from 1 to `budget`, as `check` does, in the middle layer.

    vLLM computes rows and chunks of up to 512 tokens so, all of a step at once: each head has a matrix of its own for
    queries, and one for results (model_executor/layers/attention/mla_attention.py: `forward_impl`, `_v_up_proj`).

    Raises RefusedError for a difference, or if there is no such layer.
    """
    layers = [module for module in model.modules() if hasattr(module, "W_UK_T")]
    if not layers:
        raise RefusedError("MLA has no products by head where they were looked for")
    layer = layers[len(layers) // 2]
    sizes = {_queries_by_head: layer.qk_nope_head_dim + layer.qk_rope_head_dim, _results_by_head: layer.kv_lora_rank}
    for rows, size in sizes.items():
        x = _drawn(layer.W_UK_T, max(budget, REFERENCE_ROWS), layer.num_heads, size)
        _compare(f"MLA's {rows.__name__[1:]}", partial(rows, layer), x, range(1, budget + 1))


def _queries_by_head(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the queries, [m, heads, size], in the latent space, [m, heads, rank]."""
    queries = x[..., : layer.qk_nope_head_dim].transpose(0, 1)
    found = x.new_empty((layer.num_heads, len(x), layer.kv_lora_rank))
    torch.bmm(queries, layer.W_UK_T, out=found)
    return found.transpose(0, 1)


def _results_by_head(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return attention's results in the latent space, [m, heads, rank], as those of the heads, [m, heads * size]."""
    found = x.new_empty((len(x), layer.num_heads * layer.v_head_dim))
    layer._v_up_proj(x, out=found)
    return found


def _drawn(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return normal random numbers of a weight's type, always the same ones."""
    generator = torch.Generator(weight.device).manual_seed(shape[-1])
    return torch.empty(shape, dtype=weight.dtype, device=weight.device).normal_(generator=generator)


def _compare(name: str, rows: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, numbers: Sequence[int]) -> None:
    """Compare what `rows` gives for the first rows of x, so many of them, with the same among `REFERENCE_ROWS`."""
    parts = (x[at : at + REFERENCE_ROWS] for at in range(0, len(x), REFERENCE_ROWS))
    expected = torch.cat([_reference(rows, part, x) for part in parts])
    differ = [(_bits(rows(x[:number])) != _bits(expected[:number])).any() for number in numbers]
    for number, differs in zip(numbers, torch.stack(differ).tolist(), strict=True):
        if differs:
            raise RefusedError(f"rows of {name} have other bits among {number} rows than among {REFERENCE_ROWS}")


def _reference(rows: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the rows for a part of x, computed with exactly `REFERENCE_ROWS` rows."""
    return rows(part) if len(part) == REFERENCE_ROWS else rows(x[-REFERENCE_ROWS:])[-len(part) :]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers as integers of the same bits: as numbers 0.0 is -0.0, and NaN is not NaN."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
