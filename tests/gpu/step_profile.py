"""Says where the time of a decode step goes: `python -m tests.gpu.step_profile --model DIR [--rows 1 44 256]`.

It starts a decode node's own engine, lets as many requests decode as there are rows, and has vLLM's profiler (torch's)
record 50 of its steps, scheduler and sampler included. Prompts have one token, so that no prefill node is needed; the
attention of long contexts is not in the figures. Prints a table for each number of rows: microseconds a step by part.
Without a GPU it prints the operators of the CPU instead, and `--model tiny --slots 8 --rows 1 8` shows that it runs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from corun.config.fields import DecodeConfig
from corun.models import tiny
from corun.node.certificate import SELF_TEST_FAILED
from corun.node.vllm import start as base
from decode_node import engine as decode

STEPS, WARM_STEPS, TIMEOUT_S = 50, 20, 300.0
SAMPLER = ("_sum_parts", "_combine", "gumbel", "topk_topp", "temperature", "penalties", "bias", "min_p", "num_sampled")
"""Parts of the names of the kernels that draw a token and give its log probability."""
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What to profile."""

    model: str
    """Directory of a checkpoint, or "tiny"."""
    slots: int = 256
    rows: tuple[int, ...] = (1, 44, 256)
    """The numbers of requests that decode at once."""


def busy_us(events: Iterable[Event]) -> float:
    """Return the time in which at least one of the events ran."""
    total, until = 0.0, 0.0
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def gpu_parts(events: Sequence[Event], steps: int) -> dict[str, float]:
    """Return microseconds a step: graph, sampler and other kernels, and the time from a graph's end to the next."""
    work = [event for event in events if event.get("cat") in GPU_KINDS]
    launches = {event["args"]["correlation"] for event in events if "GraphLaunch" in event["name"]}
    graphs: dict[int, list[Event]] = {}
    for event in work:
        if (launch := event["args"].get("correlation")) in launches:
            graphs.setdefault(launch, []).append(event)
    outside = [event for event in work if event["args"].get("correlation") not in launches]
    sampler = [event for event in outside if any(part in event["name"] for part in SAMPLER)]
    spans = sorted((min(e["ts"] for e in one), max(e["ts"] + e["dur"] for e in one)) for one in graphs.values())
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
    return {
        "whole": (max(e["ts"] + e["dur"] for e in work) - min(e["ts"] for e in work)) / steps,
        "GPU busy": busy_us(work) / steps,
        "graph": sum(end - start for start, end in spans) / steps,
        "from graph to graph": sum(gaps) / max(1, len(gaps)),
        "sampler's kernels": busy_us(sampler) / steps,
        "other kernels and copies": (busy_us(outside) - busy_us(sampler)) / steps,
    }


def cpu_parts(events: Sequence[Event], steps: int) -> dict[str, float]:
    """Return microseconds a step of the ten operators that take longest, those that they call included."""
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "cpu_op":
            times[event["name"]] += event["dur"]
    return {name: spent / steps for name, spent in times.most_common(10)}


def newest_trace(folder: Path) -> list[Event]:
    """Return the events with a duration of the trace that was written last."""
    newest = max(folder.glob("**/*.json"), key=lambda path: path.stat().st_mtime)
    return [event for event in json.loads(newest.read_text())["traceEvents"] if event.get("ph") == "X"]


async def profile(llm: Any, rows: int, into: Path) -> dict[str, float]:
    """Decode `rows` requests, record `STEPS` steps of them, and return the time of their parts."""
    from vllm.sampling_params import SamplingParams

    seen, wanted, reached, ended = 0, WARM_STEPS, asyncio.Event(), asyncio.Event()
    running = {f"rows-{rows}-{number}" for number in range(rows)}

    def take(outputs: list[Any]) -> None:
        nonlocal seen
        seen += 1
        running.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        if seen >= wanted:
            reached.set()
        if not running:
            ended.set()

    llm.on_outputs = take
    for number, name in enumerate(sorted(running)):
        sampling = SamplingParams(temperature=0.6, seed=number, max_tokens=2000, ignore_eos=True, detokenize=False)
        await llm.engine_core.add_request_async(base.core_request(name, [5], sampling))
    await asyncio.wait_for(reached.wait(), TIMEOUT_S)
    await llm.start_profile()
    first, wanted = seen, seen + STEPS
    reached.clear()
    await asyncio.wait_for(reached.wait(), TIMEOUT_S)
    await llm.stop_profile()
    steps = seen - first
    await llm.engine_core.abort_requests_async(sorted(running))
    events = newest_trace(into)
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    return {"steps": steps, **(gpu_parts if on_gpu else cpu_parts)(events, steps)}


async def main(options: Profile, into: Path) -> None:
    model = str(tiny.ensure()) if options.model == "tiny" else options.model
    config = DecodeConfig(model=model, slots=options.slots)
    made = decode.arguments(config, base.nixl_endpoint(config, "profile"))
    from vllm.config import ProfilerConfig

    made.profiler_config = ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(into),
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
    )
    llm = base.step_llm().from_engine_args(made)
    try:
        finding = await base.certify(llm)
        began = time.monotonic()
        certified, _ = await decode.certify_rows(llm, SELF_TEST_FAILED if finding else "", None)
        print(json.dumps({"certified": certified, "s": round(time.monotonic() - began, 2), "finding": finding}))
        for rows in options.rows:
            parts = await profile(llm, rows, into)
            print(json.dumps({"rows": rows, **{name: round(spent, 1) for name, spent in parts.items()}}), flush=True)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    chosen = tyro.cli(Profile, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        # The engine's own processes import this project.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        asyncio.run(main(chosen, Path(folder)))
