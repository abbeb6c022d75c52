"""The verification suite: start a cluster on a model, compare bits, stop it, and run stock vLLM as the control.

`python -m tests.gpu.suite --model DIR [--prefill-gpus 0] [--decode-gpus 0] [--colocated-gpus 0] [--json PATH]`, where
colocated nodes alone take the place of a pair. The first check is the paper's (Section V-B): 32 prompts, temperature
0.6, seed 42, alone and in a batch of 32. Prints a JSON line per result, one digest over all outputs, and a table. Exit
code: 0 if every bit agreed, 3 if one did not, 1 if something was not checked.

`--freedoms all|none|rows|packed|chunks|cached|mixed` says what the nodes may do to be faster. All of these must give
the same bits, from a pair and from colocated nodes: run one with `--json FILE`, and each other one with
`--same-bits-as FILE`.

Owns the course of a run and its time: no check may use up the time of the others, and all results so far are on disk at
any moment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from corun import Client, ClusterStatus, SamplingParams
from corun.processes import descendants, end_tree
from corun_bench import conditions
from corun_bench.nodes import has_gpu
from tests.e2e.stock import FOR_ALL, results_of
from tests.e2e.test_determinism import Case
from tests.gpu.checks import BY_NAME, CHECKS, EACH, RAGGED, Bench, Check, Found, Prompts
from tests.gpu.outputs import Outputs
from tests.gpu.report import Outcome, Report
from tests.nodes import Nodes, Topology, running

STOP_S = 25.0
"""The time set aside for ending the cluster."""
HANG_S = 45.0
"""A run that exceeds its time by this much is ended by force."""
LEAST_S = 8.0
"""With less time than this, the control is not begun."""
LOG_LINES = re.compile(
    r"self-test|certif|digest|KV reads|GB/s|\bGiB\b|\bMiB\b|graph captur|torch\.compile took|loading weights",
    re.IGNORECASE,
)
MAX_LOG_LINES = 60
MAX_LINE = 300
CONTROL = "stock vLLM: {}, alone and all at once"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Compares every bit of a cluster's output under conditions that must not matter."""

    topology: tyro.conf.OmitArgPrefixes[Topology]
    checks: tuple[Literal[tuple(BY_NAME)], ...] = ()  # type: ignore[valid-type]
    """Checks to run, in their own order; by default all."""
    skip: tuple[Literal[tuple(BY_NAME)], ...] = ()  # type: ignore[valid-type]
    """Checks not to run."""
    stock: Literal["after", "before", "only", "off"] = "after"
    """When stock vLLM runs the prompts of some checks, as the control, which must differ; only: without a cluster."""
    stock_limit_s: float = 200.0
    """The limit for stock vLLM to start and run."""
    time_limit_s: float = 560.0
    """The limit for everything; checks that would not fit any more are skipped."""
    scale: float = 1.0
    """A factor for the numbers of prompts."""
    long_output: int = 2048
    """The number of tokens of a long output."""
    logs: Path = Path("suite-logs")
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for all results."""
    same_bits_as: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """The --json file of an earlier run of the same model, whose outputs must have had the same bits."""

    @property
    def chosen(self) -> list[Check]:
        return [check for check in CHECKS if check.name in (self.checks or BY_NAME) and check.name not in self.skip]


class Run:
    """One run of the suite."""

    def __init__(self, options: Suite) -> None:
        self.options = options
        self.report = Report(options.json)
        self._began = time.monotonic()
        self._outputs = Outputs()
        self._memory: dict[str, Any] = {}

    @property
    def left_s(self) -> float:
        return self.options.time_limit_s - (time.monotonic() - self._began)

    def all(self) -> None:
        """Run the cluster and the control; an error in one does not stop the other."""
        facts = {"versions": conditions.versions(), "hardware": conditions.hardware(), "command": sys.argv[1:]}
        self.report.keep(**facts, topology=asdict(self.options.topology))
        if self.options.stock in ("before", "only"):
            self.control()
        if self.options.stock == "only":
            return
        try:
            self.cluster()
        except Exception as error:
            self.report.add(Outcome(name="the cluster", error=f"{type(error).__name__}: {error}"))
            print(error, file=sys.stderr)  # all of it: the log of a node that did not start
        if self.options.stock == "after":
            self.control()

    def cluster(self) -> None:
        """Start the cluster, run the checks, and stop it."""
        asked = self.options.topology
        topology = replace(asked, start_timeout_s=max(1.0, min(asked.start_timeout_s, self.left_s - STOP_S)))
        self._note_memory("before")
        try:
            with running(topology, self.options.logs, on_up=self._note_memory) as nodes:
                status = nodes.status()
                assert status is not None  # The router has just said that all nodes are ready.
                self.report.say(ready_s=round(time.monotonic() - self._began, 1), start_s=nodes.seconds)
                self.report.keep(fingerprint=status.fingerprint, contracts=contracts(status))
                for check in self.options.chosen:
                    self.check(check, nodes)
                    self.report.keep(outputs=self._outputs.found)  # A run that is ended early can be compared, too.
                self.drawn()
                self._note_memory("at the end", nodes)
                self.report.say(start_s=nodes.seconds, exit_codes=nodes.stop())
        finally:
            self.report.keep(log_lines=log_lines(self.options.logs.glob("*.log")))

    def drawn(self) -> None:
        """Tell the digest of all outputs, and compare them with those of an earlier run."""
        found = self._outputs
        self.report.say(bits=found.digest, cases=len(found.found), tokens=found.tokens)
        if (earlier := self.options.same_bits_as) is not None:
            for outcome in found.against(json.loads(earlier.read_text())["conditions"]["outputs"]):
                self.report.add(outcome)

    def check(self, check: Check, nodes: Nodes) -> None:
        """Run one check within its limit; its errors are its result."""
        limit = min(check.limit_s, self.left_s - self._reserve_s)
        if limit < check.least_s:
            self.report.add(Outcome(name=check.name, skipped="no time left"))
            return
        began = time.monotonic()
        client = nodes.client(timeout_s=limit)
        timer = after(limit, client.close)
        try:
            self._add(check.run(self._bench(nodes, client, began + limit)))
        except Exception as error:  # One check must not stop the others.
            spent = time.monotonic() - began
            over = f" (its {limit:.0f} s were over)" if spent >= limit else ""
            self.report.add(Outcome(name=check.name, error=f"{type(error).__name__}: {error}{over}", seconds=spent))
        finally:
            timer.cancel()
            client.close()

    def control(self) -> None:
        """Run stock vLLM in a process of its own, on the prompts of some checks."""
        limit = min(self.left_s - 5.0, self.options.stock_limit_s)
        sets = stock_sets(self.options.topology)
        found, error, skipped = dict[str, dict[str, Any]](), "", "no time left" if limit < LEAST_S else ""
        if not skipped:
            found, error = self._stock(sets, limit)
        for name in sets:
            detail = found.get(name, {})
            shared = {"total": detail.pop("prompts", 0), "equal": detail.pop("equal", 0), "skipped": skipped}
            shared |= {"seconds": detail.pop("seconds", 0.0), "error": "" if name in found else error}
            self.report.add(Outcome(name=CONTROL.format(name), must_differ=True, **shared, detail=detail))

    @property
    def _reserve_s(self) -> float:
        return STOP_S + (self.options.stock_limit_s if self.options.stock == "after" else 0.0)

    def _bench(self, nodes: Nodes, client: Client, deadline: float) -> Bench:
        return Bench(
            nodes=nodes,
            client=client,
            status=client.get_cluster(),
            deadline=deadline,
            scale=self.options.scale,
            long_output=self.options.long_output,
            outputs=self._outputs,
        )

    def _add(self, results: Iterator[Found]) -> None:
        began = time.monotonic()
        for found in results:
            if isinstance(found, Outcome):
                self.report.add(replace(found, seconds=time.monotonic() - began))
            else:
                self.report.say(**found)
            began = time.monotonic()

    def _note_memory(self, moment: str, nodes: Nodes | None = None) -> None:
        self._memory[moment] = conditions.gpu_memory({} if nodes is None else nodes.processes.owners())
        self.report.keep(gpu_memory=self._memory)

    def _stock(self, sets: dict[str, list[Case]], limit_s: float) -> tuple[dict[str, dict[str, Any]], str]:
        """Run stock vLLM and return its results by set, and why some are missing; leave no process."""
        topology, log = self.options.topology, self.options.logs / "stock.log"
        self.options.logs.mkdir(parents=True, exist_ok=True)
        cases = self.options.logs / "cases.json"
        cases.write_text(json.dumps({name: [for_stock(*case) for case in made] for name, made in sets.items()}))
        flags = ["--cases", str(cases), "--max-model-len", str(topology.max_model_len)]
        flags += ["--tensor-parallel-size", str(topology.tensor_parallel_size)]
        gpus = topology.nodes[-1].gpus
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if has_gpu() else {})
        with log.open("wb") as sink:
            command = [sys.executable, "-m", "tests.e2e.stock", topology.model, *flags]
            process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)
        code: int | str
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = "its time"
        finally:
            tree = descendants(process.pid)
            process.kill()
            process.wait()
            end_tree(tree, step_s=1.0)
        text = log.read_text(errors="replace")
        return results_of(text), f"it ended with {code}: {text[-1500:]}"


def stock_sets(topology: Topology) -> dict[str, list[Case]]:
    """Return the prompts that stock vLLM runs, by the name of the check that runs them on the cluster."""
    config = json.loads((Path(topology.model) / "config.json").read_text())  # There is no cluster to ask.
    prompts = Prompts(vocab=config["vocab_size"], model_len=topology.max_model_len)
    edges = prompts.edges(topology.chunk_size, ())
    return {"paper": prompts.paper(), "mixed": prompts.styles(EACH), "edges": edges, "ragged": prompts.ragged(RAGGED)}


def for_stock(prompt: list[int], params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return a case as stock vLLM's runner reads it."""
    both = ((field.name, getattr(params, field.name), field.default) for field in fields(params))
    given = {name: value for name, value, default in both if value != default and name not in FOR_ALL}
    biases = {"logit_bias": dict(params.logit_bias)} if params.logit_bias else {}
    return {"prompt": prompt, "seed": seed, "params": given | biases}


