"""An engine's process must not outlive its node: killed, the node cannot end it, and it would keep memory and a device.

vLLM's workers watch the process above them; that process watches nobody. Must not know what it computes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading

log = logging.getLogger(__name__)


def end_with_parent() -> None:
    """From now on this process ends at once when the one that started it has; nothing if `multiprocessing` did not."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        log.error("the node's process has ended, and so does its engine")
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
