"""The commands `corun bench …`: their help, and what they print. The entry point `corun.commands` plugs them in.

A bare install has this module and not what measures, so each command imports its work when it runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from corun.cli.options import unset
from corun.config.extras import load
from corun.errors import InvalidArgumentError
from corun.records.rows import to_line
from corun_bench import compare, results
from corun_bench.options import BenchOptions, CapacityOptions, KernelOptions, PlanOptions


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    """Measure systems side by side, and compare their bits.

    All systems get the same model, prompts and GPUs, and one client loop drives them all.

    examples:
      corun bench                                             the tiny model on this machine's CPU
      corun bench --model /models/qwen3 --gpus 0 --systems std,bi,cluster:colocated,cluster --workloads paper
      corun bench --model /models/qwen3 --gpus 0 1 --systems std,pd-std,cluster:1p1d,cluster:shared
      corun bench --systems --url http://127.0.0.1:8000       any OpenAI-compatible server
      corun bench compare a.json b.json                       two results
      corun bench report result.json -o report                pictures and a page
      corun bench kernels | router                            kernels of this device, capacity of a router
      corun bench plan in=512,out=256 --num-gpus 8 …          how many nodes of which kind a workload needs
      corun bench serve --base-url http://127.0.0.1:8000 …    vLLM's own client, vllm bench serve

    Systems: std (stock vLLM), bi (its batch-invariant mode; GPU only), pd-std (stock prefill and decode over NIXL),
    cluster (this project). Ablations, one engine per GPU without a cluster: colocated (the paper's CoRun),
    colocated+ladder (with smaller decode steps where they give the same bits), std+nosplit, std+isolated. A placement
    follows a colon: cluster:1p1d, cluster:2p2d, cluster:shared (a pair on every GPU), cluster:colocated (a colocated
    node on every GPU), cluster:1p1d1c (a mix); a second colon sets the slots: cluster:1p1d:512.

    Workloads: in=512,out=256; burstgpt, sharegpt, blazedit (samples of their shape made for this project, or =FILE);
    rl=32x8,in=512,out=256 (prompts x samples); paper (the paper's six). Every request generates all its tokens
    (ignore_eos).

    Ctrl-C ends all processes and keeps what was measured. Exit codes: 0 ok, 1 something could not be measured,
    2 nothing was started, 130 interrupted.
    """

    def run(self) -> int:
        code: int = load("corun_bench.benchmark", "corun bench", "cpu").run(self)
        return code


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two result files of corun bench.

    The table has a row for each workload, load and system. Numbers are medians over repeats. The range behind a ratio
    goes from the worst pair of repeats to the best. A ratio whose range contains 1 shows no difference.

    examples:
      corun bench compare monday.json tuesday.json
      corun bench compare --json monday.json tuesday.json
    """

    first: tyro.conf.Positional[Path]
    """Result file a."""
    second: tyro.conf.Positional[Path]
    """Result file b; ratios are b / a."""
    json: bool = False
    """Print only the JSON line."""

    def run(self) -> int:
        comparison = compare.compare(results.read(self.first), results.read(self.second))
        if not self.json:
            compare.show(comparison)
        print(to_line(comparison))
        return 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write results up as one HTML page with figures.

    The figures are also written as files. Several result files are merged; they must have the same model, and each
    system must run on the same number of GPUs in all of them.

    examples:
      corun bench report results.json -o report                   report/report.html, report/figures/*.png and *.svg
      corun bench report one.json two.json kernels.json -o report
      corun bench report results.json -o report --baseline bi     ratios against another system than std
    """

    files: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")]]
    """Result files of corun bench, and of corun bench kernels."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Directory to write to; it is made if it does not exist."""
    baseline: str = ""
    """System that the others are compared with; by default std, or the first system where there is no std."""

    def run(self) -> int:
        if not self.files:
            raise InvalidArgumentError("files", "none", "must be at least one result file")
        report = load("corun_bench.report", "corun bench report", "bench")
        read = {str(path): results.read(path, (results.SCHEMA, results.KERNELS_SCHEMA)) for path in self.files}
        for path in report.write(results.merge(read), self.output, baseline=self.baseline):
            print(path)
        return 0


@dataclass(frozen=True, kw_only=True)
class OneLine:
    """A command whose last line of output is its result as JSON."""

    output: Annotated[Path | None, unset(Path, "PATH", aliases=["-o"])] = None
    """File to write the JSON line to, as well."""

    def finish(self, result: dict[str, Any]) -> None:
        print(line := json.dumps(result))
        if self.output is not None:
            self.output.write_text(line + "\n", encoding="utf-8")


def _say(text: str) -> None:
    """Print a line of progress on stderr, above a bar if there is one."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Kernels(KernelOptions, OneLine):
    """Measure the time and the batch invariance of kernels.

    A kernel is batch-invariant if a row's bits do not depend on the batch that it is computed in, and
    position-invariant if they do not depend on the row's place in the batch.

    examples:
      corun bench kernels                                        the built-in tiny model's shapes
      corun bench kernels --model /models/Qwen3-8B -o kernels.json
      corun bench kernels --kernels matmul --rows 1 256

    The exit code is 1 if a kernel failed. A kernel that the device does not have is listed, and is not a failure.
    """

    def run(self) -> int:
        kernels = load("corun_bench.kernels.run", "corun bench kernels", "gpu")
        report = kernels.measure(self, _say)
        kernels.show(report)
        self.finish(report)
        return 1 if any(row["error"] for row in report["kernels"]) else 0


@dataclass(frozen=True, kw_only=True)
class RouterBench(CapacityOptions, OneLine):
    """Measure a router's capacity and the delay it adds.

    Capacity is in tokens per second; the delay is how much later clients get their tokens. The command runs real
    routers with fake nodes, whose engines compute nothing and emit steps at a given rate, and with clients that keep
    every slot in use; all on this machine's cores. The router's delays are compared with those of the same load
    without a router, over a bare gRPC stream for each sample. Prints the conditions, a table and one JSON line.

    examples:
      corun bench router                          two decode nodes of 256 slots, a step every 30 ms
      corun bench router --sweep 1 2 3 4          one decode node, then two, until there are too many
      corun bench router --sweep-routers 1 2      one router, then two at the same nodes
      corun bench router --repeats 5 -o cap.json  medians of five

    The exit code is 1 if one of several numbers could not be measured.
    """

    sweep: tuple[int, ...] = ()
    """Numbers of decode nodes to measure one after the other, to find how many the routers carry."""
    sweep_routers: tuple[int, ...] = ()
    """Numbers of routers to measure one after the other, each with all numbers of decode nodes."""

    def run(self) -> int:
        capacity = load("corun_bench.capacity", "corun bench router", "router")
        if self.sweep or self.sweep_routers:
            routers, decode_nodes = self.sweep_routers or (self.routers,), self.sweep or (self.decode_nodes,)
            result = capacity.sweep(self, routers, decode_nodes)
        else:
            result = capacity.measure(self)
        capacity.show(result)
        self.finish(result)
        return 1 if result.get("failures") else 0


@dataclass(frozen=True, kw_only=True)
class Plan(PlanOptions, OneLine):
    """Advise how many prefill, decode and colocated nodes a workload needs.

    Simulates the placements that fit on a number of GPUs, with the router's own choice of nodes and with the measured
    rates of a node, and advises the one with the most output tokens or, with targets, the most good requests. Without a
    number of GPUs it seeks the fewest that reach the targets at a request rate. Prints a table, the reason and one JSON
    line. A placement is written as 2p1d (prefill and decode nodes), 3c (colocated nodes) or 1p1d2c.

    Rates come from a result of corun bench, or from options; none has a default. The system that is measured may have
    any placement. How long KV takes from GPU to GPU shows only where prefill and decode have GPUs of their own.

    examples:
      corun bench --model DIR --gpus 0 1 --systems cluster:1p1d -o measured      measure the rates first
      corun bench plan in=512,out=256 --measured measured/result.json --num-gpus 8
      corun bench plan burstgpt --measured measured/result.json --request-rate 40 --goodput ttft:500 tpot:30
      corun bench plan in=512,out=256 --num-gpus 2 --prefill-tokens-per-s 40000 --decode-step-ms 44:6.5 256:15.1
          --handoff-us-per-token 3.4 --slots 256
    """

    def run(self) -> int:
        planner = load("corun_bench.plan", "corun bench plan", "bench")
        found = planner.plan(self, _say)
        planner.show(found)
        self.finish(found)
        return 0


@dataclass(frozen=True)
class BenchServe:
    """Measure a gateway with vLLM's own client.

    The options are those of `vllm bench serve`; --help=all lists them. The command `vllm` itself does not start where
    vLLM is installed for CPUs, because that distribution has another name.

    examples:
      corun bench serve --base-url http://127.0.0.1:8000 --dataset-name random --random-output-len 64 --ignore-eos
    """

    PASSES_ON: ClassVar = True
    """The command line passes every word on unchanged, because the options are vLLM's."""

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of `vllm bench serve`, passed on unchanged."""

    def run(self) -> int:
        serve = load("vllm.benchmarks.serve", "corun bench serve", "cpu")
        arguments = load("vllm.utils.argparse_utils", "corun bench serve", "cpu")
        parser = arguments.FlexibleArgumentParser(prog="corun bench serve")
        serve.add_cli_args(parser)
        serve.main(parser.parse_args(list(self.words)))
        return 0


COMMANDS: dict[str, type[Any]] = {
    "bench": Bench,
    "bench compare": Compare,
    "bench report": Report,
    "bench kernels": Kernels,
    "bench router": RouterBench,
    "bench plan": Plan,
    "bench serve": BenchServe,
}
