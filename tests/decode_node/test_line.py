"""How long the line for slots has to be: a node of which all want more, in ticks, counted and not timed."""

from __future__ import annotations

import random
from collections import deque

import pytest

from decode_node import slots as module
from decode_node.slots import NoRoomError, SlotTable

PROMPTS_IN_FLIGHT = 4
"""The prompts that are sent to the prefill node at a time, as `router.placement.PREFILLS_IN_FLIGHT`."""
DECODE = 400
"""The mean ticks that a sample decodes; they differ by up to a half."""
WARM_UP, TICKS = 2 * DECODE, 10 * DECODE


class Node:
    """A decode node and a prefill node, and endless samples of one router that wait for room."""

    def __init__(self, slots: int, *, prompts_per_sample: float, read: int) -> None:
        """prompts_per_sample: the prompts that can be computed in the time in which a sample ends, if all slots work.
        read: the ticks that a KV read takes."""
        self.table = SlotTable(slots=slots, kv_blocks=10**6, block_size=16)
        self.idle = self.used = 0
        self.longest_line = 0
        self._rng = random.Random(1)
        self._compute = DECODE / slots / prompts_per_sample  # In ticks, for one prompt.
        self._read = read
        self._prompts: deque[int] = deque()
        self._computed_at = 0.0
        self._arrives: list[tuple[int, int]] = []  # When the KV of which lease has been read.
        self._line: deque[int] = deque()
        self._ends: dict[int, int] = {}

    def tick(self, now: int) -> None:
        for lease in [lease for lease, end in self._ends.items() if end <= now]:
            del self._ends[lease]
            self.table.release(lease)
        self._line.extend(lease for at, lease in self._arrives if at <= now)
        self._arrives = [(at, lease) for at, lease in self._arrives if at > now]
        while self._line and self.table.used_slots < self.table.slots:
            lease = self._line.popleft()
            self.table.enter(lease)
            self._ends[lease] = now + self._rng.randint(DECODE // 2, 3 * DECODE // 2)
        self._ask()
        while self._prompts and self._computed_at <= now:
            self._computed_at = max(self._computed_at, now - 1) + self._compute
            self._arrives.append((now + self._read, self._prompts.popleft()))
            self._ask()
        self.longest_line = max(self.longest_line, len(self._line))
        if now > WARM_UP:
            self.used += self.table.used_slots
            self.idle += self.table.slots - self.table.used_slots

    def _ask(self) -> None:
        """Reserve for the next samples of the queue, until there is no place or no turn at the prefill node."""
        while len(self._prompts) < PROMPTS_IN_FLIGHT:
            try:
                self._prompts.append(self.table.reserve("r", 16, 16).lease_id)
            except NoRoomError:
                return

    def run(self) -> float:
        """Return the share of the slots that stood idle."""
        for now in range(TICKS):
            self.tick(now)
        return self.idle / (self.idle + self.used)


@pytest.mark.parametrize("slots", [64, 256])
@pytest.mark.parametrize("read", [0, DECODE // 50, DECODE // 10])
def test_slots_hardly_ever_stand_idle(slots: int, read: int) -> None:
    node = Node(slots, prompts_per_sample=1.2, read=read)
    assert node.run() < 0.002
    assert node.longest_line <= slots // 4


def test_eight_slots_stand_idle_less() -> None:
    """A node of a CPU: its line is of two samples, and its prompts take long."""
    assert Node(8, prompts_per_sample=2.0, read=DECODE // 10).run() < 0.03


@pytest.mark.parametrize("slots", [8, 64, 256])
def test_without_a_line_they_do(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a lease is a slot, so a slot waits for the prompt and its read."""
    monkeypatch.setattr(module, "places", lambda slots: slots)
    assert Node(slots, prompts_per_sample=2.0, read=DECODE // 10).run() > 0.08


def test_half_of_the_line_would_be_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "places", lambda slots: slots + slots // 8)
    assert Node(64, prompts_per_sample=1.2, read=DECODE // 10).run() > 0.01
