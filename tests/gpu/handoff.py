"""The handoff benchmark: `python -m tests.gpu.handoff [--json PATH]` measures NIXL alone, between two processes.

A read is shaped as the connector's: a region per layer, blocks of one length. It runs on one GPU and, with two, from
one to the other; without a GPU it moves host memory. UCX refuses to read over cuda_ipc if NVML shows no NVLink, and
NIXL then falls back to software emulation over tcp. So each pair of GPUs runs with UCX_CUDA_IPC_ENABLE_GET_ZCOPY
unset and on; nodes have it on. Prints a JSON line per measurement and a table. Exit code: 0, or 1 if a measurement
failed or a byte differed.

Both processes are spawned with their environment set, because UCX reads it when it is loaded. So torch and nixl are
imported only in them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from corun.observe.nvidia_smi import smi
from corun_bench import conditions

ZCOPY = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
PAIR_TIMEOUT_S = 90.0
REPEATS = 3
SLOW_S = 2.0
"""A transfer that takes longer is not repeated: the figure is bad enough."""
TRANSFER_TIMEOUT_S = 30.0
COLUMNS = ("what", "block", "order", "first_ms", "ms", "gb_per_s", "bytes_equal")


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """Measures how fast NIXL reads KV of another process."""

    total_mib: int = 1024
    """The size of one read."""
    regions: int = 32
    """The number of regions that a read is spread over, as KV is over layers."""
    block_kib: tuple[int, ...] = (32, 64, 256, 4096)
    """The sizes of blocks, as far as they divide a region."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for all results."""

    @property
    def region_bytes(self) -> int:
        return self.total_mib * 2**20 // self.regions

    @property
    def block_sizes(self) -> list[int]:
        """The sizes of blocks in bytes."""
        return [size * 1024 for size in self.block_kib if self.region_bytes % (size * 1024) == 0]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The process that holds the data and the process that reads it."""

    name: str
    devices: tuple[str, str]
    """The devices of the holder and of the reader: "cpu", or "cuda:N" as that process sees it."""
    visible: tuple[str, str] = ("", "")
    """CUDA_VISIBLE_DEVICES of the holder and of the reader; empty to leave it as it is."""
    env: Mapping[str, str] = field(default_factory=dict)


def pairs(gpus: int) -> list[Pair]:
    """Return the pairs to compare on this machine. Nodes see only their own GPU, so such pairs come first."""
    if not gpus:
        return [Pair(name="host memory", devices=("cpu", "cpu"))]
    zero = ("cuda:0", "cuda:0")
    found = [Pair(name="one GPU", devices=zero, visible=("0", "0"))]
    if gpus > 1:
        found.append(Pair(name="GPU 0 to 1", devices=zero, visible=("0", "1")))
        found.append(Pair(name="GPU 0 to 1, both visible", devices=("cuda:0", "cuda:1"), visible=("0,1", "0,1")))
    return [each for pair in found for each in (pair, replace(pair, name=f"{pair.name}, GET zcopy on", env=ZCOPY))]


def measure(pair: Pair, options: Handoff) -> Iterator[dict[str, Any]]:
    """Yield a result per block size and order of blocks, as they come; leave no process.

    Raises TimeoutError or RuntimeError.
    """
    deadline = time.monotonic() + PAIR_TIMEOUT_S
    context = multiprocessing.get_context("spawn")
    holds, reads = context.Pipe()
    results, sink = context.Pipe(duplex=False)
    roles: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (hold, (holds, pair.devices[0], options)),
        (read, (reads, sink, pair.devices, options)),
    ]
    processes = [context.Process(target=target, args=args, daemon=True) for target, args in roles]
    with ExitStack() as cleanup:
        for process, visible in zip(processes, pair.visible, strict=True):
            shown = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
            with mock.patch.dict(os.environ, {**pair.env, **shown}):
                process.start()
            cleanup.callback(_end, process)
        sink.close()
        while True:
            if not results.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("it did not end in time")
            try:
                found = results.recv()
            except EOFError:
                raise RuntimeError("the reader died") from None
            if found is None:
                return
            if isinstance(found, str):
                raise RuntimeError(found)
            yield found


def _end(process: Any) -> None:
    process.join(2.0)
    process.kill()
    process.join()


def hold(link: Any, device: str, options: Handoff) -> None:
    """Be the process whose memory is read."""
    agent = _agent("holder", device)
    regions = _filled(options, device)
    agent.register_memory(regions)
    link.send((agent.get_agent_metadata(), [region.data_ptr() for region in regions]))
    link.recv()  # The reader is done.


def read(link: Any, sink: Any, devices: tuple[str, str], options: Handoff) -> None:
    """Be the process that reads: send the results and then None, or a text on what went wrong."""
    try:
        for found in _read_all(link, devices, options):
            sink.send(found)
        sink.send(None)
    except Exception as error:  # The parent has no other way to learn it.
        sink.send(f"{type(error).__name__}: {error}")
    link.send("done")


def _read_all(link: Any, devices: tuple[str, str], options: Handoff) -> Iterator[dict[str, Any]]:
    import torch

    agent = _agent("reader", devices[1])
    regions = [torch.zeros(options.region_bytes, dtype=torch.uint8, device=devices[1]) for _ in range(options.regions)]
    agent.register_memory(regions)
    metadata, remote = link.recv()
    peer = agent.add_remote_agent(metadata)
    expected = _filled(options, devices[1])
    for block in options.block_sizes:
        sides = [
            ("NIXL_INIT_AGENT", [region.data_ptr() for region in regions], devices[1]),
            (peer, remote, devices[0]),
        ]
        lists = [_blocks(agent, name, bases, options, block, device) for name, bases, device in sides]
        for order in ("ascending", "shuffled"):
            theirs = list(range(options.region_bytes // block))
            if order == "shuffled":  # Neighbours may be merged into one transfer; this order leaves no neighbours.
                random.Random(1).shuffle(theirs)
            times = _timed(agent, lists, theirs, options, regions)
            index = torch.tensor(theirs, device=devices[1])
            middle = statistics.median(times[1:] or times)
            yield {
                "block": block,
                "order": order,
                "first_ms": round(times[0] * 1e3, 2),
                "ms": round(middle * 1e3, 2),
                "repeats": len(times) - 1,
                "gb_per_s": round(options.total_mib * 2**20 / middle / 1e9, 2),
                "bytes_equal": all(
                    torch.equal(found.view(-1, block), sent.view(-1, block)[index])
                    for found, sent in zip(regions, expected, strict=True)
                ),
            }


def _timed(agent: Any, lists: list[Any], theirs: list[int], options: Handoff, regions: list[Any]) -> list[float]:
    """Return the seconds of each read. The first one includes the setup that UCX makes at first use."""
    import torch

    count = len(theirs)
    ours = list(range(options.regions * count))
    remote = [region * count + block for region in range(options.regions) for block in theirs]
    times: list[float] = []
    while len(times) <= REPEATS and not (times and times[-1] > SLOW_S):
        for region in regions:
            region.zero_()
        if regions[0].is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", lists[0], ours, lists[1], remote)
        state = agent.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - began > TRANSFER_TIMEOUT_S:
                raise TimeoutError(f"a read of {options.total_mib} MiB took over {TRANSFER_TIMEOUT_S:.0f} s")
            state = agent.check_xfer_state(handle)
        times.append(time.perf_counter() - began)
        if state != "DONE":
            raise RuntimeError(f"a read ended as {state}")
        agent.release_xfer_handle(handle)
    return times


def _agent(name: str, device: str) -> Any:
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    if device != "cpu":  # An engine, too, has its CUDA context when it makes its agent.
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    # As in the connector: UCX's own threads would have no CUDA context, and so no cuda_ipc.
    return nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=0))


def _filled(options: Handoff, device: str) -> list[Any]:
    """Return regions of random bytes, the same in both processes, allocated one by one as a KV cache's layers are."""
    import torch

    regions = []
    for number in range(options.regions):
        generator = torch.Generator(device=device).manual_seed(number)
        regions.append(torch.empty(options.region_bytes, dtype=torch.uint8, device=device).random_(generator=generator))
    return regions


