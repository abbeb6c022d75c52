"""How long a cluster takes to start, stage by stage: with nothing compiled before, and again with what that start kept.

`python -m tests.gpu.start --model DIR [--prefill-gpus 0] [--decode-gpus 0]`. Prints a JSON line per start: the seconds
until a pair is ready, and for each node the seconds of each stage that it enters (corun/observe/stages.py). The first
start has empty caches of its own (vLLM's, Inductor's, Triton's, and one for certificates), and the second one the same.
The user's stay as they are.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import tyro

from corun.observe.stages import Reader
from tests.nodes import Topology, running

LOOK_S = 0.1
"""The time between two looks at the logs: stages that are shorter may be missed."""
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "user",
}
BEFORE = "starting Python"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Measures a start without compiled code, and one with it."""

    topology: tyro.conf.OmitArgPrefixes[Topology]
    starts: int = 2
    """The number of starts, the first with empty caches."""
    logs: Path = Path("start-logs")


class Watch:
    """Follows the logs of nodes, and notes when each node entered which stage."""

    def __init__(self, logs: dict[str, Path], began: float) -> None:
        self.began = began
        self._entered = {name: [(BEFORE, began)] for name in logs}
        self._readers = {name: Reader(log) for name, log in logs.items()}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Look at the logs all the time, in a thread."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_S):
                self.look(time.monotonic())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self, now: float) -> None:
        for name, reader in self._readers.items():
            stage = reader.stage(0)
            if stage and stage != self._entered[name][-1][0]:
                self._entered[name].append((stage, now))

    def seconds(self, end: float) -> dict[str, dict[str, float]]:
        """Return the seconds of each node in each stage, in order. The last one lasts until `end`."""
        return {
            name: {stage: round(after - at, 1) for (stage, at), (_, after) in pairwise([*entered, ("", end)])}
            for name, entered in self._entered.items()
        }


def measure(topology: Topology, logs: Path) -> dict[str, object]:
    """Start the cluster once and stop it; return the seconds."""
    watch = Watch({node.name: logs / f"{node.name}.log" for node in topology.nodes}, began=time.monotonic())
    with watch.following(), running(topology, logs):
        ready = time.monotonic()
    return {"ready_s": round(ready - watch.began, 1), "nodes": watch.seconds(ready)}


def main(options: Start) -> None:
    topology = replace(options.topology, keep_certificates=True)
    with tempfile.TemporaryDirectory(prefix="corun-start-") as caches:
        variables = {name: f"{caches}/{directory}" for name, directory in CACHES.items()}
        for number in range(options.starts):
            with mock.patch.dict(os.environ, variables):
                measured = measure(topology, options.logs / str(number))
            kept = sum(file.stat().st_size for file in Path(caches).rglob("*") if file.is_file())
            print(json.dumps({"start": "warm" if number else "cold", **measured, "caches_mib": kept >> 20}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Start))
