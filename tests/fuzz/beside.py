"""Assaults on a real cluster for some minutes, with another client's streams beside them, which are watched.

Before the assaults, in calm, the same number of clients sends ordinary requests. A finding is any harm that an assault
did to others: a stream that ended, changed a bit or paused more than a tenth of a second longer than any did in calm, a
lost node, a repeated run, a process that died, an internal error, memory beyond its bound, or something that is still
held at the end. Tests only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.report import quantiles
from tests.fuzz.assaults import ASSAULTS, CALL_S, Victim, draw, ordinary, victim
from tests.machine import free_port
from tests.nodes import Nodes, Topology, running

START_S = 300.0
SETTLE_S = 60.0
CALM_S = 60.0
"""How long clients send ordinary requests before the assaults."""
SLOWER_S = 0.1
"""By how much the longest pause of a stream may exceed the longest one of all streams in calm."""
ROUTER_MIB = 1024.0
"""The memory of a router in the smallest deployment (k8s/overlays/cpu-demo)."""
NICENESS = 15
"""The niceness of the attacker, so that it does not take the cores from the processes that it attacks."""
MAX_FINDINGS = 50
_WORDS = (" is lost: ", "an attempt of sample .* failed", " internal error ", "Traceback ", "never retrieved")
_BAD = re.compile(rf"^.*(?:{'|'.join(_WORDS)}).*$", re.MULTILINE)


@dataclass(kw_only=True)
class Report:
    """The results of a run. Times are in seconds, memory is in MiB."""

    seed: int
    minutes: float
    assaults: dict[str, Counter[str]] = field(default_factory=dict)
    """The number of answers of each kind, by kind of assault."""
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Quantiles of the bystander's streams, in calm and beside the assaults: first tokens, pauses, durations."""
    memory_mib: dict[str, dict[str, float]] = field(default_factory=dict)
    """The memory of each process with its engine: before the assaults, at most, and after them."""
    findings: list[str] = field(default_factory=list)

    def find(self, what: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(what)

    def as_dict(self) -> dict[str, Any]:
        assaults = {kind: dict(counter.most_common()) for kind, counter in sorted(self.assaults.items())}
        return {**vars(self), "assaults": assaults, "count": sum(map(Counter.total, self.assaults.values()))}


class Tokens:
    """The tokens of the cluster and of its two clients, which it tells apart to share slots and the queue fairly.

    The attacker may not ask for the highest priority, which goes before all.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster, self.attacker, bystander = (secrets.token_hex(16) for _ in range(3))
        clients = f"bystander: {bystander}\nattacker: {self.attacker} max_priority=normal\n"
        self.files = {name: folder / f"{name}.token" for name in ("cluster", "bystander", "clients")}
        for path, text in zip(self.files.values(), (self.cluster, bystander, clients), strict=True):
            path.write_text(text)

    @property
    def node_flags(self) -> tuple[str, ...]:
        return ("--cluster-token-file", str(self.files["cluster"]))

    @property
    def router_flags(self) -> tuple[str, ...]:
        return (*self.node_flags, "--client-tokens-file", str(self.files["clients"]))


class Siege:
    """One run against a running cluster."""

    def __init__(self, nodes: Nodes, target: Victim, tokens: Tokens, report: Report) -> None:
        self.report = report
        self._nodes = nodes
        self._processes = nodes.processes
        self._target = target
        self._tokens = tokens
        self._told: list[dict[str, Any]] = []
        self._most: dict[str, float] = {}
        self._assaulted: list[tuple[float, float, str]] = []
        """The assaults that are over: when each began and ended, and what it was."""
        self._said = {name: len(self._processes.log(name)) for name in self._processes.running}
        """The characters of each log when the siege began: what an engine says while it loads is no finding."""

    async def run(self, *, at_once: int, calm_s: float) -> None:
        """Run the calm and then the assaults, and judge both."""
        async with self._bystander():
            began = time.time()
            numbers = itertools.count()
            await asyncio.gather(*(self._ordinary(numbers, began + calm_s) for _ in range(at_once)))
            before, attacked = self._processes.memory(), time.time()
            await self._attack(at_once, attacked + 60 * self.report.minutes)
            over = time.time()
            await self._settled()
        calm = [told for told in self._told if began <= told["at"] < attacked]
        beside = [told for told in self._told if attacked <= told["at"] < over + CALL_S]
        self._judge(calm, beside)
        after = self._processes.memory()
        self.report.memory_mib = {"before": before, "most": self._most, "after": after}
        if self._most["router"] > ROUTER_MIB:
            self.report.find(f"the router took {self._most['router']:.0f} MiB, more than {ROUTER_MIB:.0f}")

    async def _attack(self, at_once: int, until: float) -> None:
        numbers = itertools.count()
        workers = [asyncio.create_task(self._assaults(numbers, until)) for _ in range(at_once)]
        while not all(worker.done() for worker in workers):
            await asyncio.wait(workers, timeout=1.0)
            for name, mib in self._processes.memory().items():
                self._most[name] = max(self._most.get(name, 0.0), mib)
            for name, process in self._processes.running.items():
                if (code := process.poll()) is not None:
                    self.report.find(f"{name} ended with {code}")
        await asyncio.gather(*workers)

    async def _ordinary(self, numbers: Iterator[int], until: float) -> None:
        while time.time() < until:
            await ordinary(self._target, random.Random(next(numbers)))

    async def _assaults(self, numbers: Iterator[int], until: float) -> None:
        while time.time() < until:
            number = next(numbers)
            kind, rng = draw(self.report.seed, number)
            began, at = time.monotonic(), time.time()
            answer = await ASSAULTS[kind][1](self._target, rng)
            self.report.assaults.setdefault(kind, Counter())[answer] += 1
            self._assaulted.append((at, time.time(), f"{kind} {number}"))
            if answer in ("INTERNAL", "UNKNOWN", "HTTP 500"):
                self.report.find(f"assault {number}, {kind}: {answer}")
            if time.monotonic() - began > 2 * CALL_S:
                self.report.find(f"assault {number}, {kind}: not over after {2 * CALL_S:.0f} s")

    def _judge(self, calm: list[dict[str, Any]], beside: list[dict[str, Any]]) -> None:
        report = self.report
        report.streams = {"calm": _summed(calm), "beside": _summed(beside)}
        if not calm or not beside:
            report.find(f"{len(calm)} streams in calm and {len(beside)} beside the assaults: nothing was compared")
            return
        for told in (*calm, *beside):
            if told["error"] or not told["equal"]:
                report.find(f"a stream over {told['way']} {told['error'] or 'has other bits'}")
        for way in {told["way"] for told in calm}:
            bound = SLOWER_S + max(told["longest_pause_s"] for told in calm if told["way"] == way)
            slow = [told for told in beside if told["way"] == way and told["longest_pause_s"] > bound]
            if slow:  # One finding, so that many pauses do not take the place of what the logs say.
                longest = max(slow, key=lambda told: float(told["longest_pause_s"]))
                which = ", ".join(sorted(map(_pause, slow)))
                text = f"paused for up to {longest['longest_pause_s']} s, more than {bound:.3f} s: {which}"
                report.find(f"{len(slow)} streams over {way} {text}; {self._beside(longest)}")
        for name, said in self._said.items():
            for line in sorted(set(_BAD.findall(self._processes.log(name)[said:]))):
                report.find(f"in the log of {name}: {line[:300]}")

    def _beside(self, told: dict[str, Any]) -> str:
        """Return what was under way at a stream's longest pause, or had ended less than a second before."""
        over = told["paused_until"]
        start = over - told["longest_pause_s"] - 1
        names = [name for at, end, name in self._assaulted if end > start and at < over]
        return f"beside the longest: {', '.join(names) or 'nothing that has ended'}"

    async def _settled(self) -> None:
        """Wait until nothing of the assaults is held. Anything that still is becomes a finding."""
        end, of_bystander = time.monotonic() + SETTLE_S, 3  # Its streams go on.
        while True:
            status = await asyncio.to_thread(self._nodes.status)
            used = sum(node.load.leases for node in status.nodes) if status else 0
            if status and used <= of_bystander and not status.queued_samples:
                return
            if time.monotonic() > end:
                held = f"{used} slots, {status.queued_samples} waiting" if status else "the router does not answer"
                self.report.find(f"still held after {SETTLE_S:.0f} s: {held}")
                return
            await asyncio.sleep(0.5)

    @asynccontextmanager
    async def _bystander(self) -> AsyncIterator[None]:
        async def read(stdout: asyncio.StreamReader) -> None:
            while line := await stdout.readline():
                self._told.append(json.loads(line))

        told = (self._nodes.address, self._target.url, str(self._tokens.files["bystander"]))
        command = [sys.executable, "-m", "tests.fuzz.bystander", *told]
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, limit=2**20)
        assert process.stdin is not None
        assert process.stdout is not None
        learned = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert learned, "the bystander got no right answers"
        reading = asyncio.create_task(read(process.stdout))
        os.nice(NICENESS)  # From here on, this process is the attacker.
        try:
            yield
        finally:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), START_S)
            await reading


