"""The options of `corun bench`, their limits, and where its result goes. Must not know how anything is measured."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from corun.cli.options import OptionalPath
from corun.errors import InvalidArgumentError
from corun.params import check_seed

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What `corun bench` measures, how and how often. The command's help is in `corun_bench.cli.run`."""

    model: str = "tiny"
    """Directory of a checkpoint; "tiny" is built in."""
    systems: tuple[str, ...] = ("std,colocated,cluster",)
    """Systems to measure, separated by commas or spaces."""
    workloads: tuple[str, ...] = ("in=512,out=256",)
    """Workloads to run on each."""
    url: tuple[str, ...] = ()
    """OpenAI-compatible servers to measure as well."""
    url_model: str = ""
    """Name of the model that those servers serve; by default the first that each lists."""
    gpus: tuple[int, ...] = ()
    """GPUs of every system; none: the CPU."""
    tensor_parallel_size: int = 1
    """GPUs of each engine."""
    slots: int = 256
    """Decode slots of engines with fixed shapes."""
    chunk_size: int = 2048
    """Prompt tokens of one prefill step of this project's engines."""
    max_model_len: int = 8192
    """Most tokens of one request, prompt and output together."""
    kv_cache_gib: int = 1
    """KV cache of each engine on a CPU, in GiB."""
    num_prompts: int = 300
    """Requests of each run."""
    num_warmups: int = 16
    """Warm-up requests before the first run of a workload; their times do not count."""
    repeats: int = 3
    """Runs of each workload; each run has other prompts."""
    max_concurrency: tuple[int, ...] = (256,)
    """Requests in flight; several values give a scaling curve."""
    request_rate: float = math.inf
    """Requests a second; inf: a closed loop that sends the next when one ends."""
    burstiness: float = 1.0
    """Burstiness of an open loop's gaps: 1 is Poisson, less is burstier."""
    seed: int = 0
    """Seed of prompts, arrivals and requests."""
    logprobs: bool = False
    """Ask every system for log probabilities in the timed runs as well."""
    metric_percentiles: str = "50,90,99"
    """Percentiles of TTFT, TPOT, ITL and end-to-end time."""
    goodput: tuple[str, ...] = ()
    """Limits in ms that a good request keeps, as in ttft:200 tpot:50."""
    mismatch_requests: int = 32
    """Requests of each workload that are run again among other requests and compared; 0: none."""
    mismatch_tokens: int = 64
    """Tokens of each of these requests that are compared."""
    padding: tuple[int, ...] = ()
    """Numbers of rows of a decode step to try for a single request, as in 1 8 64 256."""
    timeout_s: float = 600.0
    """Longest time for one run, in seconds; a request that is not done by then has failed."""
    output: Annotated[OptionalPath, tyro.conf.arg(aliases=["-o"])] = None
    """Directory for result.json, logs, pictures and the page; it must not hold a result yet.
    By default a new directory is made, and its path is printed."""
    save_result: bool = False
    """Write a file per run as well, with the keys of vllm bench serve."""


def options_of(bench: BenchOptions) -> dict[str, Any]:
    """Return the options that need no further reading; raises InvalidArgumentError for a value out of range."""
    positive = ("num_prompts", "repeats", "slots", "chunk_size", "max_model_len", "tensor_parallel_size")
    for name in (*positive, "kv_cache_gib", "mismatch_tokens"):
        if getattr(bench, name) < 1:
            raise InvalidArgumentError(name, getattr(bench, name), "must be at least 1")
    for name in ("num_warmups", "mismatch_requests"):
        if getattr(bench, name) < 0:
            raise InvalidArgumentError(name, getattr(bench, name), "must be at least 0")
    for value in (*bench.max_concurrency, *bench.padding):
        if value < 1:
            raise InvalidArgumentError("max_concurrency, padding", value, "must be at least 1")
    check_seed(bench.seed)
    for name in ("request_rate", "burstiness", "timeout_s"):
        if not getattr(bench, name) > 0:
            raise InvalidArgumentError(name, getattr(bench, name), "must be above 0")
    same = ("num_prompts", "num_warmups", "repeats", "max_concurrency", "request_rate", "burstiness", "seed")
    names = (*same, "logprobs", "mismatch_requests", "mismatch_tokens", "padding", "timeout_s", "url_model")
    return {name: getattr(bench, name) for name in names}


def output_directory(bench: BenchOptions) -> Path:
    """Return the directory; make it if needed. Raises InvalidArgumentError if it holds a result already."""
    found = bench.output or Path(tempfile.mkdtemp(prefix="corun-bench-"))
    if found.exists() and not found.is_dir():
        raise InvalidArgumentError("output", str(found), "must be a directory")
    if (found / RESULT).exists():
        raise InvalidArgumentError("output", str(found), f"has a {RESULT} already; name another directory")
    found.mkdir(parents=True, exist_ok=True)
    return found
