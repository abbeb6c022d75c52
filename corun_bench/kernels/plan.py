"""The plan of `corun bench kernels`: a model's shapes on one tensor-parallel rank, the tasks, and their processes.

Variants differ in settings that a library reads when its device starts, so each setting has a process of its own. This
module must not load torch. Variants of a kernel:

  std         what stock vLLM runs
  bi          vLLM's batch-invariant implementation
  nosplitk    cuBLAS without split-K, as the nodes of a cluster pin it
  fixed       the kernel of the cluster at its fixed shape: idle rows fill the batch up to the number of slots
  row-by-row  on a CPU, where vLLM has no batch-invariant kernels: the std kernel on one row at a time
  fixed-order all-reduce as a gather and a sum in the order of the ranks
  custom      vLLM's own all-reduce, which it prefers to NCCL for small messages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError
from corun.node.vllm import pin
from corun_bench.conditions import model_config
from corun_bench.options import KernelName, KernelOptions

NAMES: dict[KernelName, str] = {
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
_PLAIN: dict[str, tuple[str, ...]] = {"cuda": ("std", "bi", "fixed"), "cpu": ("std", "row-by-row", "fixed")}
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "matmul": {"cuda": (*_PLAIN["cuda"], "nosplitk"), "cpu": _PLAIN["cpu"]},
    "attention": {"cuda": _PLAIN["cuda"], "cpu": ("std", "bi", "fixed")},
    "all_reduce": {"cuda": ("std", "bi", "fixed-order", "custom"), "cpu": ("std", "fixed-order")},
}
_VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
# The all-reduce "std" is NCCL's ring, as in the paper; "bi" is the tree that the nodes pin, as vLLM's mode does.
_COLLECTIVES = {"std": {"NCCL_ALGO": "allreduce:ring"}, "bi": dict(pin.ALL_REDUCE)}
UNSET = frozenset((*_CUBLAS, "VLLM_BATCH_INVARIANT", *pin.ALL_REDUCE))
"""The variables that no process inherits, so that "std" is what a user's own vLLM would run."""

Row = dict[str, Any]
Shapes = dict[str, list[tuple[str, tuple[int, ...]]]]
"""For each kernel, the (name in the report, shape) of what is measured of it."""


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

    def row(self, rows: int, **values: Any) -> Row:
        """Return a row of the report. What is not given was not measured."""
        names = ("median_us", "min_us", "max_us", "batch_invariant", "position_invariant", "repeatable")
        task = {"kernel": self.kernel, "variant": self.variant, "rows": rows, "places": self.places or rows}
        task |= {"dtype": self.dtype, "shape": list(self.shape), "implementation": ""}
        return {**task, **dict.fromkeys(names), "error": "", **values}


