"""The process that measures kernels: `python -m corun_bench.kernel_worker JSON RESULTS` writes JSON lines.

Owns how stock vLLM and its batch-invariant mode call each kernel (vllm/model_executor/layers/batch_invariant.py), how
its bits are compared, and how it is timed. Invariance is measured, never assumed (paper, Section III): with batch
invariance a row has the same bits in a batch as alone; with position invariance rows that change places keep their
bits. Bits are compared, never values within a tolerance. Each result is written at once, so that a crash loses nothing
that was measured before. Must not know what other processes measure.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from corun.node.vllm import pin
from corun_bench.conditions import cpu, smi
from corun_bench.kernels import RANK, Task
from corun_bench.options import KernelOptions

IDLE = -1
"""The number of the idle row, which fills a batch up to a fixed number of rows."""
TARGETS = 16
"""The most rows of each drawn batch that are also computed in other batches."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EPSILON = 1e-6
_WEIGHT_STD = 0.02
# Standard deviation of random logits: a few likely tokens, as a trained model has.
_LOGIT_STD = 3.5
_RANK_TIMEOUT = timedelta(minutes=5)
_BATCH_INVARIANT = "vllm.model_executor.layers.batch_invariant"
_GPU_BLOCK, _CPU_BLOCK = 16, 128  # Tokens per block: vLLM's defaults.
# vllm/config/attention.py: flash_attn_max_num_splits_for_cuda_graph, the limit of stock vLLM's decode graphs.
_STOCK_SPLITS = 32
_SMI_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
_WARM_UPS = _FEWEST = 3
# On a CPU this many inputs take turns, so that they do not stay in its caches.
_TURNS = 3
# More than the L2 cache of any GPU: what a launch reads comes from memory, as a model's weights do.
_FLUSH_BYTES = 256 << 20
# About a millisecond. While the GPU waits, the host queues the launch and both events: launching is not timed.
_HEAD_START_CYCLES = 2_000_000

Function = Callable[[torch.Tensor], torch.Tensor]
"""A function from [rows, width] to [rows, ...]."""
Launch = Callable[[], torch.Tensor]
Prepare = Callable[[Sequence[int]], Launch]
"""Makes a kernel's inputs from these rows of a pool, in this order. Returns the launch, which returns [rows, ...]."""
Kernel = tuple[str, Prepare]
"""The name of the function that is called, for the report; and its inputs."""


