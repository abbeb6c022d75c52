"""The signals that ask a process to stop. They are counted and raise no exception.

This module must not know what stops.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP. One asks for the end, two ask for a quick end, the third ends this process.

    The handler raises no exception: an exception inside gRPC's or Ray's code could leave their locks held.
    """

    def __init__(self) -> None:
        self.count = 0
        # A signal that the parent process set to be ignored (nohup) stays ignored.
        self._before = {n: signal.getsignal(n) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers, again if other code has replaced them."""
        for number in self._before:
            signal.signal(number, self._received if self.count < 2 else signal.SIG_DFL)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.install()
