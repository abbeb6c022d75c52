"""The handoff benchmark: `python -m tests.gpu.handoff [--model DIR] [--json PATH]`.

It first measures raw NIXL between two processes, on one GPU and, with two, from one to the other. Given a model, it
then measures reads through vLLM's connector between two engines, timed where they are made, and the handoff through a
running cluster. UCX refuses to read over cuda_ipc if NVML shows no NVLink, and NIXL then falls back to software
emulation over tcp. So each raw pair runs with UCX_CUDA_IPC_ENABLE_GET_ZCOPY unset and on; engines have it on, as nodes
do. Without a GPU it moves host memory. Prints a JSON line per measurement and a table. Exit code: 0, or 1 if a
measurement failed or a byte differed.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from corun import Client
from corun_bench import conditions
from corun_bench.nodes import Nodes, Topology, has_gpu, running
from tests.e2e.test_determinism import Case
from tests.gpu import connector_read
from tests.gpu.checks import Prompts
from tests.gpu.nixl_read import Pair, Shape, measure

ZCOPY = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
PAIR_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 120.0
READS = re.compile(r"KV reads of rank (\d+): (\{.*\})")
COLUMNS = ("what", "block", "order", "first_ms", "ms", "gb_per_s", "bytes_equal")


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """Measures how fast KV moves between two processes: raw, through vLLM's connector and through a cluster."""

    topology: tyro.conf.OmitArgPrefixes[Topology] = field(default_factory=lambda: Topology(model=""))
    raw: bool = True
    """Measure NIXL alone."""
    connector: bool = True
    """Measure reads of vLLM's connector, from the first prefill engine to the first decode engine; needs a model."""
    cluster: bool = True
    """Measure a running cluster; needs a model."""
    total_mib: int = 1024
    """The size of one raw read."""
    regions: int = 32
    """The number of regions that a raw read is spread over, as KV is over layers."""
    block_kib: tuple[int, ...] = (32, 64, 256, 4096)
    """The block sizes of the raw reads."""
    prompt_lengths: tuple[int, ...] = (2048, 6000)
    """The prompt lengths in tokens, through the connector and the cluster."""
    blocks: tuple[int, ...] = (512,)
    """Numbers of KV blocks to read through the connector as well."""
    repeats: int = 9
    """The number of repeats of each read through the connector, after the first read."""
    pause_ms: float = 10.0
    """The pause before each repeat, because handoffs come one by one."""
    at_once: int = 32
    """The number of prompts at once through the cluster."""
    logs: Path = Path("handoff-logs")
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for all results."""


def raw_pairs(gpus: int) -> list[Pair]:
    """Return the pairs to compare on this machine. Nodes see only their own GPU, so such pairs come first."""
    if not gpus:
        return [Pair(name="host memory", devices=("cpu", "cpu"))]
    zero = ("cuda:0", "cuda:0")
    pairs = [Pair(name="one GPU", devices=zero, visible=("0", "0"))]
    if gpus > 1:
        pairs.append(Pair(name="GPU 0 to 1", devices=zero, visible=("0", "1")))
        pairs.append(Pair(name="GPU 0 to 1, both visible", devices=("cuda:0", "cuda:1"), visible=("0,1", "0,1")))
    return [each for pair in pairs for each in (pair, replace(pair, name=f"{pair.name}, GET zcopy on", env=ZCOPY))]


def raw(options: Handoff) -> Iterator[dict[str, Any]]:
    region = options.total_mib * 2**20 // options.regions
    sizes = tuple(size * 1024 for size in options.block_kib if region % (size * 1024) == 0)
    shape = Shape(regions=options.regions, region_bytes=region, block_sizes=sizes)
    for pair in raw_pairs(len(conditions.smi("--query-gpu=index"))):
        try:
            for found in measure(pair, shape, PAIR_TIMEOUT_S):
                yield {"what": f"raw: {pair.name}", **found}
        except (RuntimeError, TimeoutError) as error:
            yield {"what": f"raw: {pair.name}", "error": str(error)}


def through_connector(options: Handoff) -> Iterator[dict[str, Any]]:
    sizes = options.prompt_lengths, options.blocks
    repeats = connector_read.Repeats(count=options.repeats, pause_s=options.pause_ms / 1e3)
    return connector_read.measure(options.topology, *sizes, repeats, options.logs)


def through_cluster(options: Handoff) -> Iterator[dict[str, Any]]:
    """Yield the times to the first token by length and concurrency, then the decode nodes' own figures of all reads."""
    with running(options.topology, options.logs, prefill_flags=()) as nodes:
        status = nodes.status()
        assert status is not None  # All nodes are ready.
        vocab = min(node.node.vocab_size for node in status.nodes)
        prompts = Prompts(vocab=vocab, model_len=min(node.node.max_model_len for node in status.nodes))
        with nodes.client(CALL_TIMEOUT_S) as client:
            warm = first_tokens(client, prompts.cases(1, 64, 64, 1, max_tokens=1), 1)
            yield {"what": "cluster: first request of all", "ms": milliseconds(warm)}
            for length in options.prompt_lengths:
                yield from _timed(client, prompts, length, options.at_once)
        nodes.stop()
        yield from figures(nodes)