def shapes_of(model_dir: Path, ranks: int) -> tuple[Shapes, list[str]]:
    """Read a model's shapes on one tensor-parallel rank from its config.json; return them and notes for the report.

    Raises:
        InvalidArgumentError: the config.json is missing or incomplete, the model has no plain attention, or it cannot
            be divided among the ranks.
    """
    config = model_config(str(model_dir))
    try:
        hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
        vocab = -(-config["vocab_size"] // _VOCAB_PADDING) * _VOCAB_PADDING
    except KeyError as error:
        raise InvalidArgumentError("model", str(model_dir), f"its config.json has no {error.args[0]}") from error
    if "kv_lora_rank" in config:
        raise InvalidArgumentError("model", str(model_dir), "its attention is latent (MLA), which is not measured")
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    for name, value in {"num_attention_heads": heads, "intermediate_size": mlp, "padded vocabulary": vocab}.items():
        if ranks < 1 or value % ranks:
            raise InvalidArgumentError("tensor_parallel_size", ranks, f"must divide {name} = {value}")
    heads, kv_heads = heads // ranks, max(1, kv_heads // ranks)
    matmuls = {"qkv": (hidden, (heads + 2 * kv_heads) * head_dim), "o": (heads * head_dim, hidden)}
    notes = []
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        matmuls["router"] = (hidden, experts)
        notes.append("the grouped matmul of the experts is not measured")
    else:
        matmuls |= {"gate_up": (hidden, 2 * mlp // ranks), "down": (mlp // ranks, hidden)}
    matmuls["lm_head"] = (hidden, vocab // ranks)
    found: Shapes = {op: [(name, (hidden,))] for op, name in NAMES.items()}
    # The vocabulary is not divided: log-probabilities are computed from the gathered logits.
    found["softmax"] = [(NAMES["softmax"], (vocab,))]
    found["matmul"] = [(f"{NAMES['matmul']} {name}", shape) for name, shape in matmuls.items()]
    found["attention"] = [(NAMES["attention"], (heads, kv_heads, head_dim))]  # The context comes from the options.
    return found, notes


def _variants(op: str, device: str) -> tuple[str, ...]:
    return _VARIANTS.get(op, _PLAIN)[device]


def missing_here(options: KernelOptions) -> Iterator[Row]:
    """Yield what cannot be measured on this device, and why."""
    for op in options.kernels:
        if op == "all_reduce" and options.ranks < 2:
            yield {"kernel": NAMES[op], "variant": "all", "reason": "needs two or more devices"}
        elif "bi" not in _variants(op, options.device):
            library = "NCCL" if op == "all_reduce" else "Triton"
            yield {"kernel": NAMES[op], "variant": "bi", "reason": f"needs {library}, and that a GPU"}
    if past := [str(n) for n in options.rows if n > options.slots]:
        reason = f"a decode step has at most {options.slots} rows: not {', '.join(past)}"
        yield {"kernel": "all", "variant": "fixed", "reason": reason}
        if "attention" in options.kernels:
            yield {"kernel": NAMES["attention"], "variant": "all", "reason": reason}


def process_groups(shapes: Shapes, options: KernelOptions) -> list[list[Task]]:
    """Return everything to measure, by process: one for each library, so that its crash loses no other results.

    All tasks of a process have the same environment and as many ranks, each of which is a process.
    """
    found: dict[tuple[Any, ...], list[Task]] = {}
    for task in _tasks(shapes, options):
        library = task.op if task.op in _VARIANTS else "small kernels"
        found.setdefault((library, *environment(task, options.device).items()), []).append(task)
    return list(found.values())


def _tasks(shapes: Shapes, options: KernelOptions) -> Iterator[Task]:
    for op in options.kernels:
        if op == "all_reduce" and options.ranks < 2:
            continue
        # fp32 for log-probabilities (vllm/v1/sample/sampler.py) and gloo's sums on a CPU.
        only_fp32 = op == "softmax" or (op == "all_reduce" and options.device == "cpu")
        for dtype in ("float32",) if only_fp32 else options.dtypes:
            for name, shape in shapes[op]:
                for variant in _variants(op, options.device):
                    places = options.slots if variant == "fixed" else 0
                    longest = options.slots if op == "attention" or places else max(options.rows)
                    if rows := tuple(n for n in options.rows if n <= longest):
                        short = {"bfloat16": " bf16", "float32": " fp32"}[dtype]
                        yield Task(
                            op=op,
                            kernel=name + short * (len(options.dtypes) > 1),
                            variant=variant,
                            dtype=dtype,
                            shape=(*shape, options.context) if op == "attention" else shape,
                            rows=rows,
                            places=places,
                        )


def environment(task: Task, device: str) -> dict[str, str]:
    """Return the variables that are set before the process's device starts."""
    if task.variant == "nosplitk":
        settings = pin.gpu_settings()
        return {name: settings[name] for name in _CUBLAS}
    return _COLLECTIVES.get(task.variant, {}) if task.op == "all_reduce" and device == "cuda" else {}
