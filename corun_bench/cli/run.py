"""`corun bench`: systems side by side. The work is `corun_bench`, which needs the packages of a node and some more."""

from __future__ import annotations

import importlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from corun.cli.options import OptionalPath
from corun.config.extras import needs_extra
from corun.errors import InvalidArgumentError
from corun.params import check_seed

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure systems side by side, and compare their bits.

    All get the same model, prompts and GPUs, and are driven by one client loop.

    examples:
      corun bench                                             the tiny model on this machine's CPU
      corun bench --model /models/qwen3 --gpus 0 --systems std,bi,colocated,cluster --workloads paper
      corun bench --model /models/qwen3 --gpus 0 1 --systems std,pd-std,cluster:1p1d,cluster:shared
      corun bench --systems --url http://127.0.0.1:8000       any OpenAI-compatible server
      corun bench compare a.json b.json                       two results
      corun bench report result.json -o report                pictures and a page
      corun bench kernels | router                            kernels of this device, capacity of a router
      corun bench serve --base-url http://127.0.0.1:8000 …    vLLM's own client, vllm bench serve

    Systems: std (stock vLLM), bi (its batch-invariant mode; GPU only), colocated (the paper's CoRun in one engine),
    colocated+ladder (with smaller decode steps where they give the same bits), pd-std (stock prefill and decode over
    NIXL), cluster (this project), std+nosplit and std+isolated (steps of the ablation). The placement of a pair follows
    a colon: cluster:1p1d, cluster:2p2d, cluster:shared (both on every GPU); a second colon sets its slots:
    cluster:1p1d:512. All others run one engine per GPU.

    Workloads: in=512,out=256; burstgpt, sharegpt, blazedit (samples of their shape made for this project, or =FILE);
    rl=32x8,in=512,out=256 (prompts x samples); paper (its six). Every request draws all its tokens (ignore_eos).

    Ctrl-C ends all processes and keeps what was measured. Exit codes: 0 ok, 1 something could not be measured,
    2 nothing was started, 130 interrupted.
    """

    model: str = "tiny"
    """Directory of a checkpoint; "tiny" is built in."""
    systems: tuple[str, ...] = ("std,colocated,cluster",)
    """Systems to measure, separated by commas or spaces."""
    workloads: tuple[str, ...] = ("in=512,out=256",)
    """Workloads to run on each."""
    url: tuple[str, ...] = ()
    """OpenAI-compatible servers to measure as well."""
    url_model: str = ""
    """Name of the model that those serve; by default their first."""
    gpus: tuple[int, ...] = ()
    """GPUs of every system; none: the CPU."""
    tensor_parallel_size: int = 1
    """GPUs of each engine."""
    slots: int = 256
    """Decode slots of engines with fixed shapes."""
    chunk_size: int = 2048
    """Prompt tokens of one prefill step of ours."""
    max_model_len: int = 8192
    """Prompt and output of one request together."""
    kv_cache_gib: int = 1
    """KV of each engine on a CPU."""
    num_prompts: int = 300
    """Requests of each run."""
    num_warmups: int = 16
    """Requests before the first run of a workload, whose times do not count."""
    repeats: int = 3
    """Runs of each workload, with other prompts each."""
    max_concurrency: tuple[int, ...] = (256,)
    """Requests in flight; several values give a scaling curve."""
    request_rate: float = math.inf
    """Requests a second; inf: a closed loop that sends the next when one ends."""
    burstiness: float = 1.0
    """Of an open loop's gaps: 1 is Poisson, less is burstier."""
    seed: int = 0
    """Of prompts, arrivals and requests."""
    logprobs: bool = False
    """Ask every system for log probabilities in the timed runs as well."""
    metric_percentiles: str = "50,90,99"
    """Percentiles of TTFT, TPOT, ITL and end-to-end time."""
    goodput: tuple[str, ...] = ()
    """Limits in ms that a good request keeps, as in ttft:200 tpot:50."""
    mismatch_requests: int = 32
    """Requests of each workload that are run again in other company and compared; 0: none."""
    mismatch_tokens: int = 64
    """Tokens of each that are compared."""
    padding: tuple[int, ...] = ()
    """Rows of a decode step to try for a lone request, as in 1 8 64 256."""
    timeout_s: float = 600.0
    """Longest time for one run; what is not done by then has failed."""
    output: Annotated[OptionalPath, tyro.conf.arg(aliases=["-o"])] = None
    """Directory for result.json, logs, pictures and the page, without a result yet; by default a new one, whose path
    is printed."""
    save_result: bool = False
    """Write a file per run as well, with the keys of vllm bench serve."""

    def run(self) -> int:
        with needs_extra("corun bench", "cpu"):
            command = importlib.import_module("corun_bench.command")
        code: int = command.run(self)
        return code


def options_of(bench: Bench) -> dict[str, Any]:
    """Those that need no further reading; raises InvalidArgumentError for what is out of range."""
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


def output_directory(bench: Bench) -> Path:
    """Made if it is not there. Raises InvalidArgumentError if it holds a result: that is not overwritten."""
    found = bench.output or Path(tempfile.mkdtemp(prefix="corun-bench-"))
    if found.exists() and not found.is_dir():
        raise InvalidArgumentError("output", str(found), "must be a directory")
    if (found / RESULT).exists():
        raise InvalidArgumentError("output", str(found), f"has a {RESULT} already; name another directory")
    found.mkdir(parents=True, exist_ok=True)
    return found
