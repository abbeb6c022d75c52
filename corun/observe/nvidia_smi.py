"""Asks nvidia-smi about the GPUs of this machine. Must not load torch: a CUDA context takes GPU memory of its own."""

from __future__ import annotations

import subprocess

_TIMEOUT_S = 20.0


def smi(query: str) -> list[list[str]]:
    """Return the rows of an answer, as of "--query-gpu=index,uuid"; none if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
