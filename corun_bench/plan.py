"""The work of `corun bench plan`: simulate the placements that fit, and advise one with the reason.

A placement is how many prefill, decode and colocated nodes there are. Owns which placements are simulated, how they are
compared, and what is said about them. Must not know how a run is simulated or where rates come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from corun.client.progress import ProgressBar
from corun.errors import InvalidArgumentError
from corun.models import resolve_model
from corun_bench import conditions, metrics, rates, results, tables, workloads
from corun_bench.driver import Workload
from corun_bench.options import PlanOptions
from corun_bench.simulation import Rates, Simulated, at_best, simulate, work_s
from corun_bench.systems import NodeCounts

SCHEMA = "corun-plan-1"
LEAST_PROMPTS = 300
HORIZON_S = 60.0
"""The time of arrivals that an open loop simulates by default, in seconds."""
MAX_PARTS = 8
"""Engines are placed one by one up to this number, and in so many equal parts beyond it: 43 placements at most."""
MAX_GPUS_FACTOR = 4
"""The search for the fewest GPUs ends at this many times those that could do the work at best."""
SAME = 0.01
"""Placements that differ by no more than this share are said to be as good."""
IDLE = 0.5
"""Nodes whose load is below this are said to be wasted, if others are at their limit."""
FULL = 0.8
"""The load from which on nodes are at their limit."""
_LATENCIES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p50_e2el_ms")
_METRICS = ("duration", "completed", "request_throughput", "output_throughput", *_LATENCIES)
_KINDS = ("prefill", "decode", "colocated")
Row = dict[str, Any]


def plan(options: PlanOptions, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Return the plan as plain values for JSON.

    {"schema", "workload", "request_rate", "goodput", "rates": {…}, "measured": {…} | None, "placements": [{"placement",
     "gpus", "output_throughput", "p99_ttft_ms", …, "request_goodput", "good", "load": {kind: share}}], "advised",
     "reasons": [text], "notes": [text]}
    The placements are the best first. Raises InvalidArgumentError for options that make no plan.
    """
    options.check()
    return _Planner(options, say).plan()


