"""Runs a list of experiments on one host: side by side on a GPU where they compare bits, alone on it where they time.

`python -m tests.gpu.campaign tests/gpu/campaign.toml --out DIR --gpus 2 --minutes 25 [--only NAME ...]`. GPU hosts are
lent for minutes, so the time of one must not be spent between experiments. Each experiment is a command with a share of
one or more GPUs and a limit in minutes. They start in the order of the file, each as soon as there is room for it. One
that would not end in time is left out. One that needs the results of another waits for them. What has ended with 0 in
the same DIR before is not run again. Prints a line when one begins or ends; `campaign.json` has all of them. Exit code:
0 if all ran and ended with 0.

Owns which experiment runs when and where. Must not know what they do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from corun.processes import descendants, end_tree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOOK_S = 0.2
"""The time between two looks at the running experiments."""
RESULTS = "campaign.json"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A command, and what it needs."""

    name: str
    command: str
    """For a shell. {gpu} and {gpus} are the GPUs' numbers, {out} is a directory of its own, and {results} the one that
    holds those of all experiments."""
    minutes: float
    """The limit, after which it is ended."""
    share: float = 1.0
    """The part of each of its GPUs that it needs. 1 for what measures time."""
    count: int = 1
    """The number of GPUs."""
    after: tuple[str, ...] = ()
    """The experiments that must have ended with 0 before."""


@dataclass(kw_only=True)
class Result:
    """How an experiment went."""

    name: str
    code: int | None = None
    """The exit code; None if it did not run, or did not end in its time."""
    why: str = ""
    """Why there is no exit code."""
    gpus: tuple[int, ...] = ()
    began_s: float = 0.0
    seconds: float = 0.0


@dataclass
class Plan:
    """The experiments that have not begun, and the room on each GPU. A GPU has the room 1."""

    waiting: list[Experiment]
    room: dict[int, float]
    results: dict[str, Result] = field(default_factory=dict)

    def drop(self, left_s: float) -> list[Result]:
        """Remove and return the experiments that can't run any more."""
        found = []
        for one in list(self.waiting):
            lacking = [name for name in one.after if name in self.results and self.results[name].code != 0]
            why = f"{lacking[0]} did not end with 0" if lacking else "no time left" if 60 * one.minutes > left_s else ""
            if one.count > len(self.room):
                why = f"needs {one.count} GPUs"
            if why:
                self.waiting.remove(one)
                self.results[one.name] = Result(name=one.name, why=why)
                found.append(self.results[one.name])
        return found

    def next(self) -> tuple[Experiment, tuple[int, ...]] | None:
        """Take the first experiment that can start now. One that waits for room keeps its GPUs from those after it."""
        kept: set[int] = set()
        for one in self.waiting:
            if any(name not in self.results for name in one.after):
                continue
            gpus = sorted((gpu for gpu in self.room if gpu not in kept), key=lambda gpu: -self.room[gpu])[: one.count]
            if len(gpus) == one.count and all(self.room[gpu] >= one.share - 1e-9 for gpu in gpus):
                self.waiting.remove(one)
                for gpu in gpus:
                    self.room[gpu] -= one.share
                return one, tuple(sorted(gpus))
            kept.update(gpus)
        return None

    def end(self, experiment: Experiment, result: Result) -> None:
        self.results[experiment.name] = result
        for gpu in result.gpus:
            self.room[gpu] += experiment.share


class Running:
    """An experiment's process."""

    def __init__(self, experiment: Experiment, gpus: tuple[int, ...], results: Path, began: float) -> None:
        self.experiment = experiment
        self.began = time.monotonic()
        self.result = Result(name=experiment.name, gpus=gpus, began_s=round(self.began - began, 1))
        out = results / experiment.name
        out.mkdir(parents=True, exist_ok=True)
        names = {"gpu": str(gpus[0]), "gpus": " ".join(map(str, gpus)), "out": str(out), "results": str(results)}
        command = experiment.command
        for name, value in names.items():
            command = command.replace(f"{{{name}}}", value)
        with (out / "log").open("wb") as log:
            self.process = subprocess.Popen(command, shell=True, stdout=log, stderr=log, start_new_session=True)

    def is_over(self) -> bool:
        """Look once. An experiment whose time is over is ended with all that it has started."""
        seconds = time.monotonic() - self.began
        if (code := self.process.poll()) is None and seconds < 60 * self.experiment.minutes:
            return False
        self.result.code, self.result.seconds = code, round(seconds, 1)
        if code is None:
            self.result.why = "its time was over"
            self.end()
        return True

    def end(self) -> None:
        tree = descendants(self.process.pid)
        os.killpg(self.process.pid, signal.SIGTERM)
        end_tree(tree)
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Runs many experiments on one host."""

    file: tyro.conf.Positional[Path]
    """TOML with a table [[experiment]] for each."""
    out: Path
    gpus: int = 1
    """The GPUs of the host, from 0 on."""
    minutes: float = 25.0
    """The time for all."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Names of the experiments to run, with those that they come after; by default all."""


def read(file: Path, only: Sequence[str] = ()) -> list[Experiment]:
    """Return a file's experiments in order. Raises ValueError for a name that is unknown or stands there twice."""
    tables = tomllib.loads(file.read_text())["experiment"]
    found = [Experiment(**{**table, "after": tuple(table.get("after", ()))}) for table in tables]
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{file}: {min(twice)!r} stands there twice")
    if unknown := {*only, *(name for one in found for name in one.after)} - set(names):
        raise ValueError(f"{file}: there is no experiment {min(unknown)!r}")
    wanted = set(only or names)
    for one in reversed(found):  # An experiment stands behind those that it comes after.
        wanted |= set(one.after) if one.name in wanted else set()
    return [one for one in found if one.name in wanted]


def earlier(out: Path) -> dict[str, Result]:
    """Return the results of experiments that have ended with 0 in this directory before."""
    file = out / RESULTS
    kept = json.loads(file.read_text()) if file.exists() else []
    return {one["name"]: Result(**{**one, "gpus": tuple(one["gpus"])}) for one in kept if one["code"] == 0}


def save(out: Path, results: Mapping[str, Result]) -> None:
    (out / RESULTS).write_text(json.dumps([asdict(one) for one in results.values()], indent=1))


def say(result: Result, what: str) -> None:
    print(json.dumps({"experiment": result.name, "is": what, **asdict(result)}), flush=True)


def run(campaign: Campaign) -> int:
    began = time.monotonic()
    campaign.out.mkdir(parents=True, exist_ok=True)
    done = earlier(campaign.out)
    experiments = [one for one in read(campaign.file, campaign.only) if one.name not in done]
    plan = Plan(experiments, dict.fromkeys(range(campaign.gpus), 1.0), done)
    running: list[Running] = []
    try:
        while plan.waiting or running:
            for one in [one for one in running if one.is_over()]:
                running.remove(one)
                plan.end(one.experiment, one.result)
                say(one.result, "over")
            for result in plan.drop(60 * campaign.minutes - (time.monotonic() - began)):
                say(result, "left out")
            while (found := plan.next()) is not None:
                running.append(Running(*found, campaign.out, began))
                say(running[-1].result, "begun")
            save(campaign.out, plan.results)
            time.sleep(LOOK_S)
    finally:
        for one in running:
            one.end()
    return 0 if all(one.code == 0 for one in plan.results.values()) else 1


if __name__ == "__main__":
    sys.exit(run(tyro.cli(Campaign)))
