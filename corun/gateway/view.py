"""What the live page shows of a cluster's state: every figure as text, every slot as a letter.

The server writes the page from a view, and scripts put the texts of later views into the same places, so nothing is
computed or worded twice. This module is pure: it must not know HTTP, HTML, tokens or clocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.gateway.definitions import FREEDOMS
from corun.observe.rates import History, tokens
from corun.types import (
    GONE_AS_PLANNED,
    ClusterStatus,
    Distribution,
    NodeRole,
    NodeState,
    NodeStatus,
    SlotSamples,
    state_in_words,
)

UNKNOWN = "\N{EN DASH}"
EMPTY, RESERVED, RUNNING, DRAINING, OTHER = ".", "r", "R", "d", "o"
"""The letters of slots."""
SLOT_STATES = {
    EMPTY: "empty",
    RESERVED: "reserved",
    RUNNING: "running",
    DRAINING: "draining",
    OTHER: "of another router",
}
_COLOURS = {
    NodeState.READY: "good",
    NodeState.JOINING: "warn",
    NodeState.DRAINING: "draining",
    NodeState.LOST: "bad",
    NodeState.REFUSED: "bad",
}
SERIES = ("output_rate", "prompt_rate", "ttft", "itl", "tpot", "queue", "backlog", "cache", "padding", "handoff")
"""The figures that have a curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, as text."""

    key: str
    """The key of its definition."""
    value: str
    note: str = ""
    number: float | None = None
    """The value for a curve; None if it has none, or is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One node, or one side of a colocated node."""

    key: str
    """The node's id and generation."""
    name: str
    generation: str
    role: str
    state: str
    """The state in words."""
    colour: str
    colocated: bool
    freedoms: tuple[tuple[str, str], ...]
    """The freedoms that the node knows, in words, each with the reason why the node lacks it; empty if it does not."""
    figures: tuple[Figure, ...]
    slots: int
    cells: str = ""
    """A letter for each slot, as in `SLOT_STATES`."""
    line: str = ""
    """The same for the places in line."""
    samples: tuple[tuple[Any, ...], ...] = ()
    """The samples of this router: place, age in milliseconds; and for those that the client may know more of, request,
    sample index, seed, tokens drawn, and the most tokens."""

    @property
    def columns(self) -> int:
        """The number of slots in a row of the grid, which is about a square: 16 for 256."""
        return 1 << ((max(self.slots, 1) - 1).bit_length() + 1) // 2

    def rows(self) -> list[str]:
        """Return the letters of the slots, row by row."""
        return [self.cells[start : start + self.columns] for start in range(0, self.slots, self.columns)]

    def table(self) -> Iterator[tuple[str, ...]]:
        """Yield the samples of which more is told, in words: place, state, request, tokens, seed, age."""
        for place, age_ms, *told in sorted(self.samples, key=lambda sample: int(sample[0])):
            if told:
                where = str(place) if place < self.slots else f"line {place - self.slots}"
                state = SLOT_STATES[self.cells[place]] if place < self.slots else "in line"
                name, index, seed, drawn, most = told
                request = f"{name} #{index}" if index else name
                yield where, state, request, f"{drawn} of {most}", seed, f"{age_ms / 1000:.1f} s"

    @property
    def untold(self) -> int:
        """The number of samples of which the client may not know more."""
        return sum(len(sample) == 2 for sample in self.samples)

    def figure(self, key: str) -> Figure:
        """Return a figure; one without a value if the node does not have it."""
        return next((one for one in self.figures if one.key == key), Figure(key=key, value=""))


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """All that the page shows."""

    model: str = ""
    fingerprint: str = ""
    router: str = ""
    state: str
    colour: str
    alerts: tuple[tuple[str, str], ...]
    """What somebody should look at, each with its colour: "bad" or "warn"."""
    figures: tuple[Figure, ...] = ()
    cards: tuple[Card, ...] = ()

    series = SERIES

    @property
    def layout(self) -> str:
        """A name of the page's structure. Views with the same one differ only in texts, colours and slots."""
        parts = [self.model, self.fingerprint, self.router]
        parts += [f"{card.key} {card.role} {card.slots} {card.colocated} {card.freedoms}" for card in self.cards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def texts(self) -> dict[str, str]:
        """Return the texts that change, by the keys of their places in the page."""
        found = {"state": self.state}
        for owner, figures in (("", self.figures), *((f"{card.key} ", card.figures) for card in self.cards)):
            for figure in figures:
                found[owner + figure.key] = figure.value
                found[f"{owner}{figure.key} note"] = figure.note
        return found | {f"{card.key} state": card.state for card in self.cards}

    def event(self) -> str:
        """Return the view as JSON, for scripts."""
        colours = {"state": self.colour} | {f"{card.key} state": card.colour for card in self.cards}
        numbers = {one.key: one.number for one in self.figures if one.key in SERIES}
        slots = {
            card.key: {"cells": card.cells, "line": card.line, "samples": card.samples}
            for card in self.cards
            if card.slots
        }
        told = {"layout": self.layout, "texts": self.texts(), "colours": colours, "numbers": numbers}
        return json.dumps({**told, "alerts": self.alerts, "slots": slots}, separators=(",", ":"))


def waiting(why: str, colour: str = "warn") -> View:
    """Return the view while nothing is known of the cluster. why: what is waited for, or went wrong."""
    return View(state="no answer yet", colour=colour, alerts=((colour, why),))


def view_of(history: History) -> View:
    """Return what the page shows now. There must be a look."""
    status = history.looks[-1].status
    missing = [role.value for role in status.missing_roles]
    state, colour = ("serving", "good") if not missing else (f"no {' or '.join(missing)} node is ready", "warn")
    return View(
        model=status.model.name if status.model else "",
        fingerprint=status.fingerprint,
        router=status.router_id,
        state=state,
        colour=colour,
        alerts=tuple(_alerts(status)),
        figures=tuple(_figures(history)),
        cards=tuple(_card(each, colocated=len(sides) > 1) for sides in status.engines for each in sides),
    )


def _alerts(status: ClusterStatus) -> Iterator[tuple[str, str]]:
    if status.mismatches:
        last = f" Last: {status.audit.last_mismatch}." if status.audit.last_mismatch else ""
        samples = "1 sample" if status.mismatches == 1 else f"{status.mismatches} samples"
        yield "bad", f"{samples} gave other bits when run again.{last}"
    for each in status.nodes:
        if not each.is_in_use and each.detail != GONE_AS_PLANNED:
            goes_on = " Its streams go on elsewhere." if each.state is NodeState.LOST else ""
            yield "bad", f"{each.node.ref.node_id} is {state_in_words(each.state, each.detail)}.{goes_on}"
    if not status.nodes:
        yield "warn", "No node has joined yet. A node joins by itself once its engine has started and is certified."


def _figures(history: History) -> Iterator[Figure]:
    before, status, rates = history.looks[0].status, history.looks[-1].status, history.rates()
    output, prompts = rates.of(NodeRole.DECODE, tokens), rates.of(NodeRole.PREFILL, tokens)
    yield Figure(key="output_rate", value=_count(output), note="tokens/s", number=output)
    yield Figure(key="prompt_rate", value=_count(prompts), note="tokens/s", number=prompts)
    yield _latency("ttft", before.first_token_seconds, status.first_token_seconds)
    step = _ratio(
        rates.of(NodeRole.DECODE, lambda load: load.step_seconds),
        rates.of(NodeRole.DECODE, lambda load: load.timed_steps),
    )
    yield Figure(key="itl", value=_seconds(step), note="mean", number=step)
    yield _latency("tpot", before.output_token_seconds, status.output_token_seconds)
    waiting_samples = f"of {status.max_queued_samples:,}, {_count(status.queued_prompt_tokens)} tokens"
    yield Figure(
        key="queue", value=f"{status.queued_samples:,}", note=waiting_samples, number=float(status.queued_samples)
    )
    loads = [each.load for each in status.nodes if each.is_in_use]
    backlog = sum(load.queued_prompt_tokens for load in loads)
    yield Figure(key="backlog", value=_count(backlog), note="tokens", number=float(backlog))
    cached, computed = (rates.of(NodeRole.PREFILL, read) for read in (lambda load: load.cached_tokens, tokens))
    hits = None if cached is None or computed is None else _ratio(cached, cached + computed)
    yield Figure(key="cache", value=_share(hits), note="of prompt tokens", number=hits)
    used = _ratio(
        rates.of(NodeRole.DECODE, lambda load: load.used_rows),
        rates.of(NodeRole.DECODE, lambda load: load.rows),
    )
    lost = None if used is None else 1 - used
    yield Figure(key="padding", value=_share(lost), note="of decode rows", number=lost)
    handed = rates.of(NodeRole.DECODE, lambda load: load.kv_reads.bytes)
    reads = rates.of(NodeRole.DECODE, lambda load: load.kv_reads.count)
    yield Figure(key="handoff", value=_bytes_a_second(handed), note=f"{_count(reads)} reads/s", number=handed)
    yield from _counts(status)


def _counts(status: ClusterStatus) -> Iterator[Figure]:
    audit = status.audit
    yield Figure(
        key="finished", value=f"{status.finished_samples:,}", note=f"samples, {status.refused_requests:,} refused"
    )
    yield Figure(key="retries", value=f"{status.sample_retries:,}", note="runs taken over")
    done = f"{audit.mismatched:,} failed, {audit.waiting:,} due"
    yield Figure(key="audits", value=f"{audit.matched:,}", note=f"passed, {done}")
    yield Figure(key="mismatches", value=f"{status.mismatches:,}", note="samples with other bits")


def _latency(key: str, before: Distribution | None, now: Distribution | None) -> Figure:
    if now is None:
        return Figure(key=key, value=UNKNOWN)
    counts = now.counts
    if before is not None and before.bounds == now.bounds:
        lately = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
        if min(lately) >= 0 and any(lately):
            counts = lately
    median, late = quantile(now.bounds, counts, 0.5), quantile(now.bounds, counts, 0.99)
    return Figure(key=key, value=_seconds(median), note=f"median, p99 {_seconds(late)}", number=median)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value below which a share of all values is, taking them as even within an interval; None without any
    value. Of values beyond all bounds, only the last bound is known."""
    left = share * sum(counts)
    if left <= 0:
        return None
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count >= left:
            return lower + (bound - lower) * left / count
        left -= count
        lower = bound
    return lower


def _card(status: NodeStatus, *, colocated: bool) -> Card:
    node, samples = status.node, status.samples or SlotSamples()
    planned = status.detail == GONE_AS_PLANNED
    cells, line = _letters(status, samples)
    return Card(
        key=str(node.ref),
        name=node.ref.node_id,
        generation=node.ref.generation,
        role=node.role.value,
        state=state_in_words(status.state, status.detail),
        colour="off" if planned else _COLOURS[status.state],
        colocated=colocated,
        freedoms=tuple((FREEDOMS.get(one.name, one.name), one.refused) for one in node.freedoms),
        figures=tuple(_node_figures(status)) if status.is_in_use else (),
        slots=0 if node.role is NodeRole.PREFILL else node.slots,
        cells=cells,
        line=line,
        samples=tuple(_rows(samples)),
    )


def _node_figures(status: NodeStatus) -> Iterator[Figure]:
    node, load = status.node, status.load
    if node.role is NodeRole.DECODE:
        yield Figure(key="slots", value=f"{load.used_slots} / {node.slots}", note=f"slots, {status.in_line} in line")
    else:
        yield Figure(key="backlog", value=_count(load.queued_prompt_tokens), note="tokens")
    yield Figure(key="kv", value=f"{load.used_kv_blocks:,} / {node.kv_blocks:,}", note="blocks")


def _letters(status: NodeStatus, samples: SlotSamples) -> tuple[str, str]:
    """Return the letters of a node's slots, and of its places in line."""
    slots = status.node.slots
    decoding = zip(samples.places, samples.decoding, strict=True)
    letters = {place: RUNNING if decodes else RESERVED for place, decodes in decoding}
    if status.state is NodeState.DRAINING:
        letters = dict.fromkeys(letters, DRAINING)
    cells = [letters.get(number, EMPTY) for number in range(slots)]
    others = samples.others
    for number in range(slots - 1, -1, -1):
        if others and cells[number] == EMPTY:
            cells[number], others = OTHER, others - 1
    line = [letter for number, letter in sorted(letters.items()) if number >= slots]
    return "".join(cells), "".join(line + [OTHER] * others)


def _rows(samples: SlotSamples) -> Iterator[tuple[Any, ...]]:
    told: Mapping[int, int] = {index: number for number, index in enumerate(samples.told)}
    for index, (place, age_ms) in enumerate(zip(samples.places, samples.ages_ms, strict=True)):
        if (number := told.get(index)) is None:
            yield place, age_ms
        else:
            # A seed has 63 bits, more than a number of a script.
            yield (
                *(place, age_ms, samples.request_ids[number], samples.sample_indices[number]),
                *(str(samples.seeds[number]), samples.num_tokens[number], samples.max_tokens[number]),
            )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * max(0.0, value):.0f} %"


def _count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value < 100_000 else _scaled(value, ("k", "M", "G", "T"))


def _bytes_a_second(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f} B/s" if value < 1000 else _scaled(value, ("kB/s", "MB/s", "GB/s", "TB/s"))


def _scaled(value: float, units: Iterable[str]) -> str:
    value, (unit, *larger) = value / 1000, tuple(units)
    return _scaled(value, larger) if value >= 999.5 and larger else f"{value:.3g} {unit}"


def _seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
