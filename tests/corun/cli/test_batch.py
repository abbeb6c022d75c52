"""`corun batch`, and the rows that it reads and writes."""

from __future__ import annotations

import json
import os
import signal
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.cli import batch
from corun.errors import InvalidArgumentError, OverloadedError, UnavailableError
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.records.rows import drop_torn_line, params_from_dict, params_to_dict, short_fp32
from tests.corun.cli.conftest import read_rows, write_rows
from tests.corun.fake_router import WAIT_S, FakeRouter
from tests.machine import wait_for


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """A file of six prompts."""
    return write_rows(tmp_path / "in.jsonl", *({"prompt": f"ü{i}", "seed": i} for i in range(6)))


def test_a_torn_line_is_found_without_reading_the_whole_file(output: Path) -> None:
    whole = b'{"id": "a"}\n' * 1_000_000
    output.write_bytes(whole + b'{"id": "b')
    tracemalloc.start()
    try:
        assert drop_torn_line(output)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1_000_000
    assert output.read_bytes() == whole
    assert not drop_torn_line(output)
    output.write_bytes(b"")
    assert not drop_torn_line(output)


def test_rows_can_be_verified(corun: Any, tmp_path: Path, output: Path) -> None:
    rows = [
        {"prompt": "hello", "seed": 5, "params": {"max_tokens": 3, "logprobs": True, "logit_bias": {"7": 0.1}}},
        {"prompt": [1, 2], "id": "two", "seed": 6},
    ]
    done = corun("batch", write_rows(tmp_path / "in.jsonl", *rows), "-o", output, "--max-tokens", 4)
    assert (done.code, done.out) == (0, "")
    found = {row["id"]: row for row in read_rows(output)}
    assert {name: len(row["token_ids"]) for name, row in found.items()} == {"1": 3, "two": 4}
    first = found["1"]
    assert (first["params"]["logit_bias"], first["finish_reason"]) == ({"7": 0.1}, "length")
    assert output_digest(first["token_ids"], first["logprobs"]) == first["receipt"]["output_digest"]
    assert params_from_dict(first["params"]).digest() == first["receipt"]["params_digest"]


def test_a_second_run_goes_on(corun: Any, fake: FakeRouter, six: Path, output: Path) -> None:
    assert corun("batch", six, "-o", output, "--concurrency", 3).code == 0
    assert fake.most_running <= 3
    whole = output.read_bytes().splitlines(keepends=True)
    before, umlaut, _ = whole[3].partition("ü".encode())
    output.write_bytes(b"".join(whole[:3]) + before + umlaut[:1])  # As a power cut leaves it, in a character.
    fake.requests.clear()
    done = corun("batch", six, "-o", output)
    assert done.code == 0
    assert "dropped an unfinished last line" in done.err
    assert "3 finished, 3 were there before of 6 prompts" in done.err
    assert len(fake.requests) == 3
    assert sorted(row["id"] for row in read_rows(output)) == list("123456")
    fake.requests.clear()
    assert corun("batch", six, "-o", output).code == 0
    assert not fake.requests


def test_no_file_of_contracts_ends_a_batch(corun: Any, six: Path, output: Path) -> None:
    contracts = output.with_suffix(".contracts.jsonl")
    contracts.write_bytes(b"\xff\n")
    assert corun("batch", six, "-o", output).code == 0
    assert (len(read_rows(output)), contracts.read_bytes()) == (6, b"\xff\n")


def test_a_pipe_is_refused(corun: Any, six: Path, output: Path, tmp_path: Path) -> None:
    """An input is read twice, and an output before it is written: prompts would be lost, or waited for without end."""
    os.mkfifo(pipe := tmp_path / "pipe")
    for name, argv in (("input", (pipe, "-o", output)), ("output", (six, "-o", pipe))):
        done = corun("batch", *argv)
        assert (done.code, f"{name} = '" in done.err, "must be a regular file" in done.err) == (2, True, True)
    assert corun("batch", six, "-o", "/dev/null").code == 0


