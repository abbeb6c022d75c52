"""Torch's switches: set and read back as torch itself holds them. No GPU is needed to hold them."""

from __future__ import annotations

import json
import subprocess
import sys

from corun.node.vllm import pin

SCRIPT = """
import json, sys
import torch
from corun.node.vllm import switches

platform, change = sys.argv[1:]
torch.set_float32_matmul_precision("highest")  # as vLLM's worker does before
before = switches.read_switches(platform)
switches.set_switches(platform)
found = [before, switches.read_switches(platform)]
exec(change, {"torch": torch})
print(json.dumps([*found, switches.read_switches(platform)]))
"""


def switch(platform: str, change: str = "") -> list[dict[str, str]]:
    """The switches of a fresh process: at first, once set, and after `change`."""
    command = [sys.executable, "-c", SCRIPT, platform, change]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: list[dict[str, str]] = json.loads(child.stdout)
    return found


def test_cpu_switches_are_set_and_a_change_is_read() -> None:
    before, after, changed = switch("cpu", "torch.set_float32_matmul_precision('medium')")
    assert before.keys() == after.keys()
    assert before["mkldnn.conv.fp32_precision"] == "none"
    assert after == {name: str(value) for name, value in pin.CPU_SWITCHES.items()}
    assert changed == {**after, "mkldnn.matmul.fp32_precision": "bf16"}


def test_every_gpu_switch_is_read_where_torch_holds_it() -> None:
    """One statement a switch, written as a user would."""
    change = """
torch.backends.cuda.preferred_blas_library("cublas")
torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
torch.backends.cudnn.rnn.fp32_precision = "tf32"
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, True)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
torch.backends.cuda.matmul.allow_fp16_accumulation = True
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.deterministic = False
"""
    before, after, changed = switch("cuda", change)
    assert before["cudnn.conv.fp32_precision"] == "tf32"
    assert after == {name: str(value) for name, value in pin.GPU_SWITCHES.items()}
    assert {name for name in after if after[name] != changed[name]} == pin.GPU_SWITCHES.keys()
    assert changed["cuda.matmul.allow_bf16_reduced_precision_reduction"] == "(False, True)"
