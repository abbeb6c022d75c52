"""The signals that ask a process to stop, counted instead of raised.

Must not know what stops.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP: one asks for the end, two for a quick one, the third ends this process.

    Nothing is raised: an exception at any point of gRPC's or Ray's code can leave their locks held.
    """

    def __init__(self) -> None:
        self.count = 0
        # What a parent told us to ignore (nohup) stays ignored.
        self._before = {n: signal.getsignal(n) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Again where something else took the signals."""
        for number in self._before:
            signal.signal(number, self._received if self.count < 2 else signal.SIG_DFL)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.install()
