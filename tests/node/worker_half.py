"""What the tests of the connector's worker half put in place of NIXL's agent and of judgements, and a step of it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from corun.node.kv.judging import Claim, Verdict

FOREVER = 10.0**9


def stamps(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


STAMPS = stamps(77, 78, 79)


def step(module: ModuleType, connector: Any, **orders: Any) -> Any:
    """Run a step of the worker with these orders, up to its forward pass, and return the orders that vLLM gets."""
    meta = module.HandoffMetadata()
    vars(meta).update(orders)
    connector._connector_metadata = meta
    connector.handle_preemptions(meta)
    connector.start_load_kv(None)
    return connector.seen[-1]


class Agent:
    """A NIXL agent whose transfers, named by a test, are in the state that the test says."""

    def __init__(self, inbox: list[bytes]) -> None:
        self.states: dict[str, str] = {}
        self.made: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, bytes]] = []
        self._inbox = inbox

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"peer": [self._inbox.pop() for _ in self._inbox[:]]}

    def register_memory(self, *_: Any) -> str:
        return "registered"

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"") -> str:
        self.made.append((*args, notif_msg))
        return "transfer"

    def check_xfer_state(self, handle: str) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: str) -> Any:
        return SimpleNamespace(postDuration=1, xferDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: str) -> None:
        del self.states[handle]

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.told.append((agent, notif_msg))


class Judgements:
    """Judges as a test says, and when; remembers what it was asked."""

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.is_late = self.are_rows_late = False
        """Whether the verdicts have not come; and whether some rows of a judgement that has ended may still come."""

    def __call__(self, reads: list[tuple[Claim, Any]], *where: Any) -> Any:
        self.asked.append((reads, *where))
        found = [Verdict(self.refusals.get(claim.request_id, ""), checked=True) for claim, _ in reads]
        transfers = SimpleNamespace(are_late=lambda: self.are_rows_late)
        fetch = SimpleNamespace(transfers=transfers)
        return SimpleNamespace(verdicts=lambda patience_s: None if self.is_late else found, fetch=fetch)
