"""OpenAI's batch files through `corun batch`, against a cluster of fake engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corun import AsyncClient, DeadlineError, InvalidArgumentError, SamplingParams
from corun.cli import main
from corun.cli.openai_batch import OpenAiFile
from corun.gateway.batches import Request
from corun.testing import LocalCluster, expected, local_cluster
from tests.corun.cli.conftest import read_rows, write_rows
from tests.over_fakes import chat_model
from tests.router.asking import token_of, with_tokens

__all__ = ["chat_model"]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster() as cluster:
        yield cluster


def line(custom_id: Any, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def batch(cluster: LocalCluster, source: Path, output: Path, *more: str) -> int:
    return main(["batch", str(source), "-o", str(output), "--router", cluster.address, *more])


def test_lines_are_answered_and_broken_ones_say_what_is_wrong(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = line("a", prompt=[5, 6, 7], max_tokens=6, seed=3, logprobs=0, return_token_ids=True)
    rows = [
        good,
        line("hot", prompt="x", temperature=5),
        line("other", prompt="x", model="gpt-4"),
        line("a", prompt="x"),
        line("url", "/v1/embeddings", input="x"),
        line("stream", prompt="x", stream=True),
        line("unknown", prompt="x", top_pp=1),
    ]
    write_rows(source, *rows)
    with source.open("a") as file:
        file.write("{\n")
    assert batch(cluster, source, output) == 2
    found = read_rows(output)
    assert len(found) == 8, "every line has an answer"
    by_id = {row["custom_id"]: row for row in found if row["response"]}
    done = by_id["a"]
    assert (done["response"]["status_code"], done["error"], done["id"][:10]) == (200, None, "batch_req_")
    (choice,) = done["response"]["body"]["choices"]
    ids, logprobs, _ = expected([5, 6, 7], SamplingParams(max_tokens=6), seed=3)
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == (ids, logprobs)
    assert choice["corun"]["receipt"]["request_id"] == done["response"]["request_id"]
    refused = {name: by_id[name]["response"] for name in ("hot", "other", "stream", "unknown")}
    assert {name: each["status_code"] for name, each in refused.items()} == {
        "hot": 400, "other": 404, "stream": 400, "unknown": 400
    }  # fmt: skip
    error = refused["hot"]["body"]["error"]
    assert (error["param"], error["value"], error["line"]) == ("temperature", "5", 2)
    assert error["limit"]
    broken = {row["error"]["line"]: row["error"] for row in found if row["error"]}
    assert {number: each["param"] for number, each in broken.items()} == {4: "custom_id", 5: "url", 8: "body"}
    said = capsys.readouterr().err
    assert "1 finished, 7 refused of 8 prompts" in said
    assert f"refused {source}:2: " in said
    before = output.read_bytes()
    assert batch(cluster, source, output) == 2, "what was refused before is told again"
    assert output.read_bytes() == before, "what has an answer is not run again"
    said = capsys.readouterr().err
    assert "0 finished, 1 were there before, 7 refused of 8 prompts" in said
    assert f"refused {source}:2: " in said


def test_an_interrupted_file_goes_on_with_the_same_bits(cluster: LocalCluster, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", *(line(f"p{i}", prompt=f"ü{i}", max_tokens=4) for i in range(5)))
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert batch(cluster, source, whole, "--seed", "7") == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    assert batch(cluster, source, torn, "--seed", "7") == 0

    def texts(path: Path) -> dict[str, Any]:
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in read_rows(path)}

    assert texts(torn) == texts(whole)
    assert len(set(texts(whole))) == 5
    before = torn.read_bytes()
    assert batch(cluster, source, torn, "--seed", "8") == 2, "another seed asks for something else"
    assert torn.read_bytes() == before


def test_options_that_would_be_dropped_are_refused(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in.jsonl", line("a", prompt="x"))
    assert batch(cluster, source, tmp_path / "out.jsonl", "--max-tokens", "5") == 2
    assert "max_tokens = 5: must be in the body" in capsys.readouterr().err


def test_chats_are_answered(chat_model: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rows = [line("c", CHAT, messages=messages, max_tokens=4), line("bad", CHAT, messages=[])]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    with local_cluster(model=chat_model) as cluster:
        batch(cluster, source, output)
    found = {row["custom_id"]: row["response"] for row in read_rows(output)}
    assert found["c"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["c"]["body"]["usage"]["completion_tokens"] == 4


def test_the_files_need_neither_aiohttp_nor_jinja2() -> None:
    script = "import sys, corun.cli.openai_batch; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not {"aiohttp", "jinja2"} & set(run.stdout.split())


def test_the_error_of_a_broken_line_does_not_stand_for_a_request(cluster: LocalCluster, tmp_path: Path) -> None:
    """A run may be killed after it wrote the errors of broken lines and before it answered the others."""
    rows = [line("a", prompt="x", max_tokens=2), line("a", prompt="y"), line(["list"], prompt="z")]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    assert batch(cluster, source, output) == 2
    write_rows(output, *(row for row in read_rows(output) if row["error"]))
    assert batch(cluster, source, output) == 2
    assert [row["custom_id"] for row in read_rows(output) if row["response"]] == ["a"]
    assert len(read_rows(output)) == 3


def test_text_that_no_file_can_hold_is_refused_in_its_line_only(cluster: LocalCluster, tmp_path: Path) -> None:
    rows = [
        line("a", prompt="x", max_tokens=2),
        line("\ud800", prompt="x"),
        line("id", prompt="x", request_id="\ud800"),
        line("long", prompt="x", request_id="x" * 129),
        line("name", prompt="x", **{"\ud800": 1}),
        line("value", prompt="\ud800"),
    ]
    source = write_rows(tmp_path / "in.jsonl", *rows)
    for seed in ((), ("--seed", "7")):
        output = tmp_path / f"out{len(seed)}.jsonl"
        assert batch(cluster, source, output, *seed) == 2
        found = {row["error"]["line"]: row["error"]["param"] for row in read_rows(output) if row["error"]}
        assert found == {2: "custom_id", 3: "body.request_id", 4: "body.request_id"}
        answers = {row["custom_id"]: row["response"]["status_code"] for row in read_rows(output) if row["response"]}
        assert answers == {"a": 200, "name": 400, "value": 400}
        assert batch(cluster, source, output, *seed) == 2
        assert len(read_rows(output)) == 6


def test_null_means_the_same_as_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    def answered(name: str, **body: Any) -> dict[str, Any]:
        source, output = tmp_path / f"{name}.in", tmp_path / f"{name}.out"
        write_rows(source, line("a", prompt="x", max_tokens=4, **body))
        assert batch(cluster, source, output, "--seed", "7") == 0
        return read_rows(output)[0]

    absent, null = answered("absent"), answered("null", seed=None, request_id=None, priority=None)
    assert null["id"] == absent["id"] == null["response"]["request_id"]
    assert null["response"]["body"]["choices"][0]["corun"] == absent["response"]["body"]["choices"][0]["corun"]
    assert answered("other", seed=8)["id"] != absent["id"]


def test_the_priority_of_a_run_is_not_part_of_what_its_lines_ask_for(cluster: LocalCluster, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", line("a", prompt="x", max_tokens=2))
    output = tmp_path / "out.jsonl"
    assert batch(cluster, source, output, "--priority", "low") == 0
    before = output.read_bytes()
    assert batch(cluster, source, output, "--priority", "normal") == 0
    assert output.read_bytes() == before


def test_a_priority_that_a_line_may_not_have_is_an_error_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line("a", prompt="x", max_tokens=2), line("high", prompt="x", max_tokens=2, priority="high")]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    tokens = with_tokens(tmp_path, "limited max_priority=normal")
    (tmp_path / "token").write_text(token_of("limited"))
    monkeypatch.setenv("CORUN_TOKEN_FILE", str(tmp_path / "token"))
    with local_cluster(**tokens) as cluster:
        assert batch(cluster, source, output) == 2
        found = {row["custom_id"]: row["response"] for row in read_rows(output)}
        assert {name: each["status_code"] for name, each in found.items()} == {"a": 200, "high": 403}
        assert found["high"]["body"]["error"]["param"] == "priority"
        capsys.readouterr()
        assert batch(cluster, source, tmp_path / "other.jsonl", "--priority", "high", "--concurrency", "1") == 2
        assert not read_rows(tmp_path / "other.jsonl"), "the priority of the run is no error of a line"
    assert "must be normal or lower" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"id": ["a"]},
        {"custom_id": {}},
        {"response": None},
        {"response": "no object"},
        {"response": {"body": []}},
        {"response": {"body": {"error": "no object"}}},
        {"error": "no object"},
    ],
    ids=str,
)
def test_an_output_with_a_row_of_another_form_is_refused_by_its_line(tmp_path: Path, change: dict[str, Any]) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", line("a", prompt="x")), tmp_path / "out.jsonl"
    file = OpenAiFile(source, output, seed=None, priority="low")
    (item,) = file.unfinished()
    assert isinstance(item, Request)
    response = {"status_code": 200, "request_id": "r", "body": {}}
    row = {"id": item.id, "custom_id": "a", "response": response, "error": None}
    write_rows(output, row)
    assert file.unfinished() == []
    write_rows(output, row, {**row, **change})
    with pytest.raises(InvalidArgumentError, match=r"out\.jsonl:2: id = .*must be that of an answer in OpenAI's form"):
        file.unfinished()


async def test_the_time_of_a_line_ends_all_its_calls(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", line("a", prompt="x", max_tokens=500))
    file = OpenAiFile(source, tmp_path / "out.jsonl", seed=None, priority="low")
    (item,) = file.unfinished()
    async with local_cluster(step_ms=1000) as cluster, AsyncClient(cluster.address, timeout_s=600) as client:
        with pytest.raises(DeadlineError, match=r"in\.jsonl:1"):
            await file.answer(client, item, 0.2)
