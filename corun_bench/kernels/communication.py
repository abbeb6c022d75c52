"""The all-reduce of tensor parallelism: NCCL's, vLLM's own, and a gather with a sum in the order of the ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import distributed

from corun_bench.kernels.functions import Function, Place, UnavailableKernelError
from corun_bench.kernels.plan import Task


def all_reduce(task: Task, place: Place) -> tuple[str, Function]:
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