@pytest.mark.parametrize("change", [{"prompt": "other"}, {"seed": 9}, {"params": {"max_tokens": 9}}])
def test_two_inputs_do_not_mix(corun: Any, tmp_path: Path, output: Path, change: dict[str, Any]) -> None:
    row = {"prompt": "p", "seed": 1, "id": "a"}
    assert corun("batch", write_rows(tmp_path / "in.jsonl", row), "-o", output).code == 0
    before = output.read_bytes()
    done = corun("batch", write_rows(tmp_path / "in.jsonl", row | change), "-o", output)
    assert (done.code, "which has the same id" in done.err) == (2, True)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "code", "said", "rows"),
    [
        (InvalidArgumentError("prompt.text", "bad", "must be good"), 2, "5 finished, 1 refused of 6 prompts", 5),
        (UnavailableError("no decode node has joined"), 4, "3 finished, 3 left of 6 prompts; run the same command", 3),
    ],
)
def test_a_refused_prompt_is_told_at_the_end_and_a_lost_cluster_ends_the_run(
    corun: Any, fake: FakeRouter, six: Path, output: Path, error: Any, code: int, said: str, rows: int
) -> None:
    fake.refused_prompts["ü3"] = error
    done = corun("batch", six, "-o", output, "--concurrency", 1)
    assert (done.code, said in done.err) == (code, True)
    assert (f"refused {six}:4: {error}" if code == 2 else str(error)) in done.err
    assert len(read_rows(output)) == rows


def test_an_overloaded_router_is_waited_for(corun: Any, fake: FakeRouter, tmp_path: Path, output: Path) -> None:
    fake.errors.append(OverloadedError("queue full", 0.1))
    assert corun("batch", write_rows(tmp_path / "in.jsonl", {"prompt": "a"}), "-o", output).code == 0
    assert len(fake.requests) == 2


