"""`corun chat` in front of routers with fake nodes: history, seeds, receipts, an answer that is ended, errors."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corun.cli import chat, main, own_cluster
from corun.client.client import Client
from corun.completion import Chunk
from corun.config.cluster_file import NODES, read
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch import check
from corun.processes import end_tree, living, started
from corun.testing import local_cluster
from corun.testing.engines import expected
from router.text import Tokenizer
from tests.clusters import FakeCluster, cluster
from tests.machine import wait_for
from tests.over_fakes import chat_model, model, nodes_come_back_soon

__all__ = ["chat_model", "model", "nodes_come_back_soon"]
FLAGS = ("--temperature", "1", "--max-tokens", "8")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that types lines into a chat and returns its exit code, stdout and stderr."""

    async def type_in(fake: FakeCluster, *lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[int, str, str]:
        if lines:
            monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = await asyncio.to_thread(main, ["chat", "--router", fake.address, *flags])
        return code, *capsys.readouterr()

    return type_in


def answer(folder: str, prompt: str, *, seed: int) -> str:
    """Return what the fake cluster's model says."""
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer._encode(prompt, special=False).ids
    token_ids, _, _ = expected(ids, chat.ChatSamplingOptions(max_tokens=8, temperature=1).params(), seed=seed)
    return tokenizer.decode(token_ids)


def rendered(*messages: tuple[str, str]) -> str:
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"<s>{turns}<|im_start|>assistant\n"


async def test_an_answer_knows_what_was_said_before(talk: Any, chat_model: str) -> None:
    first = answer(chat_model, rendered(("user", "One")), seed=7)
    turns = (("user", "One"), ("assistant", first), ("user", "Two"))
    second = answer(chat_model, rendered(*turns), seed=7)
    async with cluster(chat_model) as fake:
        code, out, err = await talk(fake, "/seed 7", "One", "Two", "/new", "One", "/quit", "Three")
    assert (code, err) == (0, "")
    assert out == f"seed 7\n{first}\n{second}\n{first}\n"
    assert second != answer(chat_model, rendered(("user", "Two")), seed=7)


async def test_the_system_is_told_first_and_stays(talk: Any, chat_model: str) -> None:
    told = answer(chat_model, rendered(("system", "Be short."), ("user", "One")), seed=1)
    async with cluster(chat_model) as fake:
        _, out, _ = await talk(fake, "One", "/new", "One", flags=(*FLAGS, "--seed", "1", "--system", "Be short."))
    assert out == f"{told}\n{told}\n"


async def test_the_receipt_is_that_of_the_last_whole_answer(talk: Any, chat_model: str) -> None:
    async with cluster(chat_model) as fake:
        _, out, _ = await talk(fake, "/receipt", "/seed 5", "One", "/receipt", "/seed", "One", "/receipt", "/help")
    assert out.startswith("there is no whole answer yet\n")
    seeds = re.findall(r"^seed +(\d+)$", out, flags=re.MULTILINE)
    assert (seeds[0], seeds[1], len(seeds)) == ("5", "5", 3)  # What was set, the first receipt, the second one.
    assert seeds[2] != "5"
    assert len(re.findall(r"^output digest +[0-9a-f]{64}$", out, flags=re.MULTILINE)) == 2
    assert out.endswith(chat.HELP + "\n")


async def test_ctrl_c_ends_an_answer_and_what_came_of_it_stays(
    talk: Any, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Callable[..., Iterator[Chunk]] = Client.stream
    rendered_before: list[str] = []
    tokenize = Client.tokenize

    def interrupted(client: Client, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        monkeypatch.setattr(Client, "stream", stream)
        yield from itertools.islice(stream(client, *args, **kwargs), 3)
        raise KeyboardInterrupt

    def seen(client: Client, text: str, **kwargs: Any) -> Any:
        rendered_before.append(text)
        return tokenize(client, text, **kwargs)

    monkeypatch.setattr(Client, "stream", interrupted)
    monkeypatch.setattr(Client, "tokenize", seen)
    async with cluster(chat_model) as fake:  # It also checks that the answer that was ended holds nothing.
        code, out, _ = await talk(fake, "/seed 7", "One", "/receipt", "Two")
    partial = out.removeprefix("seed 7\n").partition(" …\n")[0]
    assert code == 0
    assert answer(chat_model, rendered(("user", "One")), seed=7).startswith(partial)
    assert partial
    assert "there is no whole answer yet" in out
    assert rendered_before[1] == rendered(("user", "One"), ("assistant", partial), ("user", "Two"))


def test_a_real_ctrl_c_ends_the_answer_and_not_the_chat(chat_model: str) -> None:
    with local_cluster(model=chat_model, step_ms=20) as fake:
        flags = ("--router", fake.address, "--max-tokens", "200", "--temperature", "1")
        command = [sys.executable, "-m", "corun", "chat", *flags]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("One\n")
            process.stdin.flush()
            seen = process.stdout.read(3)
            process.send_signal(signal.SIGINT)
            while not seen.endswith(" …\n") and (more := process.stdout.read(1)):
                seen += more
            process.stdin.write("/receipt\n/quit\n")
            process.stdin.close()
            assert process.stdout.read() == "there is no whole answer yet\n"
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("lines", "flags", "said"),
    [
        (["/seed -1"], FLAGS, "seed = '-1': must be in [0, 2^63)"),
        (["/seed 9223372036854775808"], FLAGS, "must be in [0, 2^63)"),
        (["/seed " + "9" * 5000], FLAGS, "must be in [0, 2^63)"),
        (["/sed 3"], FLAGS, "command = '/sed': must be /seed, /receipt, /new, /help or /quit"),
        (["/quit"], (*FLAGS, "--n", "2"), "n = 2: must be 1 in a chat"),
        (["One " * 5000], FLAGS, "prompt.text"),
    ],
)
async def test_bad_input_is_named(
    talk: Any, chat_model: str, lines: list[str], flags: tuple[str, ...], said: str
) -> None:
    async with cluster(chat_model) as fake:
        code, _, err = await talk(fake, *lines, flags=flags)
    assert (code, said in err) == (2, True), err


async def test_a_line_that_is_no_text_is_refused(talk: Any, chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    async with cluster(chat_model) as fake:
        code, _, err = await talk(fake)
    assert (code, "line = 2 bytes: must be text in utf-8" in err) == (2, True), err


async def test_in_a_terminal_an_error_does_not_end_the_chat(
    talk: Any, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    lines = iter(["/seed x", "/seed 7", "One"])

    def typed(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat, "input", typed, raising=False)
    first = answer(chat_model, rendered(("user", "One")), seed=7)
    async with cluster(chat_model) as fake:
        code, out, err = await talk(fake)
    assert (code, "seed = 'x'" in err) == (0, True)
    assert out == f"/help lists what may be typed.\nseed 7\n{first}\n\n"


async def test_a_model_without_a_chat_template_is_refused(talk: Any, model: str) -> None:
    async with cluster(model) as fake:
        code, _, err = await talk(fake, "One")
    assert (code, "chat_template" in err) == (2, True)


def test_a_cluster_of_its_own_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="model = "), chat.own_cluster(str(tmp_path), {}, print):
        pytest.fail("it has started")


def test_a_cluster_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused = {"colocated": 1, "decode": 1, "prefill": 0, "router": 0}
    with (
        pytest.raises(UnavailableError, match=r"the cluster did not start \(exit code 2\)"),
        chat.own_cluster(str(tmp_path), refused, print),
    ):
        pytest.fail("it has started")


def test_a_cluster_that_is_too_slow_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code of a process that was told to end says nothing to a user whose machine is slow."""
    monkeypatch.setattr(own_cluster, "_UP", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(own_cluster, "START_TIMEOUT_S", 0.1)
    with (
        pytest.raises(UnavailableError, match=r"not ready after 0\.1 s.*corun up"),
        own_cluster.own_cluster("tiny", {}, print),
    ):
        pytest.fail("it has started")


@pytest.mark.parametrize("replicas", [{"colocated": 1}, {"prefill": 1, "decode": 2}])
def test_a_cluster_of_its_own_is_one_that_can_be_started(
    replicas: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "cluster.toml"
    up = f"import shutil, sys; shutil.copy(sys.argv[1], {str(seen)!r}); print('ready: here:1, ', flush=True)"
    monkeypatch.setattr(own_cluster, "_UP", (sys.executable, "-c", up))
    with chat.own_cluster("smollm2", replicas, print) as address:
        assert address == "here:1"
    check(spec := read(seen))
    (pool,) = spec.pools
    assert {role: count for role in NODES if (count := pool.count(role))} == replicas
    assert pool.model == "smollm2"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_ends_with_the_process_that_started_it(number: signal.Signals) -> None:
    """A closed terminal window must not leave engines behind."""
    up = "import os, time; print(f'ready: {os.getpid()}, ', flush=True); time.sleep(600)"
    code = f"""
import sys, time
from corun.cli import own_cluster
own_cluster._UP = (sys.executable, "-c", {up!r})
with own_cluster.own_cluster("tiny", {{}}, lambda _: None) as address:
    print(address, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            cluster = started([int(parent.stdout.readline())])
            assert living(cluster)
            parent.send_signal(number)
            wait_for(lambda: not living(cluster), "the cluster has ended", 60.0)
        finally:
            parent.kill()


def test_a_cluster_that_does_not_stop_in_time_leaves_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    up = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphan = [sys.executable, "-c", "import time; time.sleep(600)"]
print(f"ready: {subprocess.Popen(orphan, start_new_session=True).pid}, ", flush=True)
time.sleep(600)
"""
    monkeypatch.setattr(own_cluster, "_UP", (sys.executable, "-c", up))
    monkeypatch.setattr(own_cluster, "STOP_TIMEOUT_S", 0.5)
    with own_cluster.own_cluster("tiny", {}, lambda _: None) as pid:
        orphan = started([int(pid)])
        assert living(orphan)
    try:
        assert not living(orphan)
    finally:
        end_tree(orphan, step_s=0.0)
