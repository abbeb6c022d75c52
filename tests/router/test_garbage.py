"""When full garbage collections run. A process of its own, since collections are of the whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, gc, sys
from router import garbage

full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)

async def main():
    waiting = 5000
    collections = None
    if "usual" not in sys.argv:
        collections = garbage.FullCollections(lambda: waiting)
    full.clear()
    held = []
    for _ in range(40):  # Samples come and stay.
        held += [[k] for k in range(20_000)]
        if collections:
            collections.look()
    print(len(full))
    if collections:
        waiting = garbage.FEW
        collections.look()
        print(len(full))
        collections.look()
        print(len(full))
        waiting = 5000
        garbage.MOST = 2
        for _ in range(40):
            held += [[k] for k in range(20_000)]
        collections.look()
        print(len(full))
        collections.stop()

asyncio.run(main())
"""


def run(*arguments: str) -> list[int]:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return list(map(int, made.stdout.split()))


def test_a_full_collection_runs_when_few_samples_wait_or_much_has_come() -> None:
    """None while many wait; one when few do, and no second one for nothing; one when there could be much garbage."""
    assert run() == [0, 1, 1, 2]


def test_python_itself_collects_while_many_wait() -> None:
    """The control."""
    assert run("usual")[0] > 0
