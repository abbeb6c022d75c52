"""`corun status`: show the cluster as a picture of its nodes, its queue and every decode slot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from corun.cli.options import RouterOptions
from corun.cli.screen import Screen, can_show
from corun.cli.watching import Watched
from corun.errors import InvalidArgumentError
from corun.records.rows import to_line
from corun.types import GONE_AS_PLANNED, ClusterStatus, Freedom, NodeRole, NodeState, NodeStatus, state_in_words

SLOTS_PER_LINE = 64
WATCH_S = 2.0
STATE_STYLES = {
    NodeState.READY: "green",
    NodeState.JOINING: "yellow",
    NodeState.DRAINING: "yellow",
    NodeState.LOST: "red",
    NodeState.REFUSED: "red",
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show slots, queue, nodes and fingerprint.

    The exit code is 4 while the cluster cannot serve: no router answers, or no pair of nodes is ready.

    examples:
      corun status
      corun status --watch
      corun status --watch 0.5 --json
    """

    watch: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="[SECONDS]")] = None
    """Show the status every so many seconds, by default 2, until q or Ctrl-C: on a terminal as one live picture."""
    json: bool = False
    """Print one JSON object instead, with --watch one a line."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)

    def run(self) -> int:
        if self.watch is not None:
            interval_s = self.watch[0] if self.watch else WATCH_S
            if len(self.watch) > 1 or not 0.1 <= interval_s <= 3600:
                raise InvalidArgumentError("watch", self.watch, "must be one number in [0.1, 3600], of seconds")
            return asyncio.run(self._watch(interval_s))
        with self.cluster.client() as client:
            status = client.get_cluster()
        self._print(status)
        return 4 if status.missing_roles else 0

    def _print(self, status: ClusterStatus) -> None:
        if self.json:
            print(to_line(status_to_dict(status)), flush=True)
        else:
            console = Console(highlight=False, markup=False)
            console.print(picture(status, self.cluster.router, console.options))

    async def _watch(self, interval_s: float) -> int:
        async with self.cluster.async_client() as client:
            watched = Watched(await client.get_cluster())
            if can_show() and not self.json:

                def draw(options: ConsoleOptions) -> RenderableType:
                    lines = [Text(watched.trouble, "red", no_wrap=True, overflow="ellipsis")] if watched.trouble else []
                    return Group(*lines, picture(watched.status, self.cluster.router, options))

                return await Screen(draw, keys={}, hint=str).run(lambda: watched.ask(client), interval_s)
            while True:
                self._print(watched.status)
                await asyncio.sleep(interval_s)
                watched.take(await client.get_cluster())
                if not self.json:
                    print()  # Between two pictures.


def picture(status: ClusterStatus, address: str, options: ConsoleOptions) -> RenderableType:
    """Return the whole status, for a terminal."""
    audit = status.audit
    audits = _facts(
        audited=f"{audit.matched + audit.mismatched} ({audit.same_node} on the same node)",
        mismatches=audit.mismatched,
        failed=audit.failed,
        skipped=audit.skipped,
        waiting=audit.waiting,
    )
    if audit.last_mismatch:
        audits.append(f"\nlast mismatch {audit.last_mismatch}", "red" if audit.mismatched else "")
    decodes = [node for node in status.nodes if node.node.role is NodeRole.DECODE and node.node.slots]
    return Group(
        _facts(router=f"{status.router_id} at {address}"),
        _facts(model=status.model.name if status.model else "none: no node has joined"),
        _facts(fingerprint=status.fingerprint or "none: no node has joined"),
        _facts(
            queue=f"{status.queued_samples} of {status.max_queued_samples} samples waiting",
            finished=status.finished_samples,
            mismatches=status.mismatches,
        ),
        audits,
        "",
        _node_table(status),
        *((refusals,) if (refusals := _refusals(status.nodes)) else ()),
        *(line for node in decodes for line in slot_map(node, is_ascii=options.ascii_only)),
    )


def _facts(**facts: object) -> Text:
    """Return a line of names in bold, each with its value. Mismatches are red if there are any."""
    text = Text()
    for name, value in facts.items():
        text.append(f"{', ' if text else ''}{name} ", "bold")
        text.append(str(value), "red" if name == "mismatches" and value else "")
    return text


def slot_map(node: NodeStatus, *, is_ascii: bool) -> Iterator[Text]:
    """Yield the slots of a decode node as lines of squares, as many of them full as samples decode."""
    used, total = node.load.used_slots, node.node.slots
    words = f"{used} of {total} slots in use, {node.in_line} in line"
    yield Text.assemble("\n", (f"{node.node.ref.node_id} ", "bold"), words)
    full, empty = ("#", ".") if is_ascii else ("■", "□")
    squares = [(full, "green") if slot < used else (empty, "dim") for slot in range(total)]
    for start in range(0, total, SLOTS_PER_LINE):
        yield Text.assemble("  ", *squares[start : start + SLOTS_PER_LINE])


def status_to_dict(status: ClusterStatus) -> dict[str, Any]:
    """Return the status as plain values for JSON, with contracts as objects."""
    values = asdict(status, dict_factory=lambda items: {name: getattr(value, "value", value) for name, value in items})
    for node in values["nodes"]:
        node["node"]["contract"] = json.loads(node["node"].pop("contract_json") or "null")
    return {"serving": not status.missing_roles, **values}


FREEDOMS = {
    Freedom.ROWS.value: "smaller steps",
    Freedom.PACKED.value: "several prompts in a step",
    Freedom.CONTEXTS.value: "prompts with a context in a step with others",
    Freedom.CHUNKS.value: "prompts cut anywhere",
    Freedom.MIXED.value: "prompts beside outputs in a step",
    Freedom.SCORES.value: "scores with the bits of outputs",
}
"""What a freedom is, for people. One of a later version is shown by its name."""


WITHOUT = "Nodes do without what follows. Outputs have the same bits, at a lower speed:"


def _refusals(nodes: tuple[NodeStatus, ...]) -> Text:
    """Return a line for every freedom that nodes do without, with the reason, below what this means for a user.

    Nodes with the same reason share a line. A node that is not in use says why in its state.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for status in nodes:
        for one in status.node.freedoms:
            if one.refused and status.state not in (NodeState.LOST, NodeState.REFUSED):
                found.setdefault((one.name, one.refused), []).append(status.node.ref.node_id)
    lines = [f"no {FREEDOMS.get(name, name)} on {', '.join(ids)}: {why}" for (name, why), ids in found.items()]
    return Text.assemble(f"\n{WITHOUT}\n", ("\n".join(lines), "dim")) if lines else Text()


