"""A router's estimate of the free room on one node, from its own claims and from the node's heartbeats.

The node decides. An estimate of free room that is too high costs one refused Reserve; one that is too low costs a wait.
So estimates lean to the high side, and a refusal closes the node until something changes. This module is pure: it uses
no clocks and no I/O.
"""

from __future__ import annotations

from collections import deque

from corun.types import NodeLoad

LATELY = 64
"""The number of recent prompts remembered per prefill node, because later samples may get the same KV."""


class SharedCount:
    """One counted resource of a node that several routers use."""

    def __init__(self) -> None:
        self.own = 0
        self.foreign = 0
        self._peak = 0

    @property
    def used(self) -> int:
        return self.own + self.foreign

    def take(self, amount: int) -> int:
        """Add `amount` to our own use. Return by how much our use now exceeds its peak since the last report."""
        self.own += amount
        raised = max(0, self.own - self._peak)
        self._peak += raised
        return raised

    def give(self, amount: int) -> None:
        self.own -= amount
        assert self.own >= 0

    def untake(self, amount: int, raised: int) -> None:
        """Undo a `take` whose amount the node never gave us. `raised` is the value that `take` returned."""
        self.give(amount)
        self._peak = max(self.own, self._peak - raised)

    def report(self, total: int) -> None:
        """Take the node's own figure. It may be older than our last changes, so our peak use since the previous report
        counts as ours, and only the rest as other routers'."""
        self.foreign = max(0, total - self._peak)
        self._peak = self.own


class DecodeRoom:
    """The slots and KV blocks of one decode node."""

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int) -> None:
        self._total_slots = slots
        self._total_blocks = kv_blocks
        self._block_size = block_size
        self._slots = SharedCount()
        self._blocks = SharedCount()
        self._refused = False

    @property
    def free_slots(self) -> int:
        return 0 if self._refused else max(0, self._total_slots - self._slots.used)

    @property
    def free_blocks(self) -> int:
        return 0 if self._refused else max(0, self._total_blocks - self._blocks.used)

    def blocks(self, num_tokens: int) -> int:
        """Return how many KV blocks a sample of `num_tokens` prompt and output tokens needs."""
        return -(-num_tokens // self._block_size)

    @property
    def most_tokens(self) -> int:
        """The prompt and output tokens of the largest sample that fits on the node when the node is empty."""
        return self._total_blocks * self._block_size if self._total_slots > 0 else 0

    def could_hold(self, num_tokens: int) -> bool:
        """Return whether a sample of `num_tokens` tokens fits on the node when the node is empty."""
        return num_tokens <= self.most_tokens

    def has_room(self, num_tokens: int) -> bool:
        """Return whether the router may try to place a sample of `num_tokens` tokens here now."""
        return self.free_slots > 0 and self.blocks(num_tokens) <= self.free_blocks

    def keeps_free(self, spare_slots: int) -> bool:
        """Return whether `spare_slots` slots are free; on a smaller node, all slots but one are enough."""
        return self.free_slots >= min(spare_slots, self._total_slots - 1)

    def has_idle_room(self, num_tokens: int, spare_slots: int) -> bool:
        """Return whether a sample of `num_tokens` tokens fits and `keeps_free` would still hold after it is placed."""
        return self.has_room(num_tokens) and self.free_slots > min(spare_slots, self._total_slots - 1)

    def take(self, num_tokens: int) -> tuple[int, int]:
        """Claim a slot and KV blocks for a sample. Return the value that `refuse` needs to undo this."""
        return self._slots.take(1), self._blocks.take(self.blocks(num_tokens))

    def give(self, num_tokens: int) -> None:
        """Return a sample's slot and blocks, because its slot is free again."""
        self._slots.give(1)
        self._blocks.give(self.blocks(num_tokens))
        self._refused = False

    def refuse(self, num_tokens: int, raised: tuple[int, int]) -> None:
        """Undo a sample's claim after the node refused it, and close the node until the next change."""
        self._slots.untake(1, raised[0])
        self._blocks.untake(self.blocks(num_tokens), raised[1])
        self._refused = True

    def report(self, load: NodeLoad) -> None:
        self._slots.report(load.used_slots)
        self._blocks.report(load.used_kv_blocks)
        self._refused = False


class PrefillRoom:
    """The backlog of one prefill node. Samples that share the KV of one computation count once."""

    def __init__(self, *, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._tokens = SharedCount()
        self._samples: dict[str, int] = {}  # The number of samples that wait for one computation, by KV key.
        self._lately: deque[str] = deque(maxlen=LATELY)  # The keys of KV that this node computed for us recently.

    @property
    def queued_tokens(self) -> int:
        return self._tokens.used

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self.queued_tokens

    def computes(self, kv_key: str) -> bool:
        """Return whether the node is already computing the KV with this key."""
        return kv_key in self._samples

    def may_have(self, kv_key: str) -> bool:
        """Return whether the node computed the KV with this key recently and may still hold it."""
        return kv_key in self._lately

    def has_room(self, kv_key: str = "") -> bool:
        return self._in_flight < self._max_in_flight or self.computes(kv_key)

    def take(self, num_tokens: int, kv_key: str = "") -> None:
        if kv_key:
            self._samples[kv_key] = self._samples.get(kv_key, 0) + 1
            if self._samples[kv_key] > 1:
                return
        self._in_flight += 1
        self._tokens.take(num_tokens)

    def give(self, num_tokens: int, kv_key: str = "", *, is_computed: bool = False) -> None:
        if kv_key:
            if is_computed and kv_key not in self._lately:
                self._lately.append(kv_key)
            self._samples[kv_key] -= 1
            if self._samples[kv_key]:
                return
            del self._samples[kv_key]
        self._in_flight -= 1
        self._tokens.give(num_tokens)

    def report(self, load: NodeLoad) -> None:
        self._tokens.report(load.queued_prompt_tokens)
