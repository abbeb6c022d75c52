"""Result files of a benchmark, made up by hand: small, with numbers that are easy to find again."""

from __future__ import annotations

from typing import Any

from corun_bench.report.views import Results, merge

SYSTEMS = {"std": 1, "bi": 1, "colocated": 1, "cluster:shared": 2}
HOSTILE = '</svg><script>alert("$x^")</script><!-- & _\ud800\u4e2d\x00'


def run(system: str, workload: str = "in=8,out=4", **values: Any) -> dict[str, Any]:
    """One repeat, with what is not given made up."""
    found = {"repeat": 0, "max_concurrency": 256, "duration": 2.0, "completed": 4, "failed": 0}
    found |= {"output_throughput": 100.0, "total_token_throughput": 300.0, "median_ttft_ms": 12.5}
    return {"system": system, "workload": workload, **found, **values}


def document(**values: Any) -> dict[str, Any]:
    """A result file with no runs, unless they are given."""
    conditions = {"date": "2026-01-01", "hardware": {"gpu": "H200"}, "versions": {"vllm": "0.26.0"}, "model": "tiny"}
    empty = {"command": ["corun", "bench"], "systems": [], "runs": [], "mismatches": []}
    return {"schema": "corun-bench-1", "conditions": conditions, **empty, **values}


def results(*runs: dict[str, Any], **values: Any) -> Results:
    return merge({"results.json": document(runs=list(runs), **values)})


def system(name: str, gpus: int = 1, **values: Any) -> dict[str, Any]:
    memory = {"engine": 3000.5, "router": 200}
    found = {"gpus": {"prefill": gpus, "decode": gpus, "total": gpus}, "slots": 256, "ready_s": 41.5, "memory": memory}
    return {"system": name, **found, "fingerprint": "f" * 64, "settings": {"tp": 1}, **values}


def kernel(name: str, variant: str, rows: int = 1, **values: Any) -> dict[str, Any]:
    times = {"median_us": 10.0, "min_us": 9.0, "max_us": 12.0, "batch_invariant": True, "position_invariant": True}
    return {"kernel": name, "variant": variant, "rows": rows, **times, **values}