def _blocks(agent: Any, name: str, bases: list[int], options: Handoff, block: int, device: str) -> Any:
    """Prepare the descriptor list of all blocks of all regions, region by region."""
    kind, number = ("DRAM", 0) if device == "cpu" else ("VRAM", int(device.split(":")[1]))
    places = [(base + start, block, number) for base in bases for start in range(0, options.region_bytes, block)]
    return agent.prep_xfer_dlist(name, agent.get_xfer_descs(places, kind))


def show(results: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS, "", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in results:
        rest = ", ".join(f"{name} {value}" for name, value in one.items() if name not in COLUMNS)
        table.add_row(*(str(one.get(column, "")) for column in COLUMNS), rest)
    Console(highlight=False, markup=False, width=160).print(table)


def main(options: Handoff) -> int:
    facts = {"versions": conditions.versions(), "hardware": conditions.hardware()}
    print(json.dumps(facts), flush=True)
    results: list[dict[str, Any]] = []
    for pair in pairs(len(smi("--query-gpu=index"))):
        try:
            for found in measure(pair, options):
                results.append({"what": pair.name, **found})
                print(json.dumps(results[-1]), flush=True)
        except (RuntimeError, TimeoutError) as error:  # The results so far are worth showing.
            results.append({"what": pair.name, "error": str(error)})
            print(json.dumps(results[-1]), flush=True)
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return int(any("error" in one or one.get("bytes_equal") is False for one in results))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Handoff)))
