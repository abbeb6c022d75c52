"""Lets the threads of a CPU engine sleep while they wait for messages.

Two of them look for messages without a pause, and take the cores from the threads that compute:

- vLLM's engine and its worker, for a second after each message, with sched_yield in between
  (vllm/distributed/device_communicators/shm_broadcast.py, `SpinCondition`; no setting changes it).
- NIXL's progress thread, always: its Python interface sets the timeout of the thread's poll to 0
  (nixl_cu12/_api.py, `pthrDelay`). With a timeout it still wakes at once when a message comes.

Worse, threads that compute in short steps beside spinning threads of another priority upset Linux 6.18's scheduler,
where each session has its own share of the cores (autogroup). All other sessions and the kernel's own threads were seen
to wait for half a minute while one session spun, and a process took minutes to start.

Only on a CPU: on a GPU with one rank there is no queue in shared memory, with more a step is too short for a sleep, and
a core for NIXL is worth its microseconds. Remove each when its library can be told not to spin. Owns: these two
replacements. Must not know: what the messages are.
"""

from __future__ import annotations

import time
from typing import Any

from nixl import _api as nixl
from vllm.distributed.device_communicators import shm_broadcast

NAP_S = 0.0001
"""The pause between two looks. Linux adds about 50 microseconds. A step on a CPU takes milliseconds."""
POLL_US = 2000
"""The timeout of NIXL's poll, for the events that UCX misses. NIXL rounds it up to whole milliseconds."""


def nap_instead() -> None:
    """Sleep, from now on, where vLLM would yield. Raises AttributeError if vLLM has no such function."""
    if not callable(shm_broadcast.sched_yield):
        raise AttributeError("vllm.distributed.device_communicators.shm_broadcast.sched_yield")
    shm_broadcast.sched_yield = lambda: time.sleep(NAP_S)


def poll_with_timeout() -> None:
    """Give the NIXL agents that are made from now on a progress thread that sleeps. Raises AttributeError if NIXL has
    no such setting."""
    config = nixl.nixlBind.nixlAgentConfig
    if not hasattr(config, "pthrDelay"):
        raise AttributeError("nixlAgentConfig.pthrDelay")

    class Config(config):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, POLL_US if name == "pthrDelay" else value)

    nixl.nixlBind.nixlAgentConfig = Config