class UnavailableKernelError(Exception):
    """The kernel does not run on this device, which is not a failure; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a kernel runs, and the seed of its random inputs."""

    device: torch.device
    seed: int

    def normal(self, *size: int, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
        """Return random values from this place's seed. Every call with the same size returns the same values."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.empty(size, dtype=dtype, device=self.device).normal_(0.0, std, generator=generator)


# What a process does.


def main(arguments: Sequence[str]) -> int:
    spec = json.loads(arguments[0])
    with Path(arguments[1]).open("w", encoding="utf-8") as file:
        for line in [facts(spec["facts"])] if "facts" in spec else measure_all(spec):
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def facts(device: str) -> dict[str, Any]:
    """Return the facts about the device and the software. device: "auto" takes a GPU if there is one."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    found: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "torch": torch.__version__}
    if not on_gpu:
        return {**found, "name": cpu() or platform.machine(), "devices": 1, "threads": torch.get_num_threads()}
    major, minor = torch.cuda.get_device_capability()
    return {
        **found,
        "name": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": [", ".join(row) for row in smi(f"--query-gpu={_SMI_QUERY}")],
        "vllm_batch_invariant_matmul": "matmul_persistent (bi)" if major == 8 else "cuBLAS without split-K (nosplitk)",
    }


def measure_all(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure every task of a job; yield the results of rank 0.

    spec: the options, the tasks, the number of ranks, and the file through which the ranks find each other.
    """
    options, ranks, rank = KernelOptions(**spec["options"]), spec["ranks"], int(os.environ.get(RANK, "0"))
    tasks = [Task(**{**task, "shape": tuple(task["shape"]), "rows": tuple(task["rows"])}) for task in spec["tasks"]]
    if any(task.variant == "nosplitk" for task in tasks):
        pin.set_switches(torch.backends, options.device)
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        backend, method = "nccl" if device.type == "cuda" else "gloo", f"file://{spec['meeting']}"
        distributed.init_process_group(backend, init_method=method, rank=rank, world_size=ranks, timeout=_RANK_TIMEOUT)
    with torch.inference_mode():
        for task in tasks:
            for line in measure_task(task, options, Place(device=device, seed=options.seed), ranks):
                if rank == 0:
                    yield line
    if ranks > 1:
        distributed.destroy_process_group()


def measure_task(task: Task, options: KernelOptions, place: Place, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a line per row count: what was measured, why it failed, or why it does not run here."""
    pool = max(*task.rows, task.places) + 1
    kernel: Kernel | None = None
    for rows in task.rows:
        try:
            kernel = kernel or build(task, place, pool)
            yield {"row": _measured(task, rows, kernel, options, place, pool, ranks)}
        except UnavailableKernelError as error:  # This error comes on all ranks.
            named = {"kernel": task.kernel, "variant": task.variant, "rows": rows, "reason": str(error)}
            yield {"unavailable": named}
        except Exception as error:  # A library may raise anything; the row names it.
            text = " ".join(str(error).split())[:300]
            yield {"row": task.row(rows, error=f"{type(error).__name__}: {text}")}
            if ranks > 1:  # This rank ends: the others are in another collective and would wait for it.
                raise


def _measured(
    task: Task, rows: int, kernel: Kernel, options: KernelOptions, place: Place, pool: int, ranks: int
) -> dict[str, Any]:
    implementation, prepare = kernel
    found = invariance(prepare, rows=rows, pool=pool, draws=options.draws, seed=options.seed, places=task.places)
    chance = random.Random(options.seed)
    idle = [IDLE] * max(0, task.places - rows)
    turns = 1 if place.device.type == "cuda" else _TURNS
    launches = [prepare([*chance.sample(range(pool), rows), *idle]) for _ in range(turns)]

    def barrier() -> None:
        """Wait for all ranks; on a GPU return at once and let the stream wait for them."""
        distributed.all_reduce(torch.zeros(1, device=place.device))

    before = barrier if ranks > 1 else None
    times = durations_us(launches, repeats=options.repeats, budget_s=options.budget_s, before=before)
    return task.row(
        rows,
        implementation=implementation,
        median_us=round(statistics.median(times), 3),
        min_us=round(min(times), 3),
        max_us=round(max(times), 3),
        repeats=len(times),
        batch_invariant=verdict(found["batch"]),
        position_invariant=verdict(found["position"]),
        repeatable=verdict(found["repeat"]),
        batch_equal=found["batch"],
        position_equal=found["position"],
    )


# Whether bits depend on the batch.


def verdict(counts: Sequence[int]) -> bool | None:
    """Return whether all compared rows were equal; None if there was nothing to compare."""
    equal, compared = counts
    return equal == compared if compared else None


def invariance(
    prepare: Prepare, *, rows: int, pool: int, draws: int, seed: int, places: int = 0
) -> dict[str, list[int]]:
    """Run a kernel on `draws` random batches, and on changed copies of them that should give the same bits.

    rows: the number of rows drawn for a batch. pool: the number of different rows to draw from. places: the number of
    rows of every batch, filled up with IDLE; 0: as many as are drawn. A single row is compared with other batches and
    orders only if it has places to move to.

    Returns [equal rows, compared rows] for "batch" (the same rows in batches of other sizes, or, at a fixed size,
    among other rows), "position" (the batch in another order) and "repeat" (the batch computed again).

    Raises:
        ArithmeticError: an output is not finite, or all zeros, so that equal bits would prove nothing.
    """
    chance = random.Random(seed)
    found = {"batch": [0, 0], "position": [0, 0], "repeat": [0, 0]}

    def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        found[name][0] += int((a == b).flatten(1).all(1).sum())
        found[name][1] += len(a)

    for _ in range(draws):
        line = _line(chance.sample(range(pool), rows), places, chance)
        output = _bits(prepare, line)
        compare("repeat", _of(output, line, line), _of(_bits(prepare, line), line, line))
        orders = [line[::-1], line[-1:] + line[:-1], chance.sample(line, len(line))] if len(line) > 1 else []
        for order in orders:
            compare("position", _of(output, line, line), _of(_bits(prepare, order), order, line))
        members = [row for row in line if row != IDLE]
        # The row is alone first. At a fixed size it is also in a batch with other rows at all other places.
        sizes = [size for size in (1, places) if size and (places or size != rows)]
        for target in chance.sample(members, min(TARGETS, rows)):
            others = [row for row in range(pool) if row != target]
            for size in sizes:
                crowd = _line([target, *chance.sample(others, size - 1)], places, chance)
                compare("batch", _of(output, line, [target]), _of(_bits(prepare, crowd), crowd, [target]))
    return found


def _line(members: Sequence[int], places: int, chance: random.Random) -> list[int]:
    """Return the rows of a batch at random places, filled up with IDLE."""
    line = [*members, *[IDLE] * (places - len(members))]
    return chance.sample(line, len(line))


def _of(bits: torch.Tensor, line: Sequence[int], members: Sequence[int]) -> torch.Tensor:
    """Return the output of some rows of a batch, in the order of `members`."""
    place = {row: index for index, row in enumerate(line)}
    return bits[torch.tensor([place[row] for row in members if row != IDLE], device=bits.device)]


def _bits(prepare: Prepare, line: Sequence[int]) -> torch.Tensor:
    """Return a kernel's output as integers of the same bits, [rows, ...]."""
    output = prepare(line)()
    if len(output) != len(line):
        raise ArithmeticError(f"the kernel gave {len(output)} rows of {len(line)}")
    if not bool(torch.isfinite(output).all()):
        raise ArithmeticError("the kernel's output is not finite")
    bits = output.contiguous().view(_INTEGERS[output.element_size()]).reshape(len(line), -1)
    if not bool((bits != 0).any()):
        raise ArithmeticError("the kernel's output is all zeros")
    return bits


# How long a launch takes.


def durations_us(
    launches: Sequence[Launch], *, repeats: int, budget_s: float, before: Callable[[], None] | None = None
) -> list[float]:
    """Time up to `repeats` launches, and at least three, on cold inputs; return the microseconds of each.

    launches: the same kernel on different inputs, which take turns. budget_s: the time in seconds; if all repeats would
    take longer, there are fewer. before: called ahead of each launch. With it the budget does not count, because every
    rank of a collective must repeat equally often.
    """
    output = launches[0]()
    started = time.perf_counter()
    for number in range(_WARM_UPS):
        output = launches[number % len(launches)]()
    if output.is_cuda:
        torch.cuda.synchronize()
    each_s = (time.perf_counter() - started) / _WARM_UPS
    count = repeats if before else max(_FEWEST, min(repeats, int(budget_s / max(each_s, 1e-9))))
    turns = [launches[number % len(launches)] for number in range(count)]
    if output.is_cuda:
        return _on_gpu(turns, output.device, before)
    found = []
    for launch in turns:
        if before:
            before()
        started = time.perf_counter()
        launch()
        found.append((time.perf_counter() - started) * 1e6)
    return found


def _on_gpu(turns: Sequence[Launch], device: torch.device, before: Callable[[], None] | None) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs = []
    for launch in turns:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        if before:
            before()
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


# The kernels.


def build(task: Task, place: Place, pool: int) -> Kernel:
    """Return the kernel of a task, with `pool` different rows."""
    if task.op == "attention":
        return attention(task, place, pool)
    dtype: torch.dtype = getattr(torch, task.dtype)
    if task.op == "all_reduce":  # Every rank has its own values.
        place = Place(device=place.device, seed=place.seed + 1 + distributed.get_rank())
    values = place.normal(pool + 1, task.shape[0], dtype=dtype, std=_LOGIT_STD if task.op == "softmax" else 1.0)
    values[IDLE] = 0
    name, function = _FUNCTIONS[task.op](task, place)
    by_row = task.variant == "row-by-row"

    def prepare(rows: Sequence[int]) -> Launch:
        batch = values[torch.tensor(rows, device=values.device)]
        if by_row:
            return lambda: torch.cat([function(batch[index : index + 1]) for index in range(len(batch))])
        return lambda: function(batch)

    return name + ", one row at a time" * by_row, prepare


def _mean(task: Task, place: Place) -> tuple[str, Function]:
    if task.variant == "bi":
        mean = importlib.import_module(_BATCH_INVARIANT).mean_batch_invariant
        return "batch_invariant.mean_batch_invariant (Triton)", lambda batch: mean(batch, [-1])
    return "torch.mean", lambda batch: batch.mean(dim=-1)


def _rms_norm(task: Task, place: Place) -> tuple[str, Function]:
    weight = place.normal(task.shape[0], dtype=getattr(torch, task.dtype), std=0.1) + 1
    if task.variant == "bi":
        rms_norm = importlib.import_module(_BATCH_INVARIANT).rms_norm_batch_invariant
        return "batch_invariant.rms_norm_batch_invariant (Triton)", lambda batch: rms_norm(batch, weight, _EPSILON)
    ops = importlib.import_module("vllm._custom_ops")

    def norm(batch: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(batch)
        ops.rms_norm(output, batch, weight, _EPSILON)
        return output

    return "vllm._custom_ops.rms_norm", norm


def _softmax(task: Task, place: Place) -> tuple[str, Function]:
    if task.variant == "bi":
        log_softmax = importlib.import_module(_BATCH_INVARIANT).log_softmax
        return "batch_invariant.log_softmax (Triton)", lambda batch: log_softmax(batch, dim=-1)
    return "torch.log_softmax", lambda batch: torch.log_softmax(batch, dim=-1)


def _matmul(task: Task, place: Place) -> tuple[str, Function]:
    inner, outer = task.shape
    weight = place.normal(outer, inner, dtype=getattr(torch, task.dtype), std=_WEIGHT_STD)
    if place.device.type == "cpu":  # What vLLM's linear layers call (vllm/model_executor/layers/utils.py).
        dispatch = importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm
        layer: Any = torch.nn.Linear(inner, outer, bias=False, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch(layer, remove_weight=False)
        return "vLLM's linear layer for CPUs", lambda batch: layer.cpu_linear(batch, layer.weight, None)
    if task.variant == "bi":
        matmul = importlib.import_module(_BATCH_INVARIANT).matmul_persistent
        return "batch_invariant.matmul_persistent (Triton)", lambda batch: matmul(batch, weight.t())
    library = "cuBLAS without split-K" if task.variant == "nosplitk" else "cuBLAS"
    return f"torch.nn.functional.linear ({library})", lambda batch: torch.nn.functional.linear(batch, weight)


def _all_reduce(task: Task, place: Place) -> tuple[str, Function]:
    """Return the all-reduce of a task among the ranks. NCCL reads its settings from the environment of the process.

    A row is a row of the message. Its place in the message, and the size of the message, may decide the order in which
    the ranks' values are added.
    """
    ranks = distributed.get_world_size()
    if task.variant == "custom":
        return f"vLLM's custom all-reduce, {ranks} ranks", _custom_all_reduce(place.device)

    def in_place(message: torch.Tensor) -> torch.Tensor:
        total = message.clone()
        distributed.all_reduce(total)
        return total

    def in_order(message: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(message) for _ in range(ranks)]
        distributed.all_gather(parts, message)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    if task.variant == "fixed-order":
        return f"all-gather and a sum in the order of the ranks, {ranks} ranks", in_order
    on_gpu = "NCCL ring" if task.variant == "std" else "NCCL tree, one channel"
    library = "gloo" if place.device.type == "cpu" else on_gpu
    return f"{library}, with a copy of its input, {ranks} ranks", in_place


def _custom_all_reduce(device: torch.device) -> Function:
    module = importlib.import_module("vllm.distributed.device_communicators.custom_all_reduce")
    custom: Any = module.CustomAllreduce(group=distributed.new_group(backend="gloo"), device=device)
    if custom.disabled:
        raise UnavailableKernelError("vLLM does not use its custom all-reduce with these ranks and links")

    def reduce(message: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = custom.custom_all_reduce(message)
        if total is None:
            raise UnavailableKernelError(f"vLLM uses NCCL for a message of {message.nbytes} bytes")
        return total

    return reduce


_FUNCTIONS: dict[str, Callable[[Task, Place], tuple[str, Function]]] = {
    "mean": _mean,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "matmul": _matmul,
    "all_reduce": _all_reduce,
}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Launch]
"""Makes the launch of a decode step from its queries [rows, heads, head size], the number of tokens that each row reads
[rows], the block table [rows, blocks of the longest context], and the index at which each query begins [rows + 1]."""


def attention(task: Task, place: Place, pool: int) -> Kernel:
    """Return the attention of a decode step over a paged KV cache, called as vLLM's backends call it.

    A row of a batch is a request: its query, its length and its blocks move together with it. Lengths are from half of
    the longest context to all of it; the idle row reads one token of block 0. A step computes the schedule once for all
    its layers; the schedule is therefore part of the inputs and is not timed.
    """
    heads, _, head_dim, context = task.shape
    on_cpu = place.device.type == "cpu"
    width = -(-context // (_CPU_BLOCK if on_cpu else _GPU_BLOCK))
    chance = torch.Generator().manual_seed(place.seed)
    drawn = torch.randint(context // 2, context + 1, (pool,), generator=chance, dtype=torch.int32)
    shuffled = torch.randperm(pool * width, generator=chance, dtype=torch.int32) + 1
    queries = place.normal(pool + 1, heads, head_dim, dtype=getattr(torch, task.dtype))
    lengths = torch.cat([drawn, drawn.new_ones(1)]).to(place.device)
    blocks = torch.cat([shuffled.view(pool, width), shuffled.new_zeros(1, width)]).to(place.device)
    name, attend = (_cpu_attention if on_cpu else flash_attention)(task, place, pool * width + 1)

    def prepare(rows: Sequence[int]) -> Launch:
        index = torch.tensor(rows, device=place.device)
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=place.device)
        return attend(queries[index], lengths[index], blocks[index], starts)

    return name, prepare


def flash_attention(task: Task, place: Place, num_blocks: int) -> tuple[str, Attend]:
    """Return FlashAttention on a GPU (vllm/v1/attention/backends/flash_attn.py)."""
    utils = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    canonical = importlib.import_module("vllm.utils.torch_utils").canonicalize_singleton_dim_strides
    heads, kv_heads, head_dim, context = task.shape
    # [blocks, block, KV heads, head size] each, side by side in memory as in vLLM's cache.
    cache = place.normal(num_blocks, _GPU_BLOCK, kv_heads, 2 * head_dim, dtype=getattr(torch, task.dtype))
    keys, values = map(canonical, cache.split(head_dim, dim=-1))
    version = utils.get_flash_attn_version(head_size=head_dim)
    # Batch-invariant mode uses no schedule made in advance, and only FlashAttention 3 can use one.
    ahead = version == 3 and task.variant != "bi"
    splits = 1 if task.variant != "std" else _STOCK_SPLITS if ahead else 0

    def attend(queries: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor) -> Launch:
        longest = context if task.places else int(lengths.max())
        schedule = None
        if ahead:
            schedule = utils.get_scheduler_metadata(
                batch_size=len(queries),
                max_seqlen_q=1,
                max_seqlen_k=longest,
                num_heads_q=heads,
                num_heads_kv=kv_heads,
                headdim=head_dim,
                cache_seqlens=lengths,
                qkv_dtype=queries.dtype,
                cu_seqlens_q=starts,
                page_size=_GPU_BLOCK,
                causal=True,
                window_size=(-1, -1),
                num_splits=splits,
            )
        output = torch.empty_like(queries)

        def launch() -> torch.Tensor:
            utils.flash_attn_varlen_func(
                q=queries,
                k=keys,
                v=values,
                out=output,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=longest,
                softmax_scale=head_dim**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=blocks,
                scheduler_metadata=schedule,
                fa_version=version,
                num_splits=splits,
            )
            return output

        return launch

    policy = f"at most {splits} splits" if splits > 1 else "one split" if splits else "splits by its heuristic"
    return f"FlashAttention {version}, {policy}", attend


def _cpu_attention(task: Task, place: Place, num_blocks: int) -> tuple[str, Attend]:
    """Return vLLM's own kernel for CPUs (cpu_attn.py)."""
    ops = importlib.import_module("vllm._custom_ops")
    heads, kv_heads, head_dim, _ = task.shape
    dtype: torch.dtype = getattr(torch, task.dtype)
    isa = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa(dtype, _CPU_BLOCK, head_dim)
    # The layout is that of the instruction set, so vLLM writes the cache.
    cache = torch.zeros(num_blocks, kv_heads, 2 * _CPU_BLOCK, head_dim, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    for block in range(num_blocks):
        own = Place(device=place.device, seed=place.seed + block)
        both = own.normal(2, _CPU_BLOCK, kv_heads, head_dim, dtype=dtype)
        slots = torch.arange(block * _CPU_BLOCK, (block + 1) * _CPU_BLOCK)
        ops.cpu_attn_reshape_and_cache(both[0], both[1], keys, values, slots, isa)
    split = task.variant == "std"  # VLLM_CPU_ATTN_SPLIT_KV

    def attend(queries: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor) -> Launch:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(queries),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=split,
        )
        output = torch.empty_like(queries)

        def launch() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(
                query=queries,
                key_cache=keys,
                value_cache=values,
                output=output,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=blocks,
                softcap=0,
                scheduler_metadata=schedule,
                s_aux=None,
            )
            return output

        return launch

    return f"vLLM's attention for CPUs ({isa}) {'with' if split else 'without'} split-KV", attend


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
