"""The words for each figure of a report: its title, what it shows, and how it was measured."""

from __future__ import annotations

_AGAIN = "Hatched: running requests again in another crowd gave other bits; the counts are under the bars."

CAPTIONS: dict[str, tuple[str, str]] = {
    "throughput": (
        "Throughput per workload and system",
        """Output tokens per second from the first request sent to the last one done, on the client's clock, without the
        warm-up. Bars are medians over repeats, whiskers the lowest and the highest repeat. """
        + _AGAIN,
    ),
    "throughput-per-gpu": (
        "Throughput per GPU",
        "The same, divided by all GPUs that the system has, those for prefill among them. " + _AGAIN,
    ),
    "timeline": (
        "Prefill and decode over time",
        """A prompt's tokens count when its first output token reaches the client, since nobody outside sees them
        earlier; output tokens count when they come, but for the first ones, which prefill computes. The first repeat
        of each system.""",
    ),
    "ttft": (
        "Time to first token",
        """Share of requests whose first token came within this time after they were sent, over all repeats. Waiting
        for a slot or for other prompts is part of it. Further left is better.""",
    ),
    "tpot": (
        "Time per output token",
        """Share of requests with at most this mean time per token after the first one, over all repeats. Further left
        is better.""",
    ),
    "scaling": (
        "Scaling with concurrency",
        """Output throughput of the same workload with more and more requests in flight; medians over repeats, whiskers
        the lowest and the highest.""",
    ),
    "padding": (
        "What padding costs a single request",
        """One request at a time, in decode steps of a fixed number of rows: all rows but one are padding. Systems that
        do not pad are level lines. Both axes are logarithmic. This is the worst case of a fixed shape.""",
    ),
    "ablation": (
        "What each constraint costs",
        """Output throughput as a share of std's: std+nosplit is std without split-KV in decode attention, std+isolated
        is std with each prompt's prefill by itself, and colocated has both and decode steps of a fixed shape. Medians
        over repeats, whiskers the lowest and the highest.""",
    ),
    "kernels": (
        "Kernels by themselves",
        """Median latency of a call, a line from the fastest to the slowest one, and how many times std's median it is.
        Whether bits depend on the batch or on the place in it was measured, with the same rows in other batches and
        other places. The smallest and the largest number of rows are drawn; the table below has all.""",
    ),
}
