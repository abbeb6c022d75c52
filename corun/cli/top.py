"""`corun top`: the nodes of a running cluster by what they do now, as `top` shows processes.

Owns what is shown and in which order. It must not know how a terminal is driven (`corun.cli.screen`) nor how rates are
found (`corun.cli.watching`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from corun.cli.gauges import GAUGE_WIDTH, bar_of, curve_of, cut, label, share_of, short
from corun.cli.options import RouterOptions
from corun.cli.screen import Screen, can_show
from corun.cli.status import STATE_STYLES
from corun.cli.watching import Watched
from corun.client.client import AsyncClient
from corun.client.progress import in_figures
from corun.errors import InvalidArgumentError
from corun.observe.rates import Rates, tokens
from corun.types import GONE_AS_PLANNED, ClientStatus, ClusterStatus, NodeRole, NodeState, NodeStatus

FIRST_RATES_S = 10.0
"""The longest wait for the rates of a cluster that is shown once."""
WIDE = 100
"""The columns from which a node has a bar of its slots."""
SortName = Literal["node", "slots", "tokens", "kv", "queue"]


@dataclass(frozen=True, kw_only=True)
class Top:
    """Show what the nodes of a cluster do now, like top.

    Slots, tokens a second, KV and queues of each node, and of all of them together; then what each client has at this
    router, if you are an operator, or else what you have. Rates are means over 5 seconds.
    Keys: s sorts by the next column (n, u, t, v and p by node, used slots, tokens, KV and queued prompt tokens), r
    reverses, arrows scroll, q quits. If stdout is no terminal, the picture is printed once, and the exit code is 4 if
    the cluster cannot serve.

    examples:
      corun top
      corun top --sort slots --interval 0.5
      corun top | head -5
    """

    interval: float = 1.0
    """Seconds between two looks at the cluster."""
    sort: SortName = "tokens"
    """The column by which nodes are sorted, the largest first; names ascend."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)

    def run(self) -> int:
        if not 0.1 <= self.interval <= 3600:
            raise InvalidArgumentError("interval", self.interval, "must be in [0.1, 3600] seconds")
        return asyncio.run(self._run())

    async def _run(self) -> int:
        async with self.cluster.async_client() as client:
            status = await client.get_cluster(clients=True, contracts=False)
            view = View(Watched(status, clients=True), self.cluster.router, sort=self.sort)
            if not can_show():
                return await self._once(client, view)
            screen = Screen(view.picture, keys=view.keys, hint=view.hint)
            return await screen.run(lambda: view.watched.ask(client), self.interval)

    async def _once(self, client: AsyncClient, view: View) -> int:
        """Print one picture as soon as there are rates."""
        end = time.monotonic() + FIRST_RATES_S
        while not view.watched.knows(*NodeRole) and time.monotonic() < end:
            await asyncio.sleep(self.interval)
            view.watched.take(await client.get_cluster(clients=True, contracts=False))
        console = Console(highlight=False, markup=False)
        console.print(view.picture(console.options))
        return 4 if view.watched.status.missing_roles else 0


class View:
    """What is shown of a cluster, and what keys change of it."""

    def __init__(self, watched: Watched, address: str, *, sort: SortName) -> None:
        self.watched = watched
        self._address = address
        self._sort: SortName = sort
        self._is_reversed = False
        letters: dict[str, SortName] = {"n": "node", "u": "slots", "t": "tokens", "v": "kv", "p": "queue"}
        self.keys: dict[str, Callable[[], None]] = {"s": self._next, "r": self._reverse}
        self.keys |= {key: functools.partial(self._choose, name) for key, name in letters.items()}

    def hint(self) -> str:
        return f" s sort: {self._sort}  r reverse"

    def _choose(self, name: SortName) -> None:
        self._sort, self._is_reversed = name, False

    def _next(self) -> None:
        names = list(_ORDERS)
        self._choose(names[(names.index(self._sort) + 1) % len(names)])

    def _reverse(self) -> None:
        self._is_reversed = not self._is_reversed

    def picture(self, options: ConsoleOptions) -> RenderableType:
        status, rates = self.watched.status, self.watched.rates
        parts: list[RenderableType] = [*_summary(self.watched, self._address, is_ascii=options.ascii_only)]
        if trouble := self.watched.trouble:
            parts.insert(1, cut(Text(trouble, "red")))
        nodes = sorted(status.nodes, key=lambda node: _ORDERS[self._sort](node, rates), reverse=self._is_reversed)
        parts += ["", _node_table(nodes, rates, self._sort, options)]
        if status.clients:
            parts += ["", _client_table(status.clients, is_ascii=options.ascii_only)]
        return Group(*parts)