def _timed(client: Client, prompts: Prompts, length: int, at_once: int) -> Iterator[dict[str, Any]]:
    made = prompts.cases(at_once, length, length, length, max_tokens=1)
    shown = len(made[0][0])
    for together in (1, at_once):
        began = time.perf_counter()
        times = first_tokens(client, made[: 8 if together == 1 else None], together)
        seconds = time.perf_counter() - began
        what = f"cluster: first token of {shown}, {together} at once"
        rate = {"prompts": len(times), "prompt_tokens_per_s": round(len(times) * shown / seconds)}
        yield {"what": what, "ms": milliseconds(times), "worst_ms": round(max(times) * 1e3, 1), **rate}


def first_tokens(client: Client, cases: list[Case], concurrency: int) -> list[float]:
    """Return the seconds from the request to the first token, for each prompt."""

    def one(case: Case) -> float:
        began = time.perf_counter()
        client.generate(case[0], case[1], seed=case[2])
        return time.perf_counter() - began

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, cases))


def milliseconds(times: list[float]) -> float:
    return round(statistics.median(times) * 1e3, 1)


def figures(nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Yield each decode node's figures of all reads, by rank. A read is timed until an engine step notices its end."""
    for node in nodes.topology.nodes:
        if node.module == "decode_node":
            for rank, totals in logged_reads(nodes.processes.log(node.name)).items():
                yield {"what": f"cluster: KV reads of {node.name}, rank {rank}", **read_figures(totals)}


def logged_reads(log: str) -> dict[str, dict[str, float]]:
    """Return the sums of a decode node's log lines on KV reads, by rank. Each line has the reads since the last one."""
    ranks: dict[str, dict[str, float]] = {}
    for rank, text in READS.findall(log):
        totals = ranks.setdefault(rank, {})
        for name, value in re.findall(r"'(\w+)': ([\d.e+-]+)", text):
            totals[name] = totals.get(name, 0.0) + float(value)
    return ranks


def read_figures(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the sums, and their averages for one read."""
    count, seconds, size = (values.get(name, 0.0) for name in ("count", "seconds", "bytes"))
    shown: dict[str, Any] = {name: round(value, 6) for name, value in values.items()}
    if count and seconds:
        shown |= {"ms": round(seconds / count * 1e3, 3), "gb_per_s": round(size / seconds / 1e9, 2)}
    return shown


def show(results: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS, "", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in results:
        rest = ", ".join(f"{name} {value}" for name, value in one.items() if name not in COLUMNS)
        table.add_row(*(str(one.get(column, "")) for column in COLUMNS), rest)
    Console(highlight=False, markup=False, width=160).print(table)


def parts(options: Handoff) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the measurements by name. None begins before it is iterated."""
    found = {"raw": raw(options)} if options.raw else {}
    if options.topology.model:
        found |= {"connector": through_connector(options)} if options.connector else {}
        found |= {"cluster": through_cluster(options)} if options.cluster else {}
    return found


def main(options: Handoff) -> int:
    results: list[dict[str, Any]] = []
    print(json.dumps({"versions": conditions.versions(), "hardware": conditions.hardware()}), flush=True)
    for name, part in parts(options).items():
        try:
            for found in part:
                results.append(found)
                print(json.dumps(found), flush=True)
        except Exception as error:  # The results so far are worth showing.
            results.append({"what": name, "error": f"{type(error).__name__}: {error}"})
            print(json.dumps(results[-1]), flush=True)
    show(results)
    if options.json is not None:
        facts = {"versions": conditions.versions(), "hardware": conditions.hardware()}
        options.json.write_text(json.dumps({**facts, "has_gpu": has_gpu(), "results": results}, indent=1) + "\n")
    return int(any("error" in one or one.get("bytes_equal") is False for one in results))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Handoff)))
