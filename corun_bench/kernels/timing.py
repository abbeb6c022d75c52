"""How long a kernel's launch takes on cold inputs. This module must not know what a kernel computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from corun_bench.kernels.invariance import Launch

_WARM_UPS = _FEWEST = 3
# More than the L2 cache of any GPU: what a launch reads comes from memory, as a model's weights do.
_FLUSH_BYTES = 256 << 20
# About a millisecond. While the GPU waits, the host queues the launch and both events: launching is not timed.
_HEAD_START_CYCLES = 2_000_000


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
