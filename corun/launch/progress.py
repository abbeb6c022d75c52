"""What the user of `corun up` is told, and the commands to try once a cluster has started.

This module must not know how processes are run.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from corun.client.progress import new_bar
from corun.client.routers import DEFAULT_ADDRESS
from corun.config.cluster_file import PoolSpec
from corun.config.fields import is_loopback
from corun.observe.stages import LAST

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

QUIET_S = 10.0
"""The longest time in seconds without a message during a start, unless a bar shows how far it is."""
PASSED = {
    "importing vLLM": 0.02,
    "starting the engine": 0.3,
    "loading the weights": 0.4,
    "hashing the weights": 0.45,
    "compiling, and measuring memory for KV": 0.5,
    "warming up, and capturing graphs": 0.55,
    "testing itself": 0.6,
    "testing other ways": 0.85,
    LAST: 0.98,
}
"""The share of a node's start that has passed when a stage begins, by the beginning of its name. It is a guess: what
takes long depends on the model and the device. Before these stages, such as while a model is fetched, it is 0."""


class Progress:
    """Prints lines with the time since the start on stderr. `change` prints a repeated line only once.

    On a terminal, a bar below the lines shows how far the start of the nodes is, until `close`.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._start = self._last = time.monotonic()
        self._said: dict[str, str] = {}
        self._stages: dict[str, tuple[str, float]] = {}  # The stage of each starting node, and when it began.

    def __call__(self, text: str) -> None:
        self._last = time.monotonic()
        with suppress(OSError):  # The terminal is closed, or the disk is full; the cluster must still run and stop.
            print(f"[{self._last - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def change(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self(f"{subject}: {text}")

    def starting(self, doing: Mapping[str, str], *, nodes: int = 0) -> None:
        """Report what the nodes that are not ready do now.

        doing: the stage by node name; empty: not known. nodes: the number of all nodes that are to be ready.
        """
        now = time.monotonic()
        waiting = []
        for name, stage in doing.items():
            if self._stages.get(name, ("", 0.0))[0] != stage:
                self._stages[name] = stage, now
                if stage:
                    self(f"{name}: {stage}")
            waiting.append(f"{name} ({stage}, {now - self._stages[name][1]:.0f} s)" if stage else name)
        if nodes and sys.stderr.isatty():
            self._draw(doing, nodes)
        elif waiting and time.monotonic() - self._last > QUIET_S:
            self(f"waiting for {', '.join(waiting)}")

    def _draw(self, doing: Mapping[str, str], nodes: int) -> None:
        if self._bar is None:
            self._bar = new_bar(unit="share")
            self._bar.add_task("", total=1.0)
            with suppress(OSError):
                self._bar.start()
        ready = nodes - len(doing)
        share = (ready + sum(map(passed, doing.values()))) / nodes
        self._bar.update(self._bar.task_ids[0], completed=share, description=f"{ready} of {nodes} nodes ready")

    def close(self) -> None:
        """Take the bar away. Lines can still be printed."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()


def passed(stage: str) -> float:
    """Return the share of a node's start that has passed when it begins a stage."""
    return next((share for name, share in PASSED.items() if stage.startswith(name)), 0.0)


def next_steps(pool: PoolSpec, address: str) -> list[str]:
    """Return commands that a user may try first, with all options that they need to reach the cluster."""
    security = pool.security
    host, _, port = address.rpartition(":")
    options = {
        "router": "" if is_loopback(host) and port == DEFAULT_ADDRESS.rpartition(":")[2] else address,
        "tls-ca": security.tls_ca,
        "tls-name": security.tls_name,
        "tls-cert": _beside(security.tls_ca, "client.pem") if security.tls_clients else "",
        "tls-key": _beside(security.tls_ca, "client.key") if security.tls_clients else "",
        "token-file": _beside(security.client_tokens_file, "client.token") if security.client_tokens_file else "",
    }
    words = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    commands = (["generate", "Once upon a time", "--seed", "42"], ["status"])
    return [shlex.join(["corun", *command, *words]) for command in commands]


def _beside(path: str, name: str) -> str:
    """Return the path of a client's own file, where `corun certs` puts it, or a placeholder if it is not there."""
    found = Path(path).with_name(name)
    return str(found) if found.exists() else f"YOUR-{name}"
