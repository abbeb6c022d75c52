"""Ends an engine's process when its node dies: a killed node cannot end it, and it would keep memory and a device.

vLLM's workers watch their parent process, but that process does not watch the node. Must not know: what it computes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading

log = logging.getLogger(__name__)


def end_with_parent() -> None:
    """End this process, from now on, as soon as its parent process has ended. Do nothing if `multiprocessing` did not
    start this process."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        log.error("the node's process has ended, and so does its engine")
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
