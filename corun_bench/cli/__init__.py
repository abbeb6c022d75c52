"""The commands `corun bench …`: their options and what they print. The entry point `corun.commands` plugs them in."""

from __future__ import annotations

from typing import Any

from corun_bench.cli.compare import Compare
from corun_bench.cli.kernels import Kernels
from corun_bench.cli.report import Report
from corun_bench.cli.router import RouterBench
from corun_bench.cli.run import Bench
from corun_bench.cli.serve import BenchServe

COMMANDS: dict[str, type[Any]] = {
    "bench": Bench,
    "bench compare": Compare,
    "bench report": Report,
    "bench kernels": Kernels,
    "bench router": RouterBench,
    "bench serve": BenchServe,
}
