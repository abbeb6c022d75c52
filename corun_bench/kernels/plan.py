"""The plan of `corun bench kernels`: a model's shapes on one tensor-parallel rank, the tasks, and their processes.

All of it is plain values; this module must not load torch or vLLM, nor start anything. Variants of a kernel:

  std         what stock vLLM runs
  bi          vLLM's batch-invariant implementation
  nosplitk    cuBLAS without split-K, as the nodes of a cluster pin it
  fixed       the kernel of the cluster at its fixed shape: idle rows fill the batch up to the number of slots
  row-by-row  on a CPU, where vLLM has no batch-invariant kernels: the std kernel on one row at a time
  fixed-order all-reduce as a gather and a sum in the order of the ranks
  custom      vLLM's own all-reduce, which it prefers to NCCL for small messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError
from corun.node.vllm import pin
from corun.types import NodeRole

NAMES = {
    "mean": "Mean",
    "rms_norm": "RMSNorm",
    "softmax": "Softmax",
    "matmul": "MatMul",
    "attention": "Attention decode",
    "all_reduce": "AllReduce",
}
"""The kernels that a user can ask for, with their names in the report: the rows of the paper's Table I."""
RANK = "CORUN_BENCH_RANK"
"""Environment variable that tells a process its rank."""
_VARIANTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cuda": {
        "mean": ("std", "bi", "fixed"),
        "rms_norm": ("std", "bi", "fixed"),
        "softmax": ("std", "bi", "fixed"),
        "matmul": ("std", "bi", "fixed", "nosplitk"),
        "attention": ("std", "bi", "fixed"),
        "all_reduce": ("std", "bi", "fixed-order", "custom"),
    },
    "cpu": {
        "mean": ("std", "row-by-row", "fixed"),
        "rms_norm": ("std", "row-by-row", "fixed"),
        "softmax": ("std", "row-by-row", "fixed"),
        "matmul": ("std", "row-by-row", "fixed"),
        "attention": ("std", "bi", "fixed"),
        "all_reduce": ("std", "fixed-order"),
    },
}
_VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
# The all-reduce "std" is NCCL's ring, as in the paper; "bi" is the tree that the nodes pin, as vLLM's mode does.
_COLLECTIVES = {"std": {"NCCL_ALGO": "allreduce:ring"}, "bi": dict(pin.ALL_REDUCE)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """A model's shapes on one tensor-parallel rank."""

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    matmuls: tuple[tuple[str, int, int], ...]
    """The (name, input width, output width) of each matrix product."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One kernel in one variant, at several row counts."""

    op: str
    """The kernel, a key of NAMES."""
    kernel: str
    """The kernel's name in the report."""
    variant: str
    dtype: str
    """The type of the inputs, "bfloat16" or "float32"."""
    shape: tuple[int, ...]
    """The shape (width,); for a matmul (input, output); for attention (query heads, KV heads, head size, longest
    context)."""
    rows: tuple[int, ...]
    places: int = 0
    """The number of rows that the kernel always computes, whatever `rows` is; 0: as many as there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process, or of several processes that are ranks of one group."""

    tasks: tuple[Task, ...]
    environment: Mapping[str, str]
    """The variables that are set before the process's device starts."""
    pinned: bool = False
    """Whether to set torch's switches as the nodes of a cluster do."""
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What to measure."""

    device: str
    """The device, "cuda" or "cpu"."""
    kernels: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    slots: int
    context: int
    """The number of tokens of the longest sequence that attention reads."""
    ranks: int
    """The number of ranks of the all-reduce; below 2 it is not measured."""


def shapes(model_dir: Path, tensor_parallel_size: int) -> Shapes:
    """Read a model's shapes from its config.json.

    Raises:
        InvalidArgumentError: the config.json is missing or incomplete, the model has no plain attention, or it cannot
            be divided among the ranks.
    """
    config = _config(model_dir)
    size = tensor_parallel_size
    try:
        hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
        vocab = -(-config["vocab_size"] // _VOCAB_PADDING) * _VOCAB_PADDING
    except KeyError as error:
        raise InvalidArgumentError("model", str(model_dir), f"its config.json has no {error.args[0]}") from error
    kv_heads = config.get("num_key_value_heads") or heads
    if "kv_lora_rank" in config:
        raise InvalidArgumentError("model", str(model_dir), "its attention is latent (MLA), which is not measured")
    head_dim = config.get("head_dim") or hidden // heads
    divided = {"num_attention_heads": heads, "intermediate_size": mlp, "padded vocabulary": vocab}
    for name, value in divided.items():
        if size < 1 or value % size:
            raise InvalidArgumentError("tensor_parallel_size", size, f"must divide {name} = {value}")
    heads, kv_heads = heads // size, max(1, kv_heads // size)
    matmuls = [("qkv", hidden, (heads + 2 * kv_heads) * head_dim), ("o", heads * head_dim, hidden)]
    notes = []
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        matmuls.append(("router", hidden, experts))
        notes.append("the grouped matmul of the experts is not measured")
    else:
        matmuls += [("gate_up", hidden, 2 * mlp // size), ("down", mlp // size, hidden)]
    matmuls.append(("lm_head", hidden, vocab // size))
    return Shapes(
        hidden=hidden,
        vocab=vocab,  # Not divided: log-probabilities are computed from the gathered logits.
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        matmuls=tuple(matmuls),
        notes=tuple(notes),
    )


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    if not path.is_file():
        raise InvalidArgumentError("model", str(model_dir), 'must be a directory with a config.json, or "tiny"')
    config = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = config.get("text_config") or config
    return found


def jobs(model: Shapes, selection: Selection) -> list[Job]:
    """Return everything to measure, by process: one for each library, so that its crash loses no other results."""
    tasks = list(_tasks(model, selection))
    found = []
    for ops in (("mean", "rms_norm", "softmax"), ("matmul",), ("attention",)):
        plain = tuple(task for task in tasks if task.op in ops and task.variant != "nosplitk")
        found.append(Job(tasks=plain, environment={}))
        pinned = tuple(task for task in tasks if task.op in ops and task.variant == "nosplitk")
        found.append(Job(tasks=pinned, environment=_no_split_k(), pinned=True))
    on_gpu = selection.device == "cuda"
    sums: dict[tuple[tuple[str, str], ...], list[Task]] = {}
    for task in tasks:
        if task.op == "all_reduce":
            variables = _COLLECTIVES.get(task.variant, {}) if on_gpu else {}
            sums.setdefault(tuple(variables.items()), []).append(task)
    for settings, together in sums.items():
        found.append(Job(tasks=tuple(together), environment=dict(settings), ranks=selection.ranks))
    return [job for job in found if job.tasks]


def unset() -> frozenset[str]:
    """Return the variables that no process inherits, so that "std" is what a user's own vLLM would run."""
    return frozenset((*_CUBLAS, "VLLM_BATCH_INVARIANT", *pin.ALL_REDUCE))


def unavailable(selection: Selection) -> list[dict[str, str]]:
    """Return what cannot be measured here, and why."""
    found = []
    for op in selection.kernels:
        if op == "all_reduce" and selection.ranks < 2:
            found.append({"kernel": NAMES[op], "variant": "all", "reason": "needs two or more devices"})
        elif "bi" not in _VARIANTS[selection.device][op]:
            library = "NCCL" if op == "all_reduce" else "Triton"
            found.append({"kernel": NAMES[op], "variant": "bi", "reason": f"needs {library}, and that a GPU"})
    if past := [n for n in selection.rows if n > selection.slots]:
        counts = ", ".join(map(str, past))
        reason = f"a decode step has at most {selection.slots} rows: not {counts}"
        found.append({"kernel": "all", "variant": "fixed", "reason": reason})
        if "attention" in selection.kernels:
            found.append({"kernel": NAMES["attention"], "variant": "all", "reason": reason})
    return found


def described(task: Task, rows: int) -> dict[str, Any]:
    """Return the part of a report row that says what was measured."""
    return {
        "kernel": task.kernel,
        "variant": task.variant,
        "rows": rows,
        "places": task.places or rows,
        "dtype": task.dtype,
        "shape": list(task.shape),
    }


def empty(task: Task, rows: int, error: str) -> dict[str, Any]:
    """Return a report row without a measurement."""
    values = dict.fromkeys(("median_us", "min_us", "max_us", "batch_invariant", "position_invariant", "repeatable"))
    return {**described(task, rows), "implementation": "", **values, "error": error}


def _no_split_k() -> dict[str, str]:
    settings = pin.gpu_settings(NodeRole.DECODE)
    return {name: settings[name] for name in _CUBLAS}


def _tasks(model: Shapes, selection: Selection) -> Iterator[Task]:
    for op in selection.kernels:
        if op == "all_reduce" and selection.ranks < 2:
            continue
        for dtype in _dtypes(op, selection):
            for name, shape in _kernels(op, model, selection.context):
                kernel = f"{name} {_SHORT[dtype]}" if len(selection.dtypes) > 1 else name
                for variant in _VARIANTS[selection.device][op]:
                    places = selection.slots if variant == "fixed" else 0
                    longest = selection.slots if op == "attention" or places else max(selection.rows)
                    rows = tuple(n for n in selection.rows if n <= longest)
                    if rows:
                        yield Task(
                            op=op, kernel=kernel, variant=variant, dtype=dtype, shape=shape, rows=rows, places=places
                        )


_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def _dtypes(op: str, selection: Selection) -> Sequence[str]:
    """Return the types to measure: fp32 for log-probabilities (vllm/v1/sample/sampler.py) and gloo's sums on a CPU."""
    on_cpu = selection.device == "cpu"
    return ("float32",) if op == "softmax" or (op == "all_reduce" and on_cpu) else selection.dtypes


def _kernels(op: str, model: Shapes, context: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the (name in the report, shape) of each kernel of an op."""
    if op == "matmul":
        return [(f"{NAMES[op]} {name}", (inner, outer)) for name, inner, outer in model.matmuls]
    if op == "attention":
        return [(NAMES[op], (model.heads, model.kv_heads, model.head_dim, context))]
    return [(NAMES[op], (model.vocab if op == "softmax" else model.hidden,))]
