"""When Python's garbage collections run in a router's process. The event loop, and all streams, stand still meanwhile.

A collection takes about 1 us for each object that it looks at, and a sample that waits has some 40 of them. A router
under siege stood still for up to 0.75 s while thousands of samples waited, most likely for this. So automatic
collections look at few objects, and a full one runs while hardly any sample waits. What a request is made of leaves no
work to them: it is in no cycle when the request ends (tests/router/test_garbage.py). Must not know what they look at.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG = 10_000, 5
"""The thresholds of the younger two generations. The first is the number of allocations, less deallocations, that
starts a collection of the youngest one; the messages of one step reach Python's own 700 several times. A collection of
both looks at about 50,000 objects."""
NEVER = 2**30
FEW = 512
"""The most samples that may wait while a full collection runs."""
MOST = 400
"""The number of collections of the younger two after which a full one runs whoever waits: after 20 million allocations,
less deallocations. Hardly any object is part of a cycle, so that much of it is never garbage."""
LOOK_S = 5.0
"""The time between two looks."""


def begin(num_waiting: Callable[[], int]) -> None:
    """Collect as this module says for as long as the running loop runs. Call it once the process has made what it
    keeps.

    num_waiting: returns the number of samples that wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG, NEVER)
    asyncio.get_running_loop().call_later(LOOK_S, _look_again, num_waiting)


def look(num_waiting: int) -> None:
    """Run a full collection if there is something to look at, and now is the time."""
    since_last = gc.get_count()[2]
    if since_last >= MOST or (since_last and num_waiting <= FEW):
        gc.collect()


def _look_again(num_waiting: Callable[[], int]) -> None:
    look(num_waiting())
    asyncio.get_running_loop().call_later(LOOK_S, _look_again, num_waiting)
