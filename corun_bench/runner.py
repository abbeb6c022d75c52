"""A benchmark from its plan to its result: start each system once, run every workload on it, repeat, compare bits.

Owns the order of the work and the progress messages. Must not know how a system is started or a request is timed.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corun.errors import CorunError, InternalError
from corun_bench import conditions, metrics, results, workloads
from corun_bench.driver import Target, drive
from corun_bench.engines import TEMPERATURE, IndependentEngines
from corun_bench.fleet import Up, foreign, up
from corun_bench.options import RESULT, BenchOptions
from corun_bench.records import Run, Workload
from corun_bench.systems import Machine, System
from router.text import Tokenizer

PADDING_PROMPT, PADDING_OUTPUT = 128, 64
"""The tokens of the single request of a padding sweep."""
REPEAT_SEEDS = 7919
"""The distance between the seeds of repeats, so that no two share a prompt that a prefix cache would know."""
CROWD = 96
"""The number of requests that run beside those that are compared."""
WATCH_S = 0.25
PROGRESS_S = 15.0
FEW_AT_ONCE = 4
"""The number of requests in flight when requests are run again to compare their bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure, as it was read from the options."""

    options: BenchOptions
    machine: Machine
    systems: tuple[System, ...]
    specs: tuple[workloads.Spec, ...]
    percentiles: tuple[float, ...] = metrics.PERCENTILES
    goodput: dict[str, float] = field(default_factory=dict)
    directory: Path
    """Where logs go, and the result file, which is rewritten after every run, so that nothing measured is lost."""


class Benchmark:
    """One benchmark. A failure is added to `failures`, and the rest goes on."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.options = plan, plan.options
        self.failures: list[str] = []
        config = conditions.model_config(plan.machine.model)
        self._vocab_size = int(config["vocab_size"])
        self._tokenizer: Tokenizer | None = None
        self._made: dict[tuple[Any, ...], Workload] = {}
        self._began = time.monotonic()
        self._check: Callable[[], None] = lambda: None
        self.result: results.Result = {
            "schema": results.SCHEMA,
            "command": sys.argv[1:],
            "conditions": {
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "hardware": conditions.hardware(),
                "versions": conditions.versions(),
                "clocks": {"before": conditions.clocks()},
                "model": conditions.model_summary(plan.machine.model, config),
                "sampling": f"temperature {TEMPERATURE}, a seed per request, ignore_eos",
            },
            "systems": [],
            "runs": [],
            "mismatches": [],
        }

    def prepare(self) -> None:
        """Make every workload, before anything is started. Raises InvalidArgumentError for one that cannot be made."""
        for spec in self.plan.specs:
            for repeat in (*([-1] if self.options.num_warmups else []), *range(self.options.repeats)):
                self._workload(spec, repeat, 1)
            if self.options.mismatch_requests:
                self._workload(spec, -2, 1)

    async def run(self) -> None:
        """Measure one system after the other. All that was measured is written even if this is cancelled."""
        try:
            for system in self.plan.systems:
                await self._measure(
                    system.name, up(system, self.plan.machine, self.plan.directory / "logs" / system.name)
                )
            for url in self.options.url:
                await self._measure(url, foreign(url, self.options.url_model))
        finally:
            self.result["conditions"]["clocks"]["after"] = conditions.clocks()
            self._save()

    async def _measure(self, name: str, starting: Any) -> None:
        self.say(f"{name}: starting")
        try:
            async with starting as found:
                await self._while_alive(self._on(name, found), found)
        except (CorunError, RuntimeError) as error:  # corun_bench.nodes.StartError is a RuntimeError.
            self._fail(f"{name}: {error}", self._missing(name))

    async def _while_alive(self, measuring: Coroutine[Any, Any, None], found: Up) -> None:
        """Run a measurement to its end.

        Raises UnavailableError as soon as a process of the system has ended, since its requests would wait for ever.
        """
        self._check = found.check
        watch = asyncio.create_task(_watch(self._check))
        work = asyncio.create_task(measuring)
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

    def _missing(self, name: str) -> str:
        """Return a text on how many planned runs of a system were measured; empty if none or all were."""
        rows = [row for row in self.result["runs"] if row["system"] == name]
        measured = sum(not row["workload"].startswith("padding=") for row in rows)
        planned = len(self.plan.specs) * len(self.options.max_concurrency) * self.options.repeats
        return f" ({measured} of its {planned} runs were measured)" if 0 < measured < planned else ""

    async def _on(self, name: str, found: Up) -> None:
        target, described, sent = found.target, self._describe(name, found), 0
        for spec in self.plan.specs:
            sent += await self._warm(name, target, spec)
            for concurrency in self.options.max_concurrency:
                for repeat in range(self.options.repeats):
                    workload = self._workload(spec, repeat, concurrency)
                    sent += len(workload.requests)
                    await self._run(name, target, workload, repeat, described)
            sent += await self._compare(name, target, spec)
        await self._pad(name, found, described)
        described |= {"memory": found.memory(), "gpu_memory": found.gpu_memory()}
        described["handoff"] = await found.handoffs(sent)
        self._save()

    async def _run(self, name: str, target: Target, workload: Workload, repeat: int, described: dict[str, Any]) -> Run:
        run = await self._drive(target, workload, system=name, repeat=repeat, logprobs=self.options.logprobs)
        summary = metrics.summarize(
            run,
            percentiles=self.plan.percentiles,
            goodput=self.plan.goodput,
            gpus=metrics.Gpus(**described["gpus"]),
            slots=described["slots"],
        )
        if not described["pads"]:
            summary["padding_waste"] = None
        rate = workload.request_rate if workload.is_open else None
        row = {"system": name, "workload": workload.name, "repeat": repeat}
        row |= {"max_concurrency": workload.max_concurrency, "request_rate": rate, "burstiness": workload.burstiness}
        self.result["runs"].append(row | summary)
        self._save()
        self.say(f"{name}: {workload.name} #{repeat + 1} at {workload.max_concurrency}: {_line(summary)}")
        if errors := sorted({outcome.error for outcome in run.outcomes if outcome.error}):
            self._fail(f"{name}: {workload.name}: {summary['failed']} requests failed: {errors[0]}")
        return run

    async def _drive(self, target: Target, workload: Workload, **options: Any) -> Run:
        """Run a workload. Raises UnavailableError if an engine died during it: the result is then no measurement."""
        progress = self._progress(options["system"], workload)
        run = await drive(target, workload, timeout_s=self.options.timeout_s, on_done=progress, **options)
        self._check()
        return run

    def _progress(self, name: str, workload: Workload) -> Callable[[], None]:
        """Return a function to call for every request that is done; it reports progress now and then."""
        count, said = 0, time.monotonic()

        def done() -> None:
            nonlocal count, said
            count += 1
            if time.monotonic() > said + PROGRESS_S and count < len(workload.requests):
                said = time.monotonic()
                self.say(f"{name}: {workload.name}: {count} of {len(workload.requests)} requests done")

        return done

    async def _warm(self, name: str, target: Target, spec: workloads.Spec) -> int:
        """Run requests of the same shapes whose times do not count; return how many were sent."""
        if not self.options.num_warmups:
            return 0
        workload = self._workload(spec, -1, min(self.options.max_concurrency[-1], self.options.num_warmups))
        warmups = replace(workload, requests=workload.requests[: self.options.num_warmups], request_rate=math.inf)
        await self._drive(target, warmups, system=name)
        return len(warmups.requests)

    async def _compare(self, name: str, target: Target, spec: workloads.Spec) -> int:
        """Run some requests among many others, then again few at a time in another order, and compare every bit.

        Return how many requests were sent.
        """
        if not (wanted := self.options.mismatch_requests):
            return 0
        made = self._workload(spec, -2, self.options.max_concurrency[-1])
        short = [
            replace(request, max_tokens=min(request.max_tokens, self.options.mismatch_tokens), arrival_s=0.0)
            for request in made.requests[: wanted + CROWD]
        ]
        crowd = replace(made, requests=tuple(short), request_rate=math.inf, max_concurrency=len(short))
        few = replace(crowd, requests=tuple(reversed(short[:wanted])), max_concurrency=FEW_AT_ONCE)
        first, again = [await self._drive(target, workload, system=name, logprobs=True) for workload in (crowd, few)]
        first.outcomes = first.outcomes[:wanted]
        found = metrics.mismatches(first, again)
        row = {"system": name, "workload": spec.name, "requests": found.requests, "rate": found.rate}
        row |= {"different_tokens": found.different_tokens, "different_bits": found.different_bits}
        self.result["mismatches"].append(row | {"tokens_only": found.tokens_only})
        self._save()
        self.say(f"{name}: {spec.name}: {found.different_bits} of {found.requests} requests differ in other company")
        if found.not_compared:
            self._fail(f"{name}: {spec.name}: {len(found.not_compared)} requests could not be compared")
        return len(crowd.requests) + len(few.requests)

    async def _pad(self, name: str, found: Up, described: dict[str, Any]) -> None:
        """Measure a single request with decode steps of each number of rows (paper, Section V-E).

        A system that does not pad is measured once.
        """
        if not self.options.padding or not isinstance(found.target, IndependentEngines):
            return
        pads = found.pads
        for rows in self.options.padding if pads else self.options.padding[:1]:
            if pads:
                await found.engines[0].pad_to(rows)
            await self._alone(name, IndependentEngines(found.engines[:1]), rows, described)
        if pads:
            await found.engines[0].pad_to(found.slots // len(found.engines))

    async def _alone(self, name: str, target: Target, rows: int, described: dict[str, Any]) -> None:
        spec = workloads.parse(f"in={PADDING_PROMPT},out={PADDING_OUTPUT}")
        for repeat in range(-1, self.options.repeats):
            made = self._workload(spec, repeat, 1, num_requests=1)
            workload = replace(made, name=f"padding={rows}", request_rate=math.inf)
            if repeat < 0:
                await self._drive(target, workload, system=name)
            else:
                await self._run(name, target, workload, repeat, described)

    def _workload(self, spec: workloads.Spec, repeat: int, concurrency: int, num_requests: int = 0) -> Workload:
        """Return a workload. It is the same for every system."""
        key = (spec, repeat, num_requests)
        if key not in self._made:
            self._made[key] = self._make(spec, repeat, num_requests)
        return replace(self._made[key], max_concurrency=concurrency)

    def _make(self, spec: workloads.Spec, repeat: int, num_requests: int) -> Workload:
        return workloads.make(
            spec,
            num_requests=num_requests or self.options.num_prompts,
            vocab_size=self._vocab_size,
            max_model_len=self.plan.machine.max_model_len,
            seed=self.options.seed + REPEAT_SEEDS * (repeat + 3),
            tokenize=self._tokenize if spec.is_text else None,
            request_rate=self.options.request_rate,
            burstiness=self.options.burstiness,
        )

    def _tokenize(self, text: str) -> list[int]:
        self._tokenizer = self._tokenizer or Tokenizer.load(self.plan.machine.model)
        return list(self._tokenizer.encode(text))

    def _describe(self, name: str, found: Up) -> dict[str, Any]:
        row: dict[str, Any] = {
            "system": name,
            "gpus": found.gpus,
            "slots": found.slots,
            "handoff": None,
            "pads": found.pads,
            "ready_s": found.ready_s,
            "memory": found.memory(),
            "gpu_memory": found.gpu_memory(),
            "fingerprint": found.fingerprint,
            "settings": found.settings,
        }
        if found.ready_s is not None:
            self.say(f"{name}: ready in {found.ready_s:.1f} s")
        self.result["systems"].append(row)
        return row

    def _save(self) -> None:
        results.write(self.plan.directory / RESULT, self.result)

    def _fail(self, text: str, missing: str = "") -> None:
        self.failures.append(text.splitlines()[0] + missing)
        self.say(text)

    def say(self, text: str) -> None:
        """Print a message on stderr, with the time since the start."""
        with suppress(BrokenPipeError):
            print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)


async def _watch(check: Callable[[], None]) -> None:
    while True:
        check()
        await asyncio.sleep(WATCH_S)


def _line(summary: dict[str, Any]) -> str:
    """Return the main figures of a run in one line."""
    text = f"{summary['output_throughput']:.0f} output tok/s"
    if summary.get("median_ttft_ms") is not None:
        text += f", TTFT {summary['median_ttft_ms']:.0f} ms"
    if summary.get("median_tpot_ms") is not None:
        text += f", TPOT {summary['median_tpot_ms']:.2f} ms"
    return text
