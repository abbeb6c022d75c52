"""The options of the commands, their limits, and where a result goes. Must not know how anything is measured."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from corun.cli.options import OptionalFloat, OptionalInt, OptionalPath
from corun.errors import InvalidArgumentError
from corun.params import check_seed
from corun_bench.systems import SharedOptions

KernelName = Literal["mean", "rms_norm", "softmax", "matmul", "attention", "all_reduce"]
RESULT = "result.json"
MAX_NODES = 16
"""The most decode nodes of a router measurement."""
MAX_ROUTERS = 64
DRIFT = 0.003
"""The share of `step_ms` by which a decode node's step is longer than the previous node's: every phase between them
occurs."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(SharedOptions):
    """What `corun bench` measures, how and how often. The command's help is in `corun_bench.cli`."""

    systems: tuple[str, ...] = ("std,colocated,cluster",)
    """Systems to measure, separated by commas or spaces."""
    workloads: tuple[str, ...] = ("in=512,out=256",)
    """Workloads to run on each."""
    url: tuple[str, ...] = ()
    """OpenAI-compatible servers to measure as well."""
    url_model: str = ""
    """Name of the model that those servers serve; by default the first that each lists."""
    num_prompts: int = 300
    """Requests of each run."""
    num_warmups: int = 16
    """Warm-up requests before the first run of a workload, with short outputs; their times do not count."""
    repeats: int = 3
    """Runs of each workload; each run has other prompts."""
    max_concurrency: tuple[int, ...] = (256,)
    """Requests in flight; several values give a scaling curve."""
    request_rate: float = math.inf
    """Requests a second; inf: a closed loop that sends the next when one ends."""
    burstiness: float = 1.0
    """Burstiness of an open loop's gaps: 1 is Poisson, less is burstier; inf: all are equal."""
    seed: int = 0
    """Seed of prompts, arrivals and requests."""
    logprobs: bool = False
    """Ask every system for log probabilities in the timed runs as well."""
    metric_percentiles: str = "50,90,99"
    """Percentiles of TTFT, TPOT, ITL and end-to-end time."""
    goodput: tuple[str, ...] = ()
    """Limits in ms that a good request keeps, as in ttft:200 tpot:50."""
    mismatch_requests: int = 32
    """Requests of each workload that are run again among other requests and compared, and compared between clusters of
    one contract; 0: none."""
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

    def check(self) -> None:
        """Raise InvalidArgumentError for a value out of range, among the options that need no further reading."""
        _in_range(self, 1, "num_prompts", "repeats", "slots", "chunk_size", "tensor_parallel_size", "kv_cache_gib")
        _in_range(self, 1, "mismatch_tokens", "max_concurrency", "padding")
        _in_range(self, 0, "num_warmups", "mismatch_requests")
        _in_range(self, 2, "max_model_len")
        check_seed(self.seed)
        _above_0(self, "request_rate", "burstiness", "timeout_s")


