"""Lets vLLM's processes sleep a moment while they wait for each other.

The engine and its worker look for messages in shared memory. For a second after each message they do so without a
pause, with sched_yield in between (vllm/distributed/device_communicators/shm_broadcast.py, `SpinCondition`; no setting
changes it). So on a CPU an engine keeps two cores busy while it has any traffic, and takes them from the threads that
compute. Worse, Linux 6.18 lets each yield push a task back in the order of its run queue: others that were ready to run
were seen to wait for tens of seconds.

Only on a CPU: on a GPU with one rank there is no such queue, and with more a step is too short for a sleep. Remove this
when vLLM can be told not to spin. Owns: that function. Must not know: what the messages are.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast

NAP_S = 0.0001
"""The pause between two looks. Linux adds about 50 microseconds. A step on a CPU takes milliseconds."""


def nap_instead() -> None:
    """Sleep, from now on, where this process would yield. Raises AttributeError if vLLM has no such function."""
    if not callable(shm_broadcast.sched_yield):
        raise AttributeError("vllm.distributed.device_communicators.shm_broadcast.sched_yield")
    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(NAP_S)
