"""One NIXL READ between two processes, shaped as the connector's: a region per layer, blocks of one length.

Owns: both processes of a measurement. They are spawned with their environment set, because UCX reads it when it is
loaded. So torch and nixl are imported only in them. Must not know: which measurements are of interest.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from corun_bench.nodes import environment

SLOW_S = 2.0
"""A transfer that takes longer is not repeated: the figure is bad enough."""
TRANSFER_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The process that holds the data and the process that reads it."""

    name: str
    devices: tuple[str, str]
    """The devices of the holder and of the reader: "cpu", or "cuda:N" as that process sees it."""
    visible: tuple[str, str] = ("", "")
    """CUDA_VISIBLE_DEVICES of the holder and of the reader; empty to leave it as it is."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size and layout of the data that is read."""

    regions: int
    region_bytes: int
    block_sizes: tuple[int, ...]
    """Block sizes in bytes; each divides the region."""
    repeats: int = 3

    @property
    def total(self) -> int:
        return self.regions * self.region_bytes


def measure(pair: Pair, shape: Shape, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield a result per block size and order of blocks, as they come; leave no process.

    Raises TimeoutError or RuntimeError.
    """
    deadline = time.monotonic() + timeout_s
    context = multiprocessing.get_context("spawn")
    holds, reads = context.Pipe()
    results, sink = context.Pipe(duplex=False)
    roles = [(hold, (holds, pair.devices[0], shape)), (read, (reads, sink, pair.devices, shape))]
    processes = [context.Process(target=target, args=args, daemon=True) for target, args in roles]
    with ExitStack() as cleanup:
        for process, visible in zip(processes, pair.visible, strict=True):
            with environment(**pair.env, CUDA_VISIBLE_DEVICES=visible or None):
                process.start()
            cleanup.callback(_end, process)
        sink.close()
        while (found := _next(results, deadline)) is not None:
            if isinstance(found, str):
                raise RuntimeError(found)
            yield found


def _next(results: Any, deadline: float) -> dict[str, Any] | str | None:
    """Return a result, a text on what went wrong, or None at the end."""
    if not results.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("it did not end in time")
    try:
        found: dict[str, Any] | str | None = results.recv()
    except EOFError:
        raise RuntimeError("the reader died") from None
    return found


def _end(process: Any) -> None:
    process.join(2.0)
    process.kill()
    process.join()


def hold(link: Any, device: str, shape: Shape) -> None:
    """Be the process whose memory is read."""
    agent = _agent("holder", device)
    regions = _filled(shape, device)
    agent.register_memory(regions)
    link.send((agent.get_agent_metadata(), [region.data_ptr() for region in regions]))
    link.recv()  # The reader is done.


def read(link: Any, sink: Any, devices: tuple[str, str], shape: Shape) -> None:
    """Be the process that reads: send the results and then None, or a text on what went wrong."""
    try:
        for found in _read_all(link, devices, shape):
            sink.send(found)
        sink.send(None)
    except Exception as error:  # The parent has no other way to learn it.
        sink.send(f"{type(error).__name__}: {error}")
    link.send("done")


def _read_all(link: Any, devices: tuple[str, str], shape: Shape) -> Iterator[dict[str, Any]]:
    import torch

    agent = _agent("reader", devices[1])
    regions = [torch.zeros(shape.region_bytes, dtype=torch.uint8, device=devices[1]) for _ in range(shape.regions)]
    agent.register_memory(regions)
    metadata, remote = link.recv()
    peer = agent.add_remote_agent(metadata)
    expected = _filled(shape, devices[1])
    for block in shape.block_sizes:
        sides = [
            ("NIXL_INIT_AGENT", [region.data_ptr() for region in regions], devices[1]),
            (peer, remote, devices[0]),
        ]
        lists = [_blocks(agent, name, bases, shape, block, device) for name, bases, device in sides]
        for order in ("ascending", "shuffled"):
            theirs = _order(order, shape.region_bytes // block)
            times = _timed(agent, lists, theirs, shape, regions)
            equal = all(_equal(*pair, theirs, block) for pair in zip(regions, expected, strict=True))
            yield _figures(block, order, times, shape.total) | {"bytes_equal": equal}


def _timed(agent: Any, lists: list[Any], theirs: list[int], shape: Shape, regions: list[Any]) -> list[float]:
    """Return the seconds of each read. The first one includes the setup that UCX makes at first use."""
    import torch

    count = len(theirs)
    ours = list(range(shape.regions * count))
    remote = [region * count + block for region in range(shape.regions) for block in theirs]
    times: list[float] = []
    while len(times) <= shape.repeats and not (times and times[-1] > SLOW_S):
        for region in regions:
            region.zero_()
        if regions[0].is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", lists[0], ours, lists[1], remote)
        state = agent.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - began > TRANSFER_TIMEOUT_S:
                raise TimeoutError(f"a read of {shape.total} bytes took over {TRANSFER_TIMEOUT_S:.0f} s")
            state = agent.check_xfer_state(handle)
        times.append(time.perf_counter() - began)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")
        agent.release_xfer_handle(handle)
    return times


def _figures(block: int, order: str, times: list[float], total: int) -> dict[str, Any]:
    middle = statistics.median(times[1:] or times)
    shown = {"block": block, "order": order, "first_ms": round(times[0] * 1e3, 2), "ms": round(middle * 1e3, 2)}
    return {**shown, "repeats": len(times) - 1, "gb_per_s": round(total / middle / 1e9, 2)}


def _agent(name: str, device: str) -> Any:
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    if device != "cpu":  # An engine, too, has its CUDA context when it makes its agent.
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    # As in the connector: UCX's own threads would have no CUDA context, and so no cuda_ipc.
    return nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=0))


def _filled(shape: Shape, device: str) -> list[Any]:
    """Return regions of random bytes, the same in both processes, allocated one by one as a KV cache's layers are."""
    import torch

    regions = []
    for number in range(shape.regions):
        generator = torch.Generator(device=device).manual_seed(number)
        regions.append(torch.empty(shape.region_bytes, dtype=torch.uint8, device=device).random_(generator=generator))
    return regions


def _blocks(agent: Any, name: str, bases: list[int], shape: Shape, block: int, device: str) -> Any:
    """Prepare the descriptor list of all blocks of all regions, region by region."""
    kind, number = ("DRAM", 0) if device == "cpu" else ("VRAM", int(device.split(":")[1]))
    places = [(base + start, block, number) for base in bases for start in range(0, shape.region_bytes, block)]
    return agent.prep_xfer_dlist(name, agent.get_xfer_descs(places, kind))


def _order(order: str, count: int) -> list[int]:
    """Return, for each of our blocks i, the block to read into it.

    Neighbours may be merged into one transfer; a shuffled order leaves no neighbours.
    """
    blocks = list(range(count))
    if order == "shuffled":
        random.Random(1).shuffle(blocks)
    return blocks


def _equal(ours: Any, expected: Any, theirs: list[int], block: int) -> bool:
    import torch

    index = torch.tensor(theirs, device=expected.device)
    return bool(torch.equal(ours.view(-1, block), expected.view(-1, block)[index]))
