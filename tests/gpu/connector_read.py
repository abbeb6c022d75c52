"""KV reads through vLLM's connector between a prefill and a decode engine, timed on the decode worker itself.

A decode node's own figures run until an engine step notices that a read has ended; these end with the read. Owns: the
two engines as processes, without nodes around them, and the data that is read. vLLM is imported in those processes
only. Must not know: which GPUs and sizes are of interest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig, PrefillConfig
from corun.config.flags import parse
from corun.node.kv.handshake import UNDER_WAY
from corun.node.vllm import start as base
from corun.processes import descendants, end_tree
from corun.types import NixlEndpoint
from corun_bench.nodes import NodePlan, Topology, environment, has_gpu
from tests.e2e import engines

PREFILL, DECODE = "prefill_node", "decode_node"
CONFIGS: dict[str, type[PrefillConfig | DecodeConfig]] = {PREFILL: PrefillConfig, DECODE: DecodeConfig}
WORKERS = {
    PREFILL: "tests.gpu.connector_read_worker.FilledPrefillWorker",
    DECODE: "tests.gpu.connector_read_worker.ReadingDecodeWorker",
}
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
CONNECT_POLL_S = 0.05
READ_LIMIT_S = 20.0
"""The limit for all repeats of one read."""
STOP_TIMEOUT_S = 20.0
MAX_LOG = 3000
ORDERS = ("ascending", "shuffled")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that a started engine reports about itself."""

    endpoint: NixlEndpoint
    """The engine's NIXL endpoint, with the addresses of the stamps."""
    block_size: int
    """The tokens of a KV block."""
    num_blocks: int
    """The number of KV blocks, block 0 included, which is vLLM's null block."""


class EngineProcess:
    """An engine in a process of its own; its workers' methods are called through a pipe."""

    def __init__(self, plan: NodePlan, topology: Topology, log: Path) -> None:
        self._name = plan.name
        self._log = log
        config = parse(CONFIGS[plan.module], topology.flags(plan))
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, config, WORKERS[plan.module], log))
        with environment(CUDA_VISIBLE_DEVICES=",".join(map(str, plan.gpus)) if has_gpu() else None):
            self._process.start()
        theirs.close()

    def facts(self, timeout_s: float) -> Facts:
        """Wait for the engine's start and return its facts. Raises what `call` raises."""
        found: Facts = self._receive("start", timeout_s)
        return found

    def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call a method of the workers; return each rank's answer.

        Raises:
            TimeoutError: no answer came in time.
            RuntimeError: the method failed, or the process died.
        """
        self._link.send((method, args, timeout_s))
        answers: list[Any] = self._receive(method, timeout_s + 5.0)
        return answers

    def stop(self) -> None:
        """End the engine; leave no process."""
        tree = descendants(self._process.pid or 0)
        self._link.close()
        self._process.join(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.join()
        end_tree(tree, step_s=2.0)

    def _receive(self, what: str, timeout_s: float) -> Any:
        if not self._link.poll(timeout_s):
            raise TimeoutError(f"{self._name}: no end of {what} within {timeout_s:.0f} s:\n{self._log_tail()}")
        try:
            is_well, answer = self._link.recv()
        except EOFError:
            raise RuntimeError(f"{self._name} died during {what}:\n{self._log_tail()}") from None
        if not is_well:
            raise RuntimeError(f"{self._name}: {what}: {answer}")
        return answer

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-MAX_LOG:] if self._log.exists() else ""


def serve(link: Any, config: PrefillConfig | DecodeConfig, worker: str, log: Path) -> None:
    """Be an engine's process: start the engine, then call its workers as ordered, until the other end is closed."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    asyncio.run(_serve(link, config, worker))


async def _serve(link: Any, config: PrefillConfig | DecodeConfig, worker: str) -> None:
    endpoint = base.nixl_endpoint(config, f"read-{config.node_id}")
    async with engines.started(engines.arguments(config, endpoint, worker)) as llm:
        link.send((True, await _facts(llm, endpoint)))
        while (order := await asyncio.to_thread(_order, link)) is not None:
            link.send(await _answer(llm, *order))


async def _answer(llm: Any, method: str, args: tuple[Any, ...], timeout_s: float) -> tuple[bool, Any]:
    try:
        return True, await base.call_workers(llm, method, *args, timeout_s=timeout_s)
    except Exception as error:  # The parent decides whether to go on.
        return False, f"{type(error).__name__}: {error}"


def _order(link: Any) -> tuple[str, tuple[Any, ...], float] | None:
    try:
        order: tuple[str, tuple[Any, ...], float] = link.recv()
    except EOFError:
        return None
    return order


