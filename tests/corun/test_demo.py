"""What `make demo` does with a cluster, before one of fakes: streams, the kill in the middle, receipts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corun.testing import local_cluster
from corun.testing.engines import expected
from tests.over_fakes import chat_model, model, nodes_come_back_soon

__all__ = ["chat_model", "model", "nodes_come_back_soon"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VICTIM", "d2")
    return module


@pytest.mark.parametrize("as_chats", [True, False])
async def test_a_node_is_killed_in_the_middle_and_the_streams_go_on_with_the_same_bits(
    demo: Any, chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_chats: bool
) -> None:
    monkeypatch.setattr(demo, "TOKENS_BEFORE_KILL", 24)
    monkeypatch.setattr(demo, "process_of", lambda node: node)
    killing: list[asyncio.Task[None]] = []
    async with local_cluster(decode=2, model=chat_model, step_ms=5, slots=8) as cluster:

        def kill(node: str, number: int) -> None:
            assert any("leases of d2@" in what for what in cluster.held()), "nothing runs on it"
            killing.append(asyncio.ensure_future(cluster.kill(node)))

        monkeypatch.setattr(demo.os, "kill", kill)
        texts = demo.QUESTIONS if as_chats else demo.BEGINNINGS
        prompts, done = await demo.Streams(cluster.address, texts).run(as_chats)
        demo.show_receipts(done)
        assert len(killing) == 1
        await killing[0]
    for index, (prompt, generation) in enumerate(zip(prompts, done, strict=True)):
        token_ids, logprobs, _ = expected(prompt, demo.PARAMS, seed=demo.SEED + index)
        assert (generation.token_ids, generation.logprobs) == (tuple(token_ids), tuple(logprobs))
    assert "d1" in {generation.receipt.decode_node.node_id for generation in done}
    out = capsys.readouterr().out
    assert "kill -9: d2 is gone" in out
    assert max(len(line) for line in out.split("\n") if "│" in line) <= 80


@pytest.mark.parametrize(("code", "model_name"), [(0, "smollm2"), (4, "tiny")])
def test_what_cannot_be_fetched_is_said(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, model_name: str
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code))
    assert demo.fetched_model() == model_name
    assert ("smollm2 cannot be fetched here, so this runs tiny" in capsys.readouterr().out) == (code == 4)


def test_another_failure_of_the_model_ends_the_demo(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="corun model failed with exit code 1"):
        demo.fetched_model()


def test_a_node_is_found_among_the_processes_of_this_one(demo: Any) -> None:
    words = [sys.executable, "-c", "print(flush=True); input()", "--node-id", "decode-7", "--host", "here"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # A process that begins to run another program has no command line for a moment.
        assert demo.process_of("decode-7") == process.pid
        process.stdin.write(b"\n")
    with pytest.raises(SystemExit, match="decode-7 has no process"):
        demo.process_of("decode-7")
    assert os.getpid() != process.pid
