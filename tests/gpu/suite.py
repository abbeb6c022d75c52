"""The verification suite on a GPU: starts a cluster on a model, compares bits, prints a JSON line per check.

`python -m tests.gpu.suite MODEL_DIR [--prefill-gpu 0] [--decode-gpu 0] [--slots 256] [--logs DIR]`. The first check is
the paper's (Section V-B): 32 prompts, temperature 0.6, seed 42, alone and in a batch of 32.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from corun import Client, Generation, SamplingParams
from tests.e2e.conftest import Cluster, Processes, ready
from tests.e2e.test_determinism import Case, differing, run

START_TIMEOUT_S = 400.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    model: str
    prefill_gpu: int = 0
    decode_gpu: int = 0
    slots: int = 256
    chunk_size: int = 2048
    logs: Path = Path("suite-logs")
    needles: int = 3
    """How many prompts are run among 255 others."""
    long_output: int = 512
    checks: tuple[str, ...] = ()
    """Names of the checks to run; empty: all."""


def say(check: str, **values: object) -> None:
    print(json.dumps({"check": check, **values}), flush=True)


@contextmanager
def started(options: Options) -> Iterator[Cluster]:
    """A router, a prefill and a decode node; on one GPU they share its memory."""
    options.logs.mkdir(parents=True, exist_ok=True)
    processes = Processes(options.logs)
    share = "0.42" if options.prefill_gpu == options.decode_gpu else "0.85"
    node = ("--model", options.model, "--router", "127.0.0.1:50099", "--gpu-memory-utilization", share)
    cluster = Cluster("127.0.0.1:50099", options.model, processes)
    began = time.monotonic()
    try:
        processes.start("router", "router", "--port", "50099")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options.prefill_gpu)
        chunk = ("--chunk-size", str(options.chunk_size))
        processes.start("prefill", "prefill_node", *node, "--node-id", "p0", "--max-model-len", "8192", *chunk)
        if options.prefill_gpu == options.decode_gpu:
            _wait_for_memory(processes)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options.decode_gpu)
        slots = ("--slots", str(options.slots))
        processes.start("decode", "decode_node", *node, "--node-id", "d0", "--max-model-len", "8192", *slots)
        while not ready(cluster):
            if time.monotonic() - began > START_TIMEOUT_S or _dead(processes):
                raise RuntimeError("the cluster did not start")
            time.sleep(0.5)
        say("start", seconds=round(time.monotonic() - began, 1))
        yield cluster
    finally:
        say("stop", exit_codes=processes.stop())


def _dead(processes: Processes) -> bool:
    return any(process.poll() is not None for process in processes.running.values())


def _wait_for_memory(processes: Processes) -> None:
    """vLLM measures the memory that is free while it starts, so a second engine on the GPU starts after the first."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while "serving on" not in processes.log("prefill"):
        if time.monotonic() > deadline or _dead(processes):
            raise RuntimeError("the prefill node did not start")
        time.sleep(0.5)


def prompts(count: int, low: int, high: int, seed: int, vocab: int = 150_000) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(draw.randint(low, high))] for _ in range(count)]


def cases(count: int, low: int, high: int, seed: int, **params: object) -> list[Case]:
    settings = {"logprobs": True, "ignore_eos": True, "max_tokens": 32, "temperature": 0.6, **params}
    made = SamplingParams(**settings)  # type: ignore[arg-type]
    return [(prompt, made, 42 + seed) for prompt in prompts(count, low, high, seed)]


def paper_test(client: Client, options: Options) -> None:
    checked = cases(32, 64, 512, 0, max_tokens=8)
    compare(client, "paper: 32 prompts alone, in a batch of 32", checked, concurrency=32)


def all_slots(client: Client, options: Options) -> None:
    checked = cases(options.slots, 1, 1024, 1, max_tokens=24)
    compare(client, f"{options.slots} prompts by fours, in all {options.slots} slots", checked, options.slots, alone=4)


def ragged(client: Client, options: Options) -> None:
    edges = [1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1023, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 6000]
    made = [(prompts(1, n, n, n)[0], SamplingParams(max_tokens=16, logprobs=True, ignore_eos=True), n) for n in edges]
    compare(client, "prompts around block, bucket and chunk edges", made, concurrency=len(made))


def mixed(client: Client, options: Options) -> None:
    styles = [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"logit_bias": {40: 4.0}},
        {"min_tokens": 12},
    ]
    made = [
        case for i, style in enumerate(styles) for case in cases(4, 32, 700, 50 + i, **{"temperature": 1.0, **style})
    ]
    compare(client, "greedy, seeded, filtered, penalised mixed", made, concurrency=len(made))


def needle(client: Client, options: Options) -> None:
    for seed in range(options.needles):
        target = cases(1, 300, 300, 90 + seed, max_tokens=64)
        crowd = cases(options.slots - 1, 1, 800, 190 + seed, max_tokens=96)
        alone = run(client, target, concurrency=1)
        spot = (37 + 100 * seed) % options.slots
        together = run(client, crowd[:spot] + target + crowd[spot:], concurrency=options.slots)
        report(f"needle {seed} among {options.slots - 1}", alone, together[spot : spot + 1])


def long_outputs(client: Client, options: Options) -> None:
    compare(client, f"{options.long_output} output tokens", cases(8, 100, 400, 7, max_tokens=options.long_output), 8)


def handoff(client: Client, options: Options) -> None:
    """One prompt at a time, one token each: what a long prompt costs before its first token."""
    made = cases(12, 6000, 6000, 5, max_tokens=1)
    run(client, made[:2], concurrency=1)
    began = time.monotonic()
    run(client, made[2:], concurrency=1)
    say("6000 in, 1 out, one at a time", seconds_each=round((time.monotonic() - began) / 10, 3))


def throughput(client: Client, options: Options) -> None:
    """Not a benchmark: a first look at how fast the fixed shape runs when all slots are busy."""
    made = cases(options.slots, 512, 512, 77, max_tokens=256)
    began = time.monotonic()
    run(client, made, concurrency=options.slots)
    seconds = time.monotonic() - began
    say(
        "512 in, 256 out, every slot once",
        seconds=round(seconds, 2),
        output_tokens_per_s=round(256 * len(made) / seconds),
    )


def compare(client: Client, check: str, checked: list[Case], concurrency: int, alone: int = 1) -> None:
    report(check, run(client, checked, concurrency=alone), run(client, checked, concurrency=concurrency))


def report(check: str, left: list[Generation], right: list[Generation]) -> None:
    say(check, total=len(left), equal=len(left) - len(differing(left, right)))


CHECKS: tuple[Callable[[Client, Options], None], ...] = (
    paper_test, handoff, ragged, mixed, needle, all_slots, throughput, long_outputs,
)  # fmt: skip


def main() -> int:
    options = tyro.cli(Options)
    with started(options) as cluster, cluster.client() as client:
        for check in CHECKS:
            if options.checks and check.__name__ not in options.checks:
                continue
            began = time.monotonic()
            try:
                check(client, options)
            except Exception as error:  # a failed check must not cost the others their GPU time
                say(check.__name__, error=f"{type(error).__name__}: {error}"[:500])
            say(f"{check.__name__} took", seconds=round(time.monotonic() - began, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