async def _facts(llm: Any, endpoint: NixlEndpoint) -> Facts:
    stamps = await base.call_workers(llm, "stamp_address", timeout_s=CALL_TIMEOUT_S)
    blocks = await base.call_workers(llm, "num_kv_blocks", timeout_s=CALL_TIMEOUT_S)
    return Facts(
        endpoint=replace(endpoint, stamp_addresses=tuple(stamps)),
        block_size=llm.vllm_config.cache_config.block_size,
        num_blocks=min(blocks),
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two engines that are connected."""

    prefill: EngineProcess
    decode: EngineProcess
    facts: tuple[Facts, Facts]
    start_s: float
    connect_s: float


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The number of repeats of a read after the first one, and the pause before each."""

    count: int
    pause_s: float


@contextmanager
def connected(topology: Topology, logs: Path) -> Iterator[Pair]:
    """Start and connect the first prefill and the first decode engine of a topology; leave no process.

    Raises what `EngineProcess.call` raises.
    """
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plans = [next(plan for plan in topology.nodes if plan.module == kind) for kind in (PREFILL, DECODE)]
    with ExitStack() as cleanup:
        processes, facts = [], []
        for plan in plans:
            processes.append(EngineProcess(plan, topology, logs / f"read-{plan.name}.log"))
            cleanup.callback(processes[-1].stop)
            if {*plans[0].gpus} & {*plans[1].gpus}:  # vLLM measures the free memory while it starts.
                facts.append(processes[-1].facts(_left(began, topology)))
        facts = facts or [process.facts(_left(began, topology)) for process in processes]
        ready = time.monotonic()
        connect(processes[1], facts[0].endpoint)
        seconds = {"start_s": ready - began, "connect_s": time.monotonic() - ready}
        yield Pair(prefill=processes[0], decode=processes[1], facts=(facts[0], facts[1]), **seconds)


def _left(began: float, topology: Topology) -> float:
    return max(0.0, began + topology.start_timeout_s - time.monotonic())


def connect(decode: EngineProcess, peer: NixlEndpoint) -> None:
    """Connect as a decode node does. Raises TimeoutError after 30 s without a handshake, RuntimeError if it fails."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    where = (peer.engine_id, peer.host, peer.port, peer.tp_size, peer.stamp_addresses)
    while reason := max(decode.call("connect", *where)):
        if reason != UNDER_WAY:
            raise RuntimeError(f"no NIXL connection to {peer.host}:{peer.port}: {reason}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no NIXL handshake with {peer.host}:{peer.port} within {CONNECT_TIMEOUT_S:.0f} s")
        time.sleep(CONNECT_POLL_S)
    if reason := max(decode.call("warm", peer.engine_id)):
        raise RuntimeError(f"no first read from {peer.host}:{peer.port}: {reason}")


def measure(
    topology: Topology, prompt_lengths: Sequence[int], block_counts: Sequence[int], repeats: Repeats, logs: Path
) -> Iterator[dict[str, Any]]:
    """Yield a result per number of blocks, order and rank, as they come. Raises what `connected` raises."""
    with connected(topology, logs) as pair:
        yield {"what": "connector: connect and warm", "ms": _ms(pair.connect_s), "start_s": round(pair.start_s, 1)}
        block_size = pair.facts[0].block_size
        counts = dict.fromkeys([*(-(-length // block_size) for length in prompt_lengths), *block_counts])
        most = min(facts.num_blocks for facts in pair.facts) - 1
        for count in counts:
            named = {"what": f"connector: {count} blocks", "tokens": count * block_size}
            if count > most:
                yield {**named, "error": f"an engine has only {most} blocks"}
                continue
            for order in ORDERS:
                yield from ({**named, "order": order, **found} for found in _read(pair, count, order, repeats))


def _read(pair: Pair, count: int, order: str, repeats: Repeats) -> Iterator[dict[str, Any]]:
    """Yield the figures of one read of each rank. Before it, both sides hold different random bits."""
    theirs, ours = (pick(order, count, facts.num_blocks, seed) for seed, facts in enumerate(pair.facts, 1))
    pair.prefill.call("fill_kv", theirs, 2 * count)
    pair.decode.call("fill_kv", ours, 2 * count + 1)
    expected, before = pair.prefill.call("digest_kv", theirs), pair.decode.call("digest_kv", ours)
    engine_id = pair.facts[0].endpoint.engine_id
    reads = pair.decode.call("read_kv", engine_id, theirs, ours, repeats.count, repeats.pause_s, READ_LIMIT_S)
    after = pair.decode.call("digest_kv", ours)
    for rank, read in enumerate(reads):
        is_new = not {*expected[rank]} & {*before[rank]}
        shown = figures(read) | {"bytes_equal": is_new and after[rank] == expected[rank]}
        yield shown if len(reads) == 1 else {"rank": rank, **shown}


def pick(order: str, count: int, num_blocks: int, seed: int) -> list[int]:
    """Return the first blocks in ascending order, or random blocks of the pool in no order; never the null block."""
    return [*range(1, count + 1)] if order == "ascending" else random.Random(seed).sample(range(1, num_blocks), count)


def figures(read: dict[str, Any]) -> dict[str, Any]:
    """Return medians without the first read, which is reported by itself."""
    posts, waits = read["post_s"], read["wait_s"]
    totals = [post + wait for post, wait in zip(posts, waits, strict=True)]
    middle, post, wait = (statistics.median(times[1:] or times) for times in (totals, posts, waits))
    return {
        "block": read["bytes"] // read["descriptors"],
        "first_ms": _ms(totals[0]),
        "ms": _ms(middle),
        "post_ms": _ms(post),
        "wait_ms": _ms(wait),
        "gb_per_s": round(read["bytes"] / middle / 1e9, 2),
        "slowest_ms": _ms(max(totals[1:] or totals)),
        "repeats": len(totals) - 1,
        **{name: read[name] for name in ("bytes", "descriptors", "merged_descriptors")},
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