async def besiege(topology: Topology, logs: Path, *, seed: int, minutes: float, at_once: int, calm_s: float) -> Report:
    """Do a whole run on a cluster of its own, with a gateway in front of it."""
    report = Report(seed=seed, minutes=minutes)
    url = f"http://127.0.0.1:{free_port()}"
    tokens = Tokens(logs)
    topology = replace(topology, node_flags=tokens.node_flags)
    with running(topology, logs, router_flags=tokens.router_flags, token=tokens.cluster) as nodes:
        flags = ("--router", nodes.address, "--port", url.rpartition(":")[2])
        nodes.processes.start("gateway", "corun", "gateway", *flags)
        vocab_size = json.loads((Path(topology.model) / "config.json").read_text())["vocab_size"]
        sizes = {"vocab_size": vocab_size, "max_model_len": topology.max_model_len}
        async with victim(nodes.address, url, tokens.attacker, **sizes) as target:
            await Siege(nodes, target, tokens, report).run(at_once=at_once, calm_s=calm_s)
        ended = await asyncio.to_thread(nodes.stop)
    for name, code in ended.items():
        if code:
            report.find(f"{name} ended with {code}")
    return report


def _pause(told: dict[str, Any]) -> str:
    """Return before which message a stream paused, and when it ended. The second message is the decode node's first."""
    return f"before message {told['before_message']}, ended at {time.strftime('%X', time.localtime(told['at']))}"


def _summed(told: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("first_s", "longest_pause_s", "seconds")
    ways = {way: [each for each in told if each["way"] == way] for way in sorted({each["way"] for each in told})}
    return {way: {name: quantiles([each[name] for each in found]) for name in names} for way, found in ways.items()}
