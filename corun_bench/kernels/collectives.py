"""All-reduce among ranks that are processes of this machine, with several ways to add up a row.

A row of a batch is a row of the message. The row's place in the message, and the size of the message, may decide the
order in which the ranks' values are added. NCCL reads its settings from the environment of the process
(corun_bench/kernels/plan.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from corun_bench.kernels.ops import Kernel, Place, UnavailableKernelError
from corun_bench.kernels.plan import Task

_TIMEOUT = timedelta(minutes=5)

Reduce = Callable[[torch.Tensor], torch.Tensor]


def join(device: torch.device, rank: int, ranks: int, meeting: str) -> None:
    """Make this process a rank. meeting: a file that all ranks can write, and that does not exist yet."""
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=_TIMEOUT,
    )


def leave() -> None:
    """Leave the group of ranks that `join` entered."""
    distributed.destroy_process_group()


def barrier(device: torch.device) -> None:
    """Return when all ranks have come here; on a GPU return at once and let the stream wait for them."""
    distributed.all_reduce(torch.zeros(1, device=device))


def build(task: Task, place: Place, pool: int) -> Kernel:
    """Return the all-reduce of a task. Every rank has its own values for each of `pool` rows."""
    own = Place(device=place.device, seed=place.seed + 1 + distributed.get_rank())
    values = own.normal(pool, task.shape[0], dtype=getattr(torch, task.dtype))
    implementation, reduce = _reduction(task, place.device)

    def prepare(rows: Sequence[int]) -> Callable[[], torch.Tensor]:
        message = values[torch.tensor(rows, device=values.device)]
        return lambda: reduce(message)

    ranks = distributed.get_world_size()
    return Kernel(implementation=f"{implementation}, {ranks} ranks", prepare=prepare)


def _reduction(task: Task, device: torch.device) -> tuple[str, Reduce]:
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


def _custom(device: torch.device) -> Reduce:
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