def test_a_prompt_without_time_for_another_try_is_not_called_refused(
    corun: Any, fake: FakeRouter, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a wait takes longer than it should, and there may be nothing left of the time then."""
    monkeypatch.setattr(batch, "retry_delay_s", lambda error, deadline: deadline.remaining_s + 0.05)
    fake.errors.append(OverloadedError("queue full", 0.1))
    rows = write_rows(tmp_path / "in.jsonl", {"prompt": "a"})
    done = corun("batch", rows, "-o", output, "--timeout-s", 0.5)
    assert (done.code, "queue full" in done.err, "refused" in done.err) == (4, True, False), done.err
    assert "1 left of 1 prompts; run the same command again" in done.err


def test_a_seed_depends_on_the_row_not_on_the_order(corun: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "id": i} for i in range(4)] + [{"prompt": "q", "id": "own", "seed": 8}]
    outputs = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        source, output = write_rows(tmp_path / name, *order), tmp_path / f"{name}.out"
        assert corun("batch", source, "-o", output, "--seed", 7).code == 0
        outputs.append({row["id"]: (row["seed"], row["text"]) for row in read_rows(output)})
    assert outputs[0] == outputs[1]
    assert outputs[0]["own"][0] == 8
    assert len({seed for seed, _ in outputs[0].values()}) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "must be a JSON object"),
        ("\udcff", "must be a JSON object in UTF-8"),
        ("[]", "must be a JSON object"),
        ("{}", "prompt = None: must be text or a list of token ids"),
        ('{"prompt": ""}', "prompt = '': must not be empty"),
        ('{"prompt": [1, "a"]}', "prompt[1] = 'a': must be an integer"),
        ('{"prompt": "a", "seeds": 1}', "seeds = 1: must be one of id, prompt, seed, params"),
        ('{"prompt": "a", "seed": -1}', "seed = -1: must be in [0, 2^63)"),
        ('{"prompt": "a", "id": [1]}', "id = [1]: must be text or an integer"),
        ('{"prompt": "a", "id": "\\ud800"}', "id = '\\ud800': must be valid Unicode, without lone surrogates"),
        ('{"prompt": "a", "params": {"top_pp": 1}}', "params.top_pp = 1: is not a sampling parameter"),
        ('{"prompt": "a", "params": {"top_p": 1.5}}', "sampling_params.top_p = 1.5: must be in [1e-09, 1]"),
        ('{"prompt": "a", "params": {"logit_bias": {"x": 1}}}', "sampling_params.logit_bias = 'x': must be an integer"),
        (
            f'{{"prompt": "a", "params": {{"logit_bias": {{"{"1" * 5000}": 1}}}}}}',
            "sampling_params.logit_bias = '1111",
        ),
        ('{"prompt": "a", "id": "1"}', "must be unique"),
    ],
)
def test_every_row_is_checked_before_the_first_is_sent(
    corun: Any, fake: FakeRouter, tmp_path: Path, output: Path, line: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    done = corun("batch", source, "-o", output)
    assert done.code == 2
    assert f"{source}:3: " in done.err or "must be a JSON object" in message
    assert message in done.err
    assert not fake.requests
    assert not output.exists()


def test_a_byte_order_mark_is_no_part_of_a_prompt_file(corun: Any, tmp_path: Path, output: Path) -> None:
    """Editors on Windows write one. Data sets and bodies over HTTP may have it, too."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    done = corun("batch", source, "-o", output)
    assert (done.code, done.err) == (0, f"{output}: 1 finished of 1 prompts\n")


def test_files_that_cannot_be(corun: Any, tmp_path: Path, six: Path, output: Path) -> None:
    missing = corun("batch", tmp_path / "none.jsonl", "-o", output)
    assert (missing.code, missing.err) == (2, f"corun: {tmp_path}/none.jsonl: No such file or directory\n")
    assert corun("batch", six, "-o", six).code == 2
    for content in (b"something else\n", b"something else", b'{"id": 1}\n{"id": 2', b"\xff"):
        output.write_bytes(content)
        assert corun("batch", six, "-o", output).code == 2
        assert output.read_bytes() == content


def test_an_output_that_cannot_be_written_is_refused_first(
    corun: Any, fake: FakeRouter, six: Path, tmp_path: Path
) -> None:
    output = tmp_path / "none" / "x.jsonl"
    done = corun("batch", six, "-o", output)
    assert (done.code, done.err, fake.requests) == (2, f"corun: {output}: No such file or directory\n", [])


def test_ctrl_c_says_how_to_go_on(fake: FakeRouter, start: Any, six: Path, output: Path) -> None:
    fake.gate.clear()
    with start("batch", six, "-o", output) as process:
        wait_for(lambda: len(fake.requests) == 6, "all requests are there")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        again = "run the same command again to continue"
        assert process.stderr.read() == f"{output}: 0 finished, 6 left of 6 prompts; {again}\n"


@given(st.floats(width=32, allow_nan=False))
def test_short_floats_keep_every_fp32_bit(value: float) -> None:
    short = json.loads(json.dumps(short_fp32(value)))
    assert struct.pack("<f", short) == struct.pack("<f", value)
    assert len(repr(short)) <= len(repr(value))


@pytest.mark.parametrize("value", [0.1, -0.693147, 1e-7])
def test_short_floats_are_short(value: float) -> None:
    assert short_fp32(struct.unpack("<f", struct.pack("<f", value))[0]) == value


def test_params_survive_json() -> None:
    bias = {5: 0.1, 2: -3}
    params = SamplingParams(temperature=0.3, stop="x", logit_bias=bias, stop_token_ids=[4], n=2, logprobs=True)
    assert params_from_dict(json.loads(json.dumps(params_to_dict(params)))) == params


@pytest.mark.parametrize(
    "constraint", [{"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a", 'b"']}, {"grammar": 'root ::= "a"'}]
)
def test_constraints_survive_a_row(constraint: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=constraint)
    assert params_from_dict(json.loads(json.dumps(params_to_dict(params)))) == params
    assert "structured_outputs" not in params_to_dict(SamplingParams()), "an older version reads free outputs"