def _none_last(value: float | None) -> float:
    """Sort large numbers first, and what is not known last."""
    return 1.0 if value is None else -value


_ORDERS: dict[SortName, Callable[[NodeStatus, Rates], Any]] = {
    "node": lambda node, _: node.node.ref.node_id,
    "slots": lambda node, _: _none_last(share_of(node.load.used_slots, node.node.slots)),
    "tokens": lambda node, rates: _none_last(rates.of_node(node.node.ref, tokens)),
    "kv": lambda node, _: _none_last(share_of(node.load.used_kv_blocks, node.node.kv_blocks)),
    "queue": lambda node, _: (-node.load.queued_prompt_tokens, -node.in_line),
}
"""What nodes are sorted by, for each name of an order. Equal ones stay in the router's order."""


def _summary(watched: Watched, address: str, *, is_ascii: bool) -> Iterable[Text]:
    """Yield the lines about the cluster as a whole."""
    status, rates = watched.status, watched.rates
    model = status.model.name if status.model else "no node has joined"
    head = Text.assemble(("corun top  ", "bold"), f"{status.router_id} at {address}, {model}")
    if status.fingerprint:
        head.append(f", {status.fingerprint[:8]}", "dim")
    yield cut(head)
    yield cut(_states(status))
    ready = [node for node in status.nodes if node.state is NodeState.READY]
    decodes = [node for node in ready if node.node.role is NodeRole.DECODE]
    used, slots = sum(node.load.used_slots for node in decodes), sum(node.node.slots for node in decodes)
    waiting = sum(node.in_line for node in decodes)
    words = Text.assemble(f" {used:,}/{slots:,}", (f"  {waiting:,} in line", "yellow" if waiting else "dim"))
    queued = f"  queue {status.queued_samples:,}/{status.max_queued_samples:,}"
    words.append(queued, "yellow" if status.queued_samples else "dim")
    yield cut(Text.assemble(label("slots"), bar_of(used, slots, GAUGE_WIDTH, is_ascii=is_ascii), words))
    blocks = sum(node.load.used_kv_blocks for node in decodes), sum(node.node.kv_blocks for node in decodes)
    words = Text(f" {blocks[0]:,}/{blocks[1]:,} blocks of decode nodes")
    yield cut(Text.assemble(label("KV"), bar_of(*blocks, GAUGE_WIDTH, is_ascii=is_ascii), words))
    for name, role in (("decode", NodeRole.DECODE), ("prefill", NodeRole.PREFILL)):
        curve = watched.curves[role]
        rate = rates.of(role, tokens) if curve else None
        words = Text(" not known yet", "dim") if rate is None else Text(f" {in_figures(rate)} tokens/s")
        if rate is not None and role is NodeRole.PREFILL:
            queued_tokens = sum(node.load.queued_prompt_tokens for node in ready if node.node.role is role)
            words.append(f"  {queued_tokens:,} queued", "yellow" if queued_tokens else "dim")
            cached_rate = rates.of(role, lambda load: load.cached_tokens) or 0.0
            if cached := share_of(cached_rate, rate + cached_rate):
                words.append(f"  {cached:.0%} cached")
        yield cut(Text.assemble(label(name), curve_of([*curve], is_ascii=is_ascii), words))
    yield cut(_counts(status, rates))


def _states(status: ClusterStatus) -> Text:
    """Return how many nodes are in which state."""
    text = Text.assemble(label("nodes"))
    counts = Counter(GONE_AS_PLANNED if node.detail == GONE_AS_PLANNED else node.state for node in status.nodes)
    parts = []
    for state in (*NodeState, GONE_AS_PLANNED):
        if number := counts[state]:
            name, style = (state, "dim") if isinstance(state, str) else (state.value, STATE_STYLES[state])
            parts.append(Text(f"{number:,} {name}", style))
    text.append_text(Text(", ").join(parts) if parts else Text("none", "red"))
    if status.missing_roles:
        text.append("  no pair of nodes is ready", "red")
    return text


