"""Asking a process's probes as a kubelet does."""

from __future__ import annotations

import urllib.error
import urllib.request


def probe(port: int, path: str, timeout_s: float = 60.0, host: str = "127.0.0.1") -> int:
    """The status code of the answer; 0 if there is no answer."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