def contracts(status: ClusterStatus) -> dict[str, Any]:
    """Return the contract of the first node of each role."""
    return {node.node.role.value: json.loads(node.node.contract_json) for node in reversed(status.nodes)}


def log_lines(logs: Iterable[Path], pattern: re.Pattern[str] = LOG_LINES) -> dict[str, list[str]]:
    """Return the lines of each log about certification, digests, KV reads and memory, each line once."""
    found = {}
    for path in sorted(logs):
        lines = path.read_text(errors="replace").splitlines()
        kept = dict.fromkeys(line.strip()[:MAX_LINE] for line in lines if pattern.search(line))
        found[path.stem] = list(kept)[:MAX_LOG_LINES]
    return found


def after(seconds: float, act: Callable[[], None]) -> threading.Timer:
    """Call `act` in a thread after this many seconds unless it is cancelled; the thread keeps no process alive."""
    timer = threading.Timer(max(0.0, seconds), act)
    timer.daemon = True
    timer.start()
    return timer


def give_up(report: Report) -> None:
    """The last resort against a hang: end every process; the results so far are on disk."""
    report.add(Outcome(name="the suite", error="it did not end in time"))
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


def main(options: Suite) -> int:
    run = Run(options)
    watchdog = after(options.time_limit_s + HANG_S, lambda: give_up(run.report))
    run.all()
    watchdog.cancel()
    run.report.save()
    run.report.show()
    print(json.dumps({"exit_code": run.report.exit_code, "seconds": round(options.time_limit_s - run.left_s, 1)}))
    return run.report.exit_code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Suite)))