def _counts(status: ClusterStatus, rates: Rates) -> Text:
    """Return what has happened since the router started."""
    text = Text.assemble(label("samples"), f"{status.finished_samples:,} finished")
    if rates.finished is not None:
        text.append(f" ({in_figures(rates.finished)}/s)")
    audited = status.audit.matched + status.audit.mismatched
    text.append(f", {status.refused_requests:,} refused", "yellow" if status.refused_requests else "")
    text.append(f", {audited:,} audited, ")
    text.append(f"{status.mismatches:,} mismatches", "red" if status.mismatches else "")
    return text


def _node_table(nodes: Sequence[NodeStatus], rates: Rates, sort: SortName, options: ConsoleOptions) -> Table:
    """Return the table of nodes, with as many columns as there is room for."""
    is_wide = options.max_width >= WIDE
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
    for title, name, is_right in _TITLES:
        mark = ("v" if options.ascii_only else "▾") if name == sort else ""
        # The column of names takes what the numbers leave.
        ratio = 1 if name == "node" else None
        style = "reverse" if mark else ""
        justify: Literal["right", "left"] = "right" if is_right else "left"
        heading = Text(title + mark, style)
        table.add_column(heading, justify=justify, ratio=ratio, no_wrap=True, overflow="ellipsis")
        if name == "slots" and is_wide:
            table.add_column("", width=GAUGE_WIDTH)
    for node in nodes:
        cells = list(_cells(node, rates))
        if is_wide:
            bar = bar_of(node.load.used_slots, node.node.slots, GAUGE_WIDTH, is_ascii=options.ascii_only)
            cells.insert(4, bar if node.node.slots else Text())
        table.add_row(*cells, style="dim" if node.state is NodeState.LOST else "")
    return table


def _client_table(clients: Sequence[ClientStatus], *, is_ascii: bool) -> Table:
    """Return the table of clients, those with the most slots first."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
    table.add_column("client", ratio=1, no_wrap=True, overflow="ellipsis")
    for title in ("weight", "slots", "line", "queue", "of slots in use", ""):
        table.add_column(title, justify="right", no_wrap=True)
    everyone = sum(one.decoding_samples for one in clients)
    for one in sorted(clients, key=lambda one: (-one.decoding_samples, -one.leased_samples)):
        line = one.leased_samples - one.decoding_samples
        share = share_of(one.decoding_samples, everyone) or 0.0
        table.add_row(
            Text(one.name),
            str(one.weight),
            str(one.decoding_samples),
            Text(str(line) if line else "", "yellow"),
            Text(short(one.waiting_samples) if one.waiting_samples else "", "yellow"),
            bar_of(one.decoding_samples, everyone, len("of slots in use"), is_ascii=is_ascii),
            f"{share:.0%}",
        )
    return table


_TITLES: tuple[tuple[str, SortName | None, bool], ...] = (
    ("node", "node", False),
    ("role", None, False),
    ("state", None, False),
    ("slots", "slots", True),
    ("line", None, True),
    ("KV", "kv", True),
    ("tok/s", "tokens", True),
    ("step/s", None, True),
    ("queue", "queue", True),
    ("heard", None, True),
)
"""The columns: title, the order that it stands for, and whether it holds numbers."""


def _cells(node: NodeStatus, rates: Rates) -> Iterable[Text]:
    info, load = node.node, node.load
    is_decode = info.role is NodeRole.DECODE
    is_gone = node.detail == GONE_AS_PLANNED
    yield Text(info.ref.node_id)
    yield Text(info.role.value)
    yield Text("gone" if is_gone else node.state.value, "dim" if is_gone else STATE_STYLES[node.state])
    yield Text(f"{load.used_slots}/{info.slots}" if is_decode else "")
    yield Text(str(waiting) if (waiting := node.in_line) else "", "yellow")
    yield Text("" if (share := share_of(load.used_kv_blocks, info.kv_blocks)) is None else f"{share:.0%}")
    drawn, steps = rates.of_node(info.ref, tokens), rates.of_node(info.ref, lambda load: load.steps)
    yield Text("" if drawn is None else in_figures(drawn))
    yield Text("" if steps is None or not is_decode else in_figures(steps))
    yield Text(short(load.queued_prompt_tokens) if load.queued_prompt_tokens else "", "yellow")
    yield Text(f"{node.last_heartbeat_ms / 1000:.1f}s" if node.last_heartbeat_ms < 99_950 else ">99s")