def output_directory(bench: BenchOptions) -> Path:
    """Return the directory; make it if needed. Raises InvalidArgumentError if it holds a result already."""
    found = bench.output or Path(tempfile.mkdtemp(prefix="corun-bench-"))
    if found.exists() and not found.is_dir():
        raise InvalidArgumentError("output", str(found), "must be a directory")
    if (found / RESULT).exists():
        raise InvalidArgumentError("output", str(found), f"has a {RESULT} already; name another directory")
    found.mkdir(parents=True, exist_ok=True)
    return found


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """What `corun bench kernels` measures; 0 or empty where the default depends on the device."""

    model: str = "tiny"
    """Directory with the config.json to take the shapes from; no weights are read. "tiny" is built in."""
    rows: tuple[int, ...] = (1, 16, 64, 256, 2048)
    """Batch sizes to measure, in rows."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to measure; auto: a GPU if there is one."""
    kernels: tuple[KernelName, ...] = ()
    """Kernels to measure; by default all."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks; the shapes of one of them are measured."""
    slots: int = 256
    """Rows that the variant "fixed" always computes: the slots of a decode step."""
    context: int = 0
    """Tokens of the longest sequence that attention reads; 0: 2048 on a GPU, 512 on a CPU."""
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ()
    """Types of the inputs; by default bfloat16 on a GPU, both on a CPU."""
    ranks: int = 0
    """Ranks of the all-reduce; 0: every GPU, up to 8, or three processes on a CPU."""
    repeats: int = 0
    """Timed launches of each kernel at each row count; 0: 100 on a GPU, 10 on a CPU."""
    draws: int = 3
    """Random batches whose bits are compared, at each row count."""
    budget_s: float = 2.0
    """Most seconds for the timed launches of one row count; a slow kernel gets fewer launches, but at least three."""
    seed: int = 0
    """Seed of the random inputs."""
    timeout_s: float = 1800.0
    """Longest time for one process, in seconds; there are about ten processes."""

    def check(self) -> None:
        """Raise InvalidArgumentError for a value out of range."""
        _in_range(self, 1, "slots", "draws", "tensor_parallel_size")
        _in_range(self, 0, "repeats", "context", "ranks")
        if not self.rows or min(self.rows) < 1:
            raise InvalidArgumentError("rows", self.rows, "must be one or more numbers from 1 on")


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """What `corun bench router` measures."""

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
    routers: int = 1
    """Routers, which all use the same nodes. Each client process has connections to all of them; a connection stays
    with its router, as the SDK's do."""
    colocated: bool = False
    """Measure with colocated nodes, which compute the prompts of their samples, instead of prefill and decode nodes."""
    separate: bool = False
    """Measure the router with a stream for each sample as well, as clients without the SDK may use it."""
    repeats: int = 1
    """How often all paths are measured, in turn; the figures are medians."""
    ramp_s: float = 4.0
    """Seconds over which the first samples are sent."""
    warmup_s: float = 3.0
    """Seconds after the ramp before anything counts."""

    @property
    def samples(self) -> int:
        """The number of samples in flight: one in every slot."""
        return self.decode_nodes * self.slots

    @property
    def offered(self) -> float:
        """The offered load in tokens per second."""
        return sum(self.slots * 1000 / self.step_ms_of(index) for index in range(self.decode_nodes))

    def step_ms_of(self, index: int) -> float:
        """Return the length of a node's steps, each node's a little longer than the one's before."""
        return self.step_ms * (1 + DRIFT * index)

    def check(self) -> None:
        """Raise InvalidArgumentError for a value out of range."""
        _in_range(self, 1, "decode_nodes", most=MAX_NODES)
        _in_range(self, 1, "slots", "output_tokens", "prompt_tokens", most=4096)
        _in_range(self, 1, "routers", most=MAX_ROUTERS)
        _in_range(self, 1, "client_processes", most=min(64, self.samples))
        _in_range(self, 1, "repeats", most=1000)
        _above_0(self, "step_ms", "seconds")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `corun bench plan` plans for, and from which rates."""

    workload: tyro.conf.Positional[str]
    """Workload, named as in corun bench --workloads."""
    measured: OptionalPath = None
    """result.json of corun bench, for the rates that no option gives."""
    system: str = ""
    """System of that file whose rates count; by default its only cluster, or its only system."""
    prefill_tokens_per_s: OptionalFloat = None
    """Prompt tokens a second that one node prefills, with prompts as long as the workload's."""
    decode_step_ms: tuple[str, ...] = ()
    """Time of a decode step by its rows, as ROWS:MS: 1:6.1 64:7.5 256:15.1."""
    handoff_us_per_token: OptionalFloat = None
    """Time to read the KV of a prompt token from another GPU, in microseconds."""
    slots: OptionalInt = None
    """Slots of each node that decodes."""
    kv_tokens: OptionalInt = None
    """KV room of each node that decodes, in tokens; 0: enough for all of its slots."""
    step_tokens: int = 0
    """Most prompt tokens of a step; 0: 4096 of a prefill node, and 8192 of a colocated one."""
    num_gpus: int = 0
    """GPUs to place nodes on; 0: as few as reach the goodput."""
    gpus_per_node: int = 1
    """GPUs of each node, its tensor-parallel size; the rates are those of such a node."""
    request_rate: float = math.inf
    """Requests a second; inf: a closed loop that sends the next when one ends."""
    burstiness: float = 1.0
    """Burstiness of the gaps between requests: 1 is Poisson, less is burstier."""
    goodput: tuple[str, ...] = ()
    """Targets in ms that a good request keeps, as in ttft:200 tpot:50."""
    attain: float = 0.95
    """Share of the requests that must be good."""
    ttft_target_ms: int = 0
    """The router's target for first tokens, in ms, under which colocated nodes may take prompts only; 0: none."""
    tpot_target_ms: int = 0
    """The router's target for each further token, in ms, by which slow colocated nodes get prompts last; 0: none."""
    placements: tuple[str, ...] = ()
    """Placements to simulate, as in 2p1d 3c 1p1d2c; by default those that fit the GPUs."""
    max_concurrency: int = 0
    """Requests in flight in a closed loop; 0: one for each GPU and slot."""
    num_prompts: int = 0
    """Requests of each simulated run; 0: two for each in flight, or a minute of arrivals, and at least 300."""
    seed: int = 0
    """Seed of lengths and arrivals."""
    model: str = "tiny"
    """Model whose tokenizer counts the tokens of workloads of text."""
    max_model_len: int = 8192
    """Most tokens of one request, prompt and output together."""

    def check(self) -> None:
        """Raise InvalidArgumentError for a value out of range."""
        _above_0(self, "prefill_tokens_per_s", "slots", "request_rate", "burstiness")
        _in_range(self, 0, "handoff_us_per_token", "kv_tokens", "num_gpus", "max_concurrency", "num_prompts")
        _in_range(self, 0, "step_tokens", "ttft_target_ms", "tpot_target_ms")
        _in_range(self, 1, "gpus_per_node")
        _in_range(self, 2, "max_model_len")
        check_seed(self.seed)
        if not 0 < self.attain <= 1:
            raise InvalidArgumentError("attain", self.attain, "must be above 0 and at most 1")
        if self.num_gpus % self.gpus_per_node:
            limit = f"must be a multiple of gpus_per_node, {self.gpus_per_node}"
            raise InvalidArgumentError("num_gpus", self.num_gpus, limit)
        if not self.num_gpus and not self.placements and (math.isinf(self.request_rate) or not self.goodput):
            limit = "must be given, or request_rate and goodput, for which the fewest GPUs are sought"
            raise InvalidArgumentError("num_gpus", self.num_gpus, limit)


def plain(options: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the options of a kind as plain values, without those that a command adds to them."""
    return {field.name: getattr(options, field.name) for field in fields(kind)}


def to_number(word: str) -> float:
    """Return the number that a word of a command line is; NaN, which is in no range, if it is none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _in_range(options: Any, least: int, *names: str, most: float = math.inf) -> None:
    """Check some options, or each value of those that have several. What is None was not given."""
    limit = f"must be at least {least}" if most == math.inf else f"must be {least} to {most}"
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                raise InvalidArgumentError(name, value, limit)


def _above_0(options: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:
            raise InvalidArgumentError(name, value, "must be above 0")
