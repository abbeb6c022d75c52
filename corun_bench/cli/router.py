"""`corun bench router`: a router's capacity and the delay it adds. `corun_bench.router.capacity` does the work."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from corun.config.extras import needs_extra

_COLUMNS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """Measure a router's capacity and the delay it adds.

    Capacity is in tokens per second; the delay is how much later clients get their tokens. The command runs real
    routers with fake nodes, whose engines compute nothing and emit steps at a given rate, and with clients that keep
    every slot in use; all on this machine's cores. The router's delays are compared with those of the same load
    without a router, over a bare gRPC stream for each sample. Prints the conditions, a table and one JSON line.

    examples:
      corun bench router                          two decode nodes of 256 slots, a step every 30 ms
      corun bench router --search                 add one decode node at a time, until there are too many
      corun bench router --repeats 5 -o cap.json  medians of five
    """

    decode_nodes: int = 2
    """Fake decode nodes. Their steps differ a little in length, so that they coincide from time to time."""
    slots: int = 256
    """Slots of each decode node; all of them are in use."""
    step_ms: float = 30.0
    """Length of a step, in milliseconds."""
    seconds: float = 20.0
    """How long each path is measured, in seconds."""
    output_tokens: int = 256
    """Tokens of each sample."""
    prompt_tokens: int = 64
    """Tokens of each prompt."""
    client_processes: int = 1
    """Processes that the clients are spread over."""
    processes: int = 1
    """Router processes, each on a port of its own; the clients are spread over them."""
    repeats: int = 1
    """How often both paths are measured, in turn; the figures are medians."""
    ramp_s: float = 4.0
    """Seconds over which the first samples are sent."""
    warmup_s: float = 3.0
    """Seconds after the ramp before anything counts."""
    search: bool = False
    """Find how many decode nodes the router carries: add one at a time until the router is too slow."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PATH")] = None
    """File to write the JSON line to, as well."""

    def run(self) -> int:
        with needs_extra("corun bench router", "router"):
            capacity = importlib.import_module("corun_bench.router.capacity")
        names = capacity.Setup.__dataclass_fields__
        setup = capacity.Setup(**{name: getattr(self, name) for name in names})
        result = capacity.search(setup) if self.search else capacity.measure(setup)
        print("\n".join(report(result)))
        line = json.dumps(result)
        print(line)
        if self.output is not None:
            self.output.write_text(line + "\n", encoding="utf-8")
        return 0


def report(result: Mapping[str, Any]) -> list[str]:
    """Return the conditions and the table as lines of text."""
    given = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    lines = [f"conditions: {given}"]
    for run in result.get("searched", (result,)):
        lines += _table(run)
    if "searched" in result:
        lines.append(f"carried: {result['carried_decode_nodes']} decode nodes")
    return lines


def _table(run: Mapping[str, Any]) -> list[str]:
    setup, router = run["conditions"], run["router"]
    head = f"{'':8}{'tokens/s':>10}" + "".join(f"{name + ' ms':>10}" for name in _COLUMNS) + f"{'TTFT p99':>10}"
    lines = [f"{setup['decode_nodes']} x {setup['slots']} slots, a step of {setup['step_ms']:g} ms", head]
    lines += [_row(path, run[path]) for path in ("router", "direct")]
    lines.append(f"{'added':8}{'':10}" + "".join(f"{run['added_ms'][name]:>10.2f}" for name in _COLUMNS))
    cpu = ", ".join(f"{kind} {1000 * value:.1f}" for kind, value in router["cpu_s_per_1000_tokens"].items())
    lines.append(f"CPU ms per 1000 tokens: {cpu}; router RSS {router['rss_mib']['router']:.0f} MiB")
    wrong = f"{router['wrong']} of {router['samples']} samples wrong"
    verdict = "carried" if run["carried"] else "not carried"
    return [*lines, f"{verdict}: {wrong}, goal {run['goal_ms']:g} ms added up to p99"]


def _row(path: str, figures: Mapping[str, Any]) -> str:
    delays = "".join(f"{figures['latency_ms'][name]:>10.2f}" for name in _COLUMNS)
    return f"{path:8}{figures['tokens_per_s']:>10.0f}{delays}{figures['ttft_ms']['p99']:>10.1f}"
