"""What the profile of decode steps says of a trace."""

from __future__ import annotations

from typing import Any

from tests.gpu.step_profile import busy_us, cpu_parts, gpu_parts


def event(name: str, kind: str, start: float, length: float, launch: int = 0) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ts": start, "dur": length, "args": {"correlation": launch}}


def test_overlapping_work_counts_once() -> None:
    assert busy_us([event("a", "kernel", 0, 10), event("b", "kernel", 5, 10), event("c", "kernel", 20, 1)]) == 16


def test_the_time_between_graphs_is_told_from_the_graphs() -> None:
    """Two steps: a graph of two kernels and a hole, then a sampler's kernel, a copy, and time in which nothing runs."""
    events = []
    for step in (0, 1):
        at = 100 * step
        events += [event("cudaGraphLaunch", "cuda_runtime", at - 5, 1, step + 1)]
        events += [event("gemm", "kernel", at, 20, step + 1), event("norm", "kernel", at + 30, 10, step + 1)]
        events += [event("_gumbel_sample_kernel", "kernel", at + 50, 10), event("Memcpy", "gpu_memcpy", at + 65, 5)]
    assert gpu_parts(events, 2) == {
        "whole": 85.0,
        "GPU busy": 45.0,
        "graph": 40.0,
        "from graph to graph": 60.0,
        "sampler's kernels": 10.0,
        "other kernels and copies": 5.0,
    }


def test_operators_of_the_cpu_are_summed_up() -> None:
    events = [event("mm", "cpu_op", 0, 4), event("mm", "cpu_op", 9, 4), event("x", "python_function", 0, 99)]
    assert cpu_parts(events, 2) == {"mm": 4.0}