class _Planner:
    """The workload, the rates, and what both allow."""

    def __init__(self, options: PlanOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._spec = workloads.parse(options.workload)
        if self._spec.rate:
            raise InvalidArgumentError("workload", options.workload, "must have no rate: give it as request_rate")
        self._goodput = metrics.parse_goodput(options.goodput)
        self._targets = {"ttft_target_ms": options.ttft_target_ms, "tpot_target_ms": options.tpot_target_ms}
        self._is_open = math.isfinite(options.request_rate)
        self._model = resolve_model(options.model) if self._spec.is_text else ""
        self._tokenize = workloads.tokenizer(self._model)
        few = self._make(LEAST_PROMPTS).requests
        self._mean_prompt = sum(len(one.prompt_token_ids) for one in few) / len(few)
        self._measured: rates.Measured | None = None
        if options.measured is not None:
            self._measured = rates.measured(results.read(options.measured), options.system, self._mean_prompt)
        self._rates: Rates = rates.chosen(options, self._measured)
        self._work_s = work_s(self._rates, few, self._spec.samples)

    def plan(self) -> dict[str, Any]:
        if self._options.placements:
            rows = self._simulate([NodeCounts.parse(text) for text in dict.fromkeys(self._options.placements)])
        elif self._options.num_gpus:
            rows = self._simulate(self._candidates(self._options.num_gpus // self._options.gpus_per_node))
        else:
            rows = self._fewest()
        rows = self._best_first(rows)
        return {
            "schema": SCHEMA,
            "workload": self._spec.name,
            "request_rate": self._options.request_rate if self._is_open else None,
            "goodput": self._goodput,
            **(self._targets if any(self._targets.values()) else {}),
            "seed": self._options.seed,
            "gpus_per_node": self._options.gpus_per_node,
            "rates": rates.described(self._rates),
            "measured": self._measured and {"file": str(self._options.measured), "system": self._measured.system},
            "placements": rows,
            "advised": rows[0]["placement"],
            "reasons": self._reasons(rows),
            "notes": self._notes(),
        }

    def _fewest(self) -> list[Row]:
        """Return the placements on the fewest GPUs on which one reaches the goodput. Raises InvalidArgumentError if
        none does on four times the GPUs that could do the work at best."""
        at_least = max(1, math.ceil(self._options.request_rate * sum(self._work_s)))
        engines, best = at_least, 0.0
        while engines <= MAX_GPUS_FACTOR * at_least:
            rows = self._simulate(self._candidates(engines))
            best = max(best, *(row["good"] for row in rows))
            if best >= self._options.attain:
                return rows
            engines += max(1, engines // MAX_PARTS)
        gpus = MAX_GPUS_FACTOR * at_least * self._options.gpus_per_node
        limit = f"must be easier: on up to {gpus} GPUs, at most {best:.1%} of the requests are good"
        raise InvalidArgumentError("goodput", " ".join(self._options.goodput), limit)

    def _candidates(self, engines: int) -> list[NodeCounts]:
        """Return the placements on so many engines that could do at least half of what the best one could, or, at a
        request rate, at least that rate."""
        part = -(-engines // MAX_PARTS)
        found = [
            NodeCounts(prefill=prefill, decode=decode, colocated=engines - prefill - decode)
            for prefill in range(0, engines + 1, part)
            for decode in range(0, engines + 1 - prefill, part)
        ]
        found = [counts for counts in found if counts.serves]
        if engines <= 2:
            return found
        able = {counts: at_best(counts, *self._work_s) for counts in found}
        least = min(self._options.request_rate, max(able.values()) * (1.0 if self._is_open else 0.5))
        return [counts for counts in found if able[counts] >= least]

    def _simulate(self, candidates: Sequence[NodeCounts]) -> list[Row]:
        engines = max(counts.engines for counts in candidates)
        in_flight = self._options.max_concurrency or engines * self._rates.slots
        arrivals = HORIZON_S * self._options.request_rate if self._is_open else 2 * in_flight
        count = self._options.num_prompts or max(LEAST_PROMPTS, math.ceil(arrivals))
        workload = replace(self._make(count), max_concurrency=in_flight)
        self._say(f"{len(candidates)} placements on {engines} engines, {len(workload.requests)} requests each")
        rows = []
        with ProgressBar(len(candidates), "placements") as bar:
            for counts in candidates:
                rows.append(self._row(counts, workload))
                bar.advance()
        return rows

    def _row(self, counts: NodeCounts, workload: Workload) -> Row:
        found = simulate(counts, self._rates, workload, samples=self._spec.samples, **self._targets)
        size = self._options.gpus_per_node
        gpus = {
            "prefill": size * (counts.prefill + counts.colocated),
            "decode": size * (counts.decode + counts.colocated),
            "total": size * counts.engines,
        }
        slots = self._rates.slots * (counts.decode + counts.colocated)
        summary = metrics.summarize(found.run, goodput=self._goodput, gpus=gpus, slots=slots)
        good = summary["request_goodput"]
        return {
            "placement": counts.name,
            "gpus": gpus["total"],
            "requests": len(workload.requests),
            "max_concurrency": None if workload.is_open else workload.max_concurrency,
            **{name: summary[name] for name in _METRICS},
            "request_goodput": good,
            "good": None if good is None else good / summary["request_throughput"],
            "load": {kind: load for kind in _KINDS if (load := found.load(kind)) is not None},
            "handoffs": found.handoffs,
            **(_flexed(found, counts.colocated) if any(self._targets.values()) else {}),
            "at_best_request_throughput": at_best(counts, *self._work_s),
        }

    def _make(self, count: int) -> Workload:
        # Only lengths count, so random tokens may all be the same.
        vocab_size = conditions.model_config(self._model)["vocab_size"] if self._spec.is_text else workloads.ONE_TOKEN
        return workloads.make(
            self._spec,
            num_requests=count,
            vocab_size=vocab_size,
            max_model_len=self._options.max_model_len,
            seed=self._options.seed,
            tokenize=self._tokenize,
            request_rate=self._options.request_rate,
            burstiness=self._options.burstiness,
        )

    def _worth(self, row: Row) -> float:
        """Return what placements are compared by, for each GPU: output tokens a second or, with targets, good requests
        a second. At a request rate it is the share of good ones, because what came last has no part in it."""
        if not self._goodput:
            return float(row["output_throughput"]) / int(row["gpus"])
        return float(row["good" if self._is_open else "request_goodput"]) / int(row["gpus"])

    def _best_first(self, rows: Sequence[Row]) -> list[Row]:
        """Return the placements in order: first those that reach the goodput, then by worth. Those that are as good as
        the best go by what is simpler to run, colocated nodes, pairs or a mix, and then by the time of a request."""
        reached = {row["placement"] for row in rows if self._goodput and row["good"] >= self._options.attain}
        most = max(self._worth(row) for row in rows if row["placement"] in reached or not reached)

        def place(row: Row) -> tuple[Any, ...]:
            worth = self._worth(row)
            is_same = worth >= (1 - SAME) * most
            kinds = row["load"].keys()
            order = ("colocated" in kinds and len(kinds) > 1, len(kinds), row["p50_e2el_ms"]) if is_same else (-worth,)
            return bool(reached) and row["placement"] not in reached, not is_same, *order, row["placement"]

        return sorted(rows, key=place)

    def _reasons(self, rows: Sequence[Row]) -> list[str]:
        best, worth = rows[0], self._worth(rows[0])
        found = [f"{best['placement']}: {self._told(best)}."]
        if self._goodput and best["good"] < self._options.attain:
            found.append(f"No placement has {self._options.attain:.0%} of its requests within the targets.")
        for family, kinds in (("pairs", {"prefill", "decode"}), ("colocated nodes", {"colocated"})):
            others = [row for row in rows if set(row["load"]) == kinds]
            if others and set(best["load"]) != kinds:
                other, ratio = others[0], self._worth(others[0]) / worth if worth else 1.0
                found.append(f"{ratio:.2f} of it with {family} only, {other['placement']}: {self._told(other)}.")
        same = [row["placement"] for row in rows[1:] if abs(self._worth(row) - worth) <= SAME * worth]
        if same:
            more = f" and {len(same) - 5} more" if len(same) > 5 else ""
            found.append(f"Within {SAME:.0%} of it, so as good as far as this can tell: {', '.join(same[:5])}{more}.")
        pairs = [row for row in rows[1:] if set(row["load"]) == {"prefill", "decode"}]
        for row in (best, *pairs[:1]):
            found += self._wasted(row)
        return found

    def _told(self, row: Row) -> str:
        text = f"{row['output_throughput']:,.0f} output tokens a second on {row['gpus']} GPUs"
        if self._goodput:
            text += f", {row['good']:.1%} of the requests good"
        return f"{text}, TTFT {row['p99_ttft_ms']:,.0f} ms and TPOT {row['p99_tpot_ms']:.1f} ms at the 99th percentile"

    def _wasted(self, row: Row) -> list[str]:
        """Say which nodes a placement leaves idle while others are at their limit."""
        busiest = max(row["load"], key=lambda kind: row["load"][kind])
        if row["load"][busiest] < FULL:
            return []
        return [
            f"{row['placement']} wastes its {kind} nodes: they do {load:.0%} of what they could, "
            f"while its {busiest} nodes do {row['load'][busiest]:.0%}."
            for kind, load in row["load"].items()
            if load < IDLE
        ]

    def _notes(self) -> list[str]:
        """Say what the rates leave open."""
        found = []
        rows = self._rates.decode_steps[-1][0]
        if self._rates.slots > 1.02 * rows:
            found.append(f"Steps of more than {rows:.0f} rows were not measured; their time continues the line.")
        if not self._rates.kv_tokens:
            found.append("KV room is taken as enough for all slots; kv_tokens limits it.")
        measured = self._measured
        if measured and measured.shares and measured.kv_tokens and self._options.kv_tokens is None:
            found.append("KV room is that of nodes that share a GPU; a node with a GPU of its own has more: kv_tokens.")
        if measured and measured.prompt_tokens and self._options.prefill_tokens_per_s is None:
            apart = measured.prompt_tokens / self._mean_prompt
            if not 0.8 < apart < 1.25:
                text = f"The prefill rate was measured with prompts of {measured.prompt_tokens:.0f} tokens"
                found.append(f"{text}, the workload's have {self._mean_prompt:.0f}.")
        return found


def _flexed(found: Simulated, colocated: int) -> Row:
    """Return how often a node began to take prompts only, and for which share of the run a colocated node took prompts
    only, or got prompts last, on average; None for what has no colocated node."""
    if found.flexed is None:
        return {"flexed": None, "prompts_only": None, "prompts_last": None}
    total_s = colocated * found.run.duration_s
    shares = {"prompts_only": found.flexed.prompts_only_s, "prompts_last": found.flexed.prompts_last_s}
    return {"flexed": found.flexed.times, **{name: part_s / total_s for name, part_s in shares.items()}}


def show(found: dict[str, Any]) -> None:
    """Print the rates, the table and the reasons."""
    console = tables.console()
    flexes = "flexed" in found["placements"][0]
    given = ", ".join(f"{name} {value}" for name, value in found["rates"].items())
    console.print(f"rates of a node: {given}", soft_wrap=True)
    good = [f"good/s, of all ({' '.join(f'{name}:{limit:g}' for name, limit in found['goodput'].items())})"]
    times = ["TTFT p50", "p99 ms", "TPOT p50", "p99 ms"]
    heads = ["GPUs", "tokens/s", *good * bool(found["goodput"]), *times, "load P, D, C"]
    table = tables.grid("placement", numbers=heads + ["prompts only, last"] * flexes)
    for row in found["placements"]:
        cells = [row["placement"], str(row["gpus"]), f"{row['output_throughput']:,.0f}"]
        if found["goodput"]:
            cells.append(f"{row['request_goodput']:.2f}, {row['good']:.1%}")
        cells += [f"{row[name]:,.1f}" for name in _LATENCIES[:4]]
        cells.append(" ".join(f"{row['load'][kind]:.0%}" if kind in row["load"] else "-" for kind in _KINDS))
        if flexes:
            parts = (row["prompts_only"], row["prompts_last"])
            cells.append("-" if row["flexed"] is None else f"{parts[0]:.0%} in {row['flexed']}, {parts[1]:.0%}")
        table.add_row(*cells, style="bold" if row["placement"] == found["advised"] else "")
    console.print(table)
    for line in [f"advised: {found['advised']}", *found["reasons"], *(f"note: {note}" for note in found["notes"])]:
        console.print(line, soft_wrap=True)
