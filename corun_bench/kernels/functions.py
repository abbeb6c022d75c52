"""Functions of rows, as stock vLLM and its batch-invariant mode call them; the all-reduce of tensor parallelism, too.

The batch-invariant ones are in vllm/model_executor/layers/batch_invariant.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from corun_bench.kernels.invariance import IDLE, Launch, Prepare
from corun_bench.kernels.plan import Task

_EPSILON = 1e-6
_WEIGHT_STD = 0.02
# Standard deviation of random logits: a few likely tokens, as a trained model has.
_LOGIT_STD = 3.5
_BATCH_INVARIANT = "vllm.model_executor.layers.batch_invariant"

Function = Callable[[torch.Tensor], torch.Tensor]
"""A function from [rows, width] to [rows, ...]."""
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


Make = Callable[[Task, Place], "tuple[str, Function]"]
"""Makes a function of rows for a task; returns its name with it."""


def of_rows(task: Task, place: Place, pool: int, make: Make) -> Kernel:
    """Return the kernel of a function of rows, with `pool` different rows."""
    std = _LOGIT_STD if task.op == "softmax" else 1.0
    values = place.normal(pool + 1, task.shape[0], dtype=getattr(torch, task.dtype), std=std)
    values[IDLE] = 0
    name, function = make(task, place)
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


FUNCTIONS: dict[str, Make] = {
    "mean": _mean,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "matmul": _matmul,
    "all_reduce": _all_reduce,
}
