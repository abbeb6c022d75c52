"""The kernels of log probabilities: on Triton's interpreter, and compiled for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loading import ENVIRONMENT, load

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_on_tritons_interpreter() -> None:
    """Run `interpreted.py` in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    environment = {**os.environ, **ENVIRONMENT, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


ALIGNED = [["tt.divisibility", 16]]
SIGNATURES: dict[str, tuple[dict[str, str], dict[str, int], int]] = {
    "_sum_parts": (
        {
            "logits": "*bf16",
            "copy": "*bf16",
            "copies": "i32",
            "stride": "i32",
            "vocab": "i32",
            "largest": "*fp32",
            "sums": "*fp32",
        },
        {"size": 4096},
        8,
    ),
    "_combine": (
        {
            "logits": "*bf16",
            "drawn_from": "*bf16",
            "stride": "i32",
            "drawn_stride": "i32",
            "vocab": "i32",
            "tokens": "*i64",
            "largest": "*fp32",
            "sums": "*fp32",
            "parts": "i32",
            "found": "*fp32",
        },
        {"width": 64},
        1,
    ),
}
"""The types of each kernel's arguments for a vocabulary of 151,936, its constants, its warps."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_they_compile_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton: Any = load("triton")
    types, constants, warps = SIGNATURES[name]
    divisible = [
        argument for argument, kind in types.items() if kind.startswith("*") or argument in ("stride", "vocab")
    ]
    aligned = {(place,): ALIGNED for place, argument in enumerate(types) if argument in divisible}
    source = load("triton.compiler").ASTSource(
        getattr(load("corun.node.vllm.logprob_kernels"), name),
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=aligned,
    )
    target = load("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    assembly = triton.compile(source, target=target, options={"num_warps": warps}).asm
    assert len(assembly["cubin"]) > 0
    if name == "_sum_parts":
        assert "ld.global.v" in assembly["ptx"], "a logit a load would take many times as long"