def _node_table(cluster: ClusterStatus) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("node", "role", "state", "load", "done", "heard"):
        table.add_column(name, overflow="fold")  # Nothing is cut off, however narrow the terminal.
    for status, is_colocated in ((side, len(sides) > 1) for sides in cluster.engines for side in sides):
        node, load = status.node, status.load
        state = Text(state_in_words(status.state, status.detail))
        if status.detail != GONE_AS_PLANNED:
            state.stylize(STATE_STYLES[status.state], 0, len(status.state.value))
        busy = f"{load.queued_prompt_tokens} queued tokens"
        done = f"{load.tokens} tokens\n{load.cached_tokens} cached"
        if load.cached_tokens:
            done += f"\n{load.cached_tokens / (load.cached_tokens + load.tokens):.0%} from cache"
        if node.role is NodeRole.DECODE:
            busy, done = (
                f"{load.used_slots}/{node.slots} slots, {status.in_line} in line",
                f"{load.tokens} tokens\n{load.steps} steps",
            )
            if tokens := load.kv_reads.prompt_tokens:
                done += f"\n{load.kv_reads.shared_tokens / tokens:.0%} of KV shared"
        busy += f"\n{load.used_kv_blocks}/{node.kv_blocks} KV blocks"
        heard = f"{status.last_heartbeat_ms / 1000:.1f} s ago"
        marks = ["colocated"] * is_colocated + [f"+{one.name}" for one in node.freedoms if not one.refused]
        role = "\n".join([node.role.value, *marks])
        table.add_row(f"{node.ref.node_id}\n@{node.ref.generation}", role, state, busy, done, heard)
    return table
