"""What the user is told while a cluster starts, and which commands to try once it has started.

This module must not know how processes are run.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from corun.client.request import DEFAULT_ADDRESS
from corun.config.cluster_file import PoolSpec, Security
from corun.config.fields import is_loopback
from corun.launch.progress import Progress

QUIET_S = 10.0
"""The longest time in seconds without a message during a start."""


class Starting:
    """Tells the user what the nodes of a cluster do until they are ready."""

    def __init__(self, say: Progress) -> None:
        self._say = say
        self._since: dict[str, tuple[str, float]] = {}  # The stage of each node, and when it began.

    def tell(self, doing: Mapping[str, str]) -> None:
        """Report what the nodes that are not ready do now. doing: the stage by node name; empty: not known."""
        now = time.monotonic()
        for name, stage in doing.items():
            if self._since.get(name, ("", 0.0))[0] != stage:
                self._since[name] = stage, now
                if stage:
                    self._say(f"{name}: {stage}")
        if doing and self._say.quiet_s > QUIET_S:
            self._say(f"waiting for {', '.join(self._one(name, now) for name in doing)}")

    def _one(self, name: str, now: float) -> str:
        stage, since = self._since.get(name, ("", now))
        return f"{name} ({stage}, {now - since:.0f} s)" if stage else name


def next_steps(pool: PoolSpec, address: str) -> list[str]:
    """Return commands that a user may try first, with all options that they need to reach the cluster."""
    words = _reaching(pool.security, address)
    return [
        shlex.join(["corun", "generate", "Once upon a time", "--seed", "42", *words]),
        shlex.join(["corun", "status", *words]),
    ]


def _reaching(security: Security, address: str) -> Sequence[str]:
    host, _, port = address.rpartition(":")
    is_default = is_loopback(host) and port == DEFAULT_ADDRESS.rpartition(":")[2]
    words = [] if is_default else ["--router", address]
    if security.tls_ca:
        words += ["--tls-ca", security.tls_ca]
    if security.tls_name:
        words += ["--tls-name", security.tls_name]
    if security.tls_clients:
        words += [
            "--tls-cert",
            _beside(security.tls_ca, "client.pem"),
            "--tls-key",
            _beside(security.tls_ca, "client.key"),
        ]
    if security.client_tokens_file:
        words += ["--token-file", _beside(security.client_tokens_file, "client.token")]
    return words


def _beside(path: str, name: str) -> str:
    """Return the path of a client's own file, where `corun certs` puts it, or a placeholder if it is not there."""
    found = Path(path).with_name(name)
    return str(found) if found.exists() else f"YOUR-{name}"
