"""`corun scale`: change the number of nodes of a running cluster. The work is done in `corun.launch`, which needs the
serving packages."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated

import tyro

from corun.config.cluster_file import ROLES, check_replicas
from corun.config.extras import needs_extra
from corun.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Change how many nodes a running cluster has.

    New nodes join as soon as there is room for them. Surplus nodes drain: their work ends there, or continues on other
    nodes with the same bits. The command returns once the nodes are as wanted.

    examples:
      corun scale prefill=3
      corun scale prefill=2 decode=4
      corun scale big.decode=2                              of pool big, where there are several
      corun scale decode=4 --ray-address 10.0.0.7:6379      of a corun up on another machine of that Ray
    """

    counts: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[POOL.]ROLE=N")]]
    """The wanted number of nodes: prefill=N or decode=N."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """The Ray cluster that corun up runs on, which this machine must be a host of; by default that of the last corun up
    on this machine."""
    timeout_s: float = 900.0
    """Longest wait for the change, in seconds."""

    def run(self) -> int:
        if not 0 < self.timeout_s <= 86_400:
            raise InvalidArgumentError("timeout_s", self.timeout_s, "must be in (0, 86400] seconds")
        pool, counts = parse_counts(self.counts)
        with needs_extra("corun scale", "cpu"):
            control = importlib.import_module("corun.launch.control")
            done: str = control.scale(pool, counts, ray_address=self.ray_address, timeout_s=self.timeout_s)
        print(f"scaled {done}")
        return 0


def parse_counts(words: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """Return the name of the pool, empty if none is named, and the numbers of its processes by role.

    Raises InvalidArgumentError for a word that is not [POOL.]ROLE=N, and for several pools at once.
    """
    if not words:
        raise InvalidArgumentError("counts", (), "must name a role and a number, as in prefill=3")
    pools, counts = set(), {}
    for word in words:
        name, _, number = word.partition("=")
        pool, _, role = name.rpartition(".")
        if role not in ROLES or not (number.isascii() and number.removeprefix("-").isdigit()):
            raise InvalidArgumentError("counts", word, f"must be [POOL.]ROLE=N, with a role of {', '.join(ROLES)}")
        check_replicas(name, int(number))
        pools.add(pool)
        counts[role] = int(number)
    if len(pools) > 1:
        raise InvalidArgumentError("counts", words, "must be of one pool at a time")
    return pools.pop(), counts
