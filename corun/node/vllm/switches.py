"""Torch's run-time switches that can change a bit: they are set before the device starts and read back after loading.

Must not know: which values they must have and what happens otherwise (corun/node/vllm/pin.py); vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from corun.node.vllm import pin

EXPECTED: dict[str, Mapping[str, pin.Switch]] = {"cpu": pin.CPU_SWITCHES, "cuda": pin.GPU_SWITCHES}
"""The switches and their values, by platform. For TF32, only torch's `fp32_precision` is used: its older `allow_tf32`
flags cannot be read once both have been used."""
_SPLIT_K = "_split_k"


def set_switches(platform: str) -> None:
    """Set every switch of "cpu" or "cuda". Call this before the first matrix product of the process."""
    for name, value in EXPECTED[platform].items():
        owner, attribute = _find(name)
        if callable(getattr(owner, attribute)):
            getattr(owner, attribute)(value)
        else:
            setattr(owner, attribute, value)


def read_switches(platform: str) -> dict[str, str]:
    """Return every switch of "cpu" or "cuda" as torch holds it now."""
    return {name: _read(*_find(name)) for name in EXPECTED[platform]}


def _find(name: str) -> tuple[Any, str]:
    """Return the object under `torch.backends` that holds a switch, and the attribute's name."""
    *path, attribute = name.split(".")
    owner: Any = torch.backends
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _read(owner: Any, attribute: str) -> str:
    value = getattr(owner, attribute)
    if callable(value):  # A function that sets its argument. Without an argument it returns a member of an enumeration.
        return str(value().name).lower()
    if attribute.endswith("_precision_reduction"):  # The switch is a pair; its second half has another name.
        value = (value, getattr(owner, attribute + _SPLIT_K))
    return str(value)
