"""A whole cluster on this machine: start it, stream a dozen prompts at once, verify every bit, stop it.

    make demo

The demo uses only what a user has: the `corun` commands and the SDK.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from corun import AsyncClient, CorunError, Generation, SamplingParams
from corun.completion import Assembler
from corun.processes import descendants, living
from corun.records.rows import result_row, to_line

START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 120.0
LINE_WIDTH = 64
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, logprobs=True)
PROMPTS = (
    "Once upon a time",
    "The old man opened the window",
    "One day a young girl",
    "In the morning the town",
    "Nothing is lost",
    "The wind and the rain",
    "Every evening he counted the hours",
    "She told the same story",
    "Under the great tree",
    "The people from the hills",
    "A broken clock",
    "And the first word was",
)

console = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    start = time.monotonic()
    console.rule("start: 1 router + 1 prefill node + 1 decode node, tiny model, CPU")
    with cluster() as (address, tree):
        console.rule(f"stream: {len(PROMPTS)} prompts at once")
        done = asyncio.run(stream_all(address))
        show_receipts(done)

        console.rule("corun verify: run the receipts again, in other company, slots and order")
        report = verify(address, done)
        console.rule("stop")
    left = living(tree)
    console.rule(f"{time.monotonic() - start:.0f} s")
    bits = "every bit agreed" if report["match"] else "BITS DIFFER"
    processes = f"processes left: {left}" if left else "no process left"
    console.print(f"{report['cases']} prompts, run again {report['runs']} times: {bits}; {processes}.", style="bold")
    return 0 if report["match"] and not left else 1


@contextmanager
def cluster() -> Iterator[tuple[str, dict[int, str]]]:
    """Run a cluster for as long as the block runs. Yield its address and a dict that holds its processes afterwards."""
    command = [sys.executable, "-m", "corun", "up", "--model", "tiny", "--slots", "8", "--port", "0"]
    # The cluster has its own session: Ctrl-C reaches only this process, which then ends the cluster in order.
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    tree: dict[int, str] = {}
    try:
        yield wait_until_ready(up), tree
    finally:
        tree |= descendants(os.getpid())
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            up.kill()


def wait_until_ready(up: subprocess.Popen[str]) -> str:
    """Return the router's address, which `corun up` prints when its cluster can be used."""
    assert up.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, up.terminate)
    watchdog.start()
    try:
        for line in up.stdout:
            console.print(line.rstrip(), style="green")
            if line.startswith("ready: "):
                return line.removeprefix("ready: ").partition(",")[0]
    finally:
        watchdog.cancel()
    raise SystemExit(f"the cluster did not start (exit code {up.wait(STOP_TIMEOUT_S)})")


async def stream_all(address: str) -> list[Generation]:
    """Run all prompts at once, and print the text of each as it comes."""
    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(stream(client, index) for index in range(len(PROMPTS)))))


async def stream(client: AsyncClient, index: int) -> Generation:
    assembler, text = Assembler(1), PROMPTS[index]
    async for chunk in client.stream(PROMPTS[index], PARAMS):
        assembler.add(chunk)
        text += chunk.text
        while len(text) >= LINE_WIDTH or (text and chunk.finish_reason is not None):
            shown = "".join(c if c.isprintable() else "·" for c in text[:LINE_WIDTH])
            console.print(f"{index:>4} │ {shown}")
            text = text[LINE_WIDTH:]
    return assembler.finish()


def show_receipts(done: list[Generation]) -> None:
    """Print one line for each receipt, of at most 80 columns."""
    for index, receipt in enumerate(generation.receipt for generation in done):
        ended = f"{receipt.num_output_tokens:>2} tokens, {receipt.finish_reason.value:<6}"
        nodes = f"{receipt.prefill_node.node_id} → {receipt.decode_node.node_id}"
        console.print(f"{index:>4} │ {receipt.seed:<19} │ {ended} │ {receipt.output_digest[:8]} │ {nodes}")
    console.print(f"contract fingerprint {done[0].receipt.fingerprint}")


def verify(address: str, done: list[Generation]) -> dict[str, Any]:
    """Run `corun verify` over the results. Print its table and return its JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as results:
        for index, (prompt, generation) in enumerate(zip(PROMPTS, done, strict=True)):
            results.write(to_line(result_row(str(index), prompt, PARAMS, generation)) + "\n")
        results.flush()
        command = [sys.executable, "-m", "corun", "verify", results.name, "--router", address]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    table, _, last_line = run.stdout.rstrip().rpartition("\n")
    console.print(table)
    if run.returncode not in (0, 3):  # 3: the command ran, and bits differ.
        raise SystemExit(f"corun verify failed with exit code {run.returncode}")
    report: dict[str, Any] = json.loads(last_line)
    return report


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CorunError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
