"""The kernels except attention: mean, RMSNorm, log-softmax, matrix products, and the all-reduce among ranks.

Owns how stock vLLM and its batch-invariant mode call each of them (vllm/model_executor/layers/batch_invariant.py), and
their random inputs. vLLM is imported only by the variants that need it. Must not know how they are timed or compared.

A row of an all-reduce is a row of the message. Its place in the message, and the size of the message, may decide the
order in which the ranks' values are added. NCCL reads its settings from the environment of the process
(corun_bench/kernels/plan.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from corun_bench.kernels.invariance import Prepare
from corun_bench.kernels.plan import Task

_EPSILON = 1e-6
_WEIGHT_STD = 0.02
# Standard deviation of random logits: a few likely tokens, as a trained model has.
_LOGIT_STD = 3.5
_RANK_TIMEOUT = timedelta(minutes=5)
_BATCH_INVARIANT = "vllm.model_executor.layers.batch_invariant"

Function = Callable[[torch.Tensor], torch.Tensor]
"""A function from [rows, width] to [rows, ...]."""


class UnavailableKernelError(Exception):
    """The kernel does not run on this device, which is not a failure; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel with a pool of inputs."""

    implementation: str
    """The name of the function that is called, for the report."""
    prepare: Prepare


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a kernel runs, and the seed of its random inputs."""

    device: torch.device
    seed: int

    def normal(self, *size: int, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
        """Return random values from this place's seed. Every call with the same size returns the same values."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.empty(size, dtype=dtype, device=self.device).normal_(0.0, std, generator=generator)


def build(task: Task, place: Place, pool: int) -> Kernel:
    """Return the kernel of a task, with `pool` different rows."""
    dtype: torch.dtype = getattr(torch, task.dtype)
    std = _LOGIT_STD if task.op == "softmax" else 1.0
    values = place.normal(pool + 1, task.shape[0], dtype=dtype, std=std)
    values[-1] = 0  # The idle row, number -1.
    implementation, function = _FUNCTIONS[task.op](task, place)
    if task.variant == "row-by-row":
        return Kernel(implementation=f"{implementation}, one row at a time", prepare=_prepare(values, _each(function)))
    return Kernel(implementation=implementation, prepare=_prepare(values, function))


def _prepare(values: torch.Tensor, function: Function) -> Prepare:
    def prepare(rows: Sequence[int]) -> Callable[[], torch.Tensor]:
        batch = values[torch.tensor(rows, device=values.device)]
        return lambda: function(batch)

    return prepare


def _each(function: Function) -> Function:
    """Return the function, called on one row at a time."""
    return lambda batch: torch.cat([function(batch[index : index + 1]) for index in range(len(batch))])


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
    if place.device.type == "cpu":
        return _cpu_matmul(weight)
    if task.variant == "bi":
        matmul = importlib.import_module(_BATCH_INVARIANT).matmul_persistent
        return "batch_invariant.matmul_persistent (Triton)", lambda batch: matmul(batch, weight.t())
    library = "cuBLAS without split-K" if task.variant == "nosplitk" else "cuBLAS"
    return f"torch.nn.functional.linear ({library})", lambda batch: torch.nn.functional.linear(batch, weight)


def _cpu_matmul(weight: torch.Tensor) -> tuple[str, Function]:
    """Return what vLLM's linear layers call on this CPU (vllm/model_executor/layers/utils.py)."""
    dispatch = importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm
    layer: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch(layer, remove_weight=False)
    return "vLLM's linear layer for CPUs", lambda batch: layer.cpu_linear(batch, layer.weight, None)


_FUNCTIONS: dict[str, Callable[[Task, Place], tuple[str, Function]]] = {
    "mean": _mean,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "matmul": _matmul,
}


def join(device: torch.device, rank: int, ranks: int, meeting: str) -> None:
    """Make this process a rank. meeting: a file that all ranks can write, and that does not exist yet."""
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=_RANK_TIMEOUT,
    )


def leave() -> None:
    """Leave the group of ranks that `join` entered."""
    distributed.destroy_process_group()


def barrier(device: torch.device) -> None:
    """Return when all ranks have come here; on a GPU return at once and let the stream wait for them."""
    distributed.all_reduce(torch.zeros(1, device=device))


def build_all_reduce(task: Task, place: Place, pool: int) -> Kernel:
    """Return the all-reduce of a task. Every rank has its own values for each of `pool` rows."""
    own = Place(device=place.device, seed=place.seed + 1 + distributed.get_rank())
    values = own.normal(pool, task.shape[0], dtype=getattr(torch, task.dtype))
    implementation, reduce = _reduction(task, place.device)
    ranks = distributed.get_world_size()
    return Kernel(implementation=f"{implementation}, {ranks} ranks", prepare=_prepare(values, reduce))


def _reduction(task: Task, device: torch.device) -> tuple[str, Function]:
    if task.variant == "custom":
        return "vLLM's custom all-reduce", _custom(device)
    if task.variant == "fixed-order":
        return "all-gather and a sum in the order of the ranks", _in_order
    library = "gloo" if device.type == "cpu" else "NCCL ring" if task.variant == "std" else "NCCL tree, one channel"
    return f"{library}, with a copy of its input", _in_place


def _in_place(message: torch.Tensor) -> torch.Tensor:
    total = message.clone()
    distributed.all_reduce(total)
    return total


def _in_order(message: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(message) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, message)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _custom(device: torch.device) -> Function:
    module = importlib.import_module("vllm.distributed.device_communicators.custom_all_reduce")
    group = distributed.new_group(backend="gloo")
    custom: Any = module.CustomAllreduce(group=group, device=device)
    if custom.disabled:
        raise UnavailableKernelError("vLLM does not use its custom all-reduce with these ranks and links")

    def reduce(message: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = custom.custom_all_reduce(message)
        if total is None:
            raise UnavailableKernelError(f"vLLM uses NCCL for a message of {message.nbytes} bytes")
        return total

    return reduce
