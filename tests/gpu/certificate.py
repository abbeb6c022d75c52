"""Certifies the freedoms of a model's prefill or decode engine, and forces those of prefill to be refused.

`python -m tests.gpu.certificate --model DIR [--role decode]` prints a JSON line for each run, with the certificate and
the seconds of each part. The prefill engine is tested as a node does it; without what is known by name, so that steps
must find it; with a neighbour that leaks into results, which must refuse `packed`; with results that follow the cuts,
which must refuse `chunks`; and with a control that never differs, which must make the certificate void. Exit code: 0,
or 1 if something that was forced went unnoticed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from corun.config.extras import default_slots
from corun.config.fields import DecodeConfig, PrefillConfig
from corun.node.vllm import start as base
from decode_node import engine as decode
from prefill_node import engine as prefill

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
FORCED = {"neighbours leak": "packed", "cuts leak": "chunks", "dead": "packed"}
"""What must be refused if it is forced."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Shows the certificates of a model on this machine."""

    model: str
    """The model's directory."""
    role: Literal["prefill", "decode"] = "prefill"
    chunk_size: int = 2048
    gpu_memory_utilization: float = 0.8
    max_model_len: int = 8192

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of both nodes."""
        names = ("model", "gpu_memory_utilization", "max_model_len")
        return {name: getattr(self, name) for name in names}


def prefill_arguments(options: Options) -> Any:
    config = PrefillConfig(**options.shared, chunk_size=options.chunk_size)
    made = prefill.arguments(config, base.nixl_endpoint(config, "certificate"))
    made.worker_cls = "tests.gpu.forced_worker.ForcedPrefillWorker"
    return made


def decode_arguments(options: Options) -> Any:
    config = DecodeConfig(**options.shared, slots=default_slots())
    return decode.arguments(config, base.nixl_endpoint(config, "certificate"))


async def ask(made: Any, method: str, asked: list[Any]) -> list[list[dict[str, Any]]]:
    """Start an engine and return what each rank's worker answers to each call."""
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(made)
    answers = []
    try:
        for argument in asked:
            began = time.monotonic()
            answers.append(await base.call_workers(llm, method, argument, timeout_s=TIMEOUT_S))
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps({"asked": argument, "seconds": seconds, "ranks": answers[-1]}), flush=True)
    finally:
        llm.shutdown()
    return answers


def unnoticed(asked: list[str], answers: list[list[dict[str, Any]]]) -> list[str]:
    """Return what was forced and refused by no rank. A dead control shows only where nothing else differs."""
    refused = {what: [rank["refused"] for rank in ranks] for what, ranks in zip(asked, answers, strict=True)}
    held = not any(reason for rank in refused[""] for reason in rank.values())
    forced = {what: name for what, name in FORCED.items() if held or what != "dead"}
    return [what for what, name in forced.items() if not any(rank[name] for rank in refused[what])]


def main() -> int:
    options = tyro.cli(Options)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if options.role == "decode":
        asyncio.run(ask(decode_arguments(options), "certify_freedoms", [["rows"]]))
        return 0
    asked = ["", "not by name", *FORCED]
    answers = asyncio.run(ask(prefill_arguments(options), "certify_forced", asked))
    missed = unnoticed(asked, answers)
    print(json.dumps({"unnoticed": missed}), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
