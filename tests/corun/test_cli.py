from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from corun.cli import COMMANDS, main, up
from corun.cli.generate import for_terminal
from corun.cli.status import picture
from corun.cli.up import Up
from corun.client.progress import ProgressBar
from corun.config.cluster_file import Security, read
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from corun.launch import preflight
from corun.launch.preflight import Finding
from corun.params import SamplingParams
from corun.receipt import Receipt, output_digest
from corun.records.rows import params_from_dict, params_to_dict, short_fp32
from corun.records.verification import Condition
from corun.types import GONE_AS_PLANNED, AuditStatus, NodeRole, NodeState
from tests.corun.fake_cluster import FINGERPRINT, WAIT_S, FakeCluster, contract

PROMPT = "Once upon a time"


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def corun(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command line against the fake and returns code, stdout and stderr."""

    def run(*argv: object) -> SimpleNamespace:
        code = main([*map(str, argv), "--router", fake.address])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Help and errors


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    assert "examples:\n" in help_text
    assert f"corun {command}" in help_text.partition("examples:")[2]


def test_help_lists_every_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    for name, kind in COMMANDS.items():
        line = next(line for line in help_text.splitlines() if f"• {name}" in line)
        assert (kind.__doc__ or "").partition("\n")[0] in line


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["generate", "--frobnicate"], ["generate", "x", "--seed", "y"]])
def test_usage_errors_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["stauts"], "perhaps you meant: corun status"),
        (["genrate", "x"], "perhaps you meant: corun generate"),
        (["bench", "reprot"], "perhaps you meant: corun bench report"),
        (["frobnicate"], "must be one of up, scale, gateway"),
        (["bench", "frobnicate"], "it must be one of compare, report, kernels, router, serve"),
    ],
)
def test_a_mistyped_command_says_what_was_meant(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert (error.count("\n"), meant in error) == (1, True), error


def test_the_node_table_fits_80_columns(fake: FakeCluster) -> None:
    nodes = [
        replace(node, load=replace(node.load, tokens=1_234_567, steps=123_456, used_kv_blocks=12_345))
        for node in fake.status.nodes
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(picture(replace(fake.status, nodes=tuple(nodes)), fake.address))
    text = console.export_text()
    for node in fake.status.nodes:
        assert node.node.ref.generation in text
        assert re.search(rf"^{node.node.ref.node_id} .* ago *$", text, flags=re.MULTILINE), text


def test_an_empty_field_of_a_contract_says_so(corun: Any, fake: FakeCluster) -> None:
    nodes = [
        replace(n, node=replace(n.node, contract_json=contract(n.node.role, driver=""))) for n in fake.status.nodes
    ]
    fake.status = replace(fake.status, nodes=tuple(nodes))
    assert re.search(r"^model\.driver +\(none\)$", corun("fingerprint", "--explain").out, flags=re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, "corun 0.1.0\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("prompt.text", "x", "must be y"), 2),
        (ContractMismatchError("they differ", {"dtype": ("a", "b")}), 3),
        (UnavailableError("no prefill node has joined"), 4),
        (OverloadedError("queue full", 1), 4),
        (InternalError("internal error, id 7"), 1),
    ],
)
def test_errors_are_one_line_with_an_exit_code(corun: Any, fake: FakeCluster, error: CorunError, code: int) -> None:
    fake.errors.append(error)
    done = corun("generate", PROMPT)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("corun: ")
    assert done.err.count("\n") == 1


def test_no_router_is_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--router", "127.0.0.1:1", "--connect-timeout-s", "0.2"]) == 4
    assert "no router answers at 127.0.0.1:1" in capsys.readouterr().err


def test_bad_sampling_options_are_exit_2(corun: Any) -> None:
    done = corun("generate", PROMPT, "--top-p", 1.5)
    assert (done.code, done.err) == (2, "corun: sampling_params.top_p = 1.5: must be in [1e-09, 1]\n")


def test_the_commands_need_no_serving_packages() -> None:
    heavy = {"ray", "torch", "vllm", "numpy", "tokenizers", "nixl"}
    code = f"import sys, corun.cli; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


# generate


def test_generate_prints_text_then_seed_and_receipt(corun: Any) -> None:
    done = corun("generate", PROMPT, "--seed", 42, "--max-tokens", 5)
    reference = json.loads(corun("generate", PROMPT, "--seed", 42, "--max-tokens", 5, "--json").out)
    text, _, receipt = done.out.partition("\n")
    assert (done.code, text, len(text)) == (0, reference["text"], 5)
    fields = {line[:14].strip(): line[15:] for line in receipt.splitlines()}
    assert fields["seed"] == "42"
    assert fields["fingerprint"] == FINGERPRINT
    assert fields["output digest"] == reference["receipt"]["output_digest"]
    assert fields["finish reason"] == "length, 5 tokens"


def test_generate_json_is_one_object(corun: Any, fake: FakeCluster) -> None:
    done = corun(
        "generate", "--token-ids", 1, 2, "--logprobs", "--n", 2, "--seed", 3, "--json", "--stop", "a", "--stop", "b c"
    )
    assert done.out.count("\n") == 1
    row = json.loads(done.out)
    assert (row["prompt"], row["seed"], row["params"]["n"]) == ([1, 2], 3, 2)
    assert row["params"]["stop"] == ["a", "b c"]
    assert [sample["sample_index"] for sample in row["samples"]] == [0, 1]
    assert row["samples"][0]["token_ids"] == row["token_ids"]
    assert output_digest(row["token_ids"], row["logprobs"]) == row["receipt"]["output_digest"]
    assert Receipt.from_dict(row["receipt"]).seed == 3


def test_generate_shows_samples_one_after_another(corun: Any) -> None:
    options = ("generate", PROMPT, "--seed", 4, "--n", 3, "--max-tokens", 6)
    texts = [sample["text"] for sample in json.loads(corun(*options, "--json").out)["samples"]]
    assert corun(*options).out.startswith("\n\n".join(texts) + "\nsample         0\n")


def test_generate_wants_one_prompt(corun: Any, fake: FakeCluster) -> None:
    assert corun("generate").code == 2
    assert corun("generate", "x", "--token-ids", 1).code == 2
    assert not fake.requests


def test_commands_say_how_urgent_they_are(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"prompt": "a"})
    assert corun("generate", "x", "--priority", "high").code == 0
    assert corun("generate", "x").code == 0
    assert corun("batch", rows, "-o", tmp_path / "1.jsonl").code == 0
    assert corun("batch", rows, "-o", tmp_path / "2.jsonl", "--priority", "normal").code == 0
    assert [request.priority for request in fake.requests] == [1, 2, 3, 2]
    with pytest.raises(SystemExit):
        corun("generate", "x", "--priority", "urgent")


def test_a_priority_that_the_token_does_not_allow_is_a_usage_error(corun: Any, fake: FakeCluster) -> None:
    fake.errors.append(PermissionDeniedError("priority", "high", "must be normal or lower for client me"))
    done = corun("generate", "x", "--priority", "high")
    assert done.code == 2
    assert "priority = 'high': must be normal or lower for client me" in done.err


def test_a_model_cannot_command_the_terminal() -> None:
    assert for_terminal("ok\tü\n\x1b[2J\x07") == "ok\tü\n\\x1b[2J\\x07"


def test_generate_streams(fake: FakeCluster) -> None:
    fake.gate.clear()
    with start(fake, "generate", PROMPT) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(1)) == 1  # Before the second token exists.
        fake.gate.set()
        assert "receipt" not in process.stdout.read()
        assert process.wait(WAIT_S) == 0


def test_ctrl_c_exits_130_without_a_traceback(fake: FakeCluster) -> None:
    fake.gate.clear()
    with start(fake, "generate", PROMPT) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert fake.cancelled.wait(WAIT_S)


def test_a_reader_that_leaves_is_no_error(fake: FakeCluster) -> None:
    with start(fake, "fingerprint", "--explain") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(WAIT_S) == 141
        assert process.stderr.read() == ""


def start(fake: FakeCluster, *argv: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "corun", *map(str, argv), "--router", fake.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


# batch


def test_batch_writes_verifiable_rows(corun: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "hello", "seed": 5, "params": {"max_tokens": 3, "logprobs": True, "logit_bias": {"7": 0.1}}},
        {"prompt": [1, 2], "id": "two", "seed": 6},
    ]
    output = tmp_path / "out.jsonl"
    done = corun("batch", write_rows(tmp_path / "in.jsonl", *rows), "-o", output, "--max-tokens", 4)
    assert (done.code, done.out) == (0, "")
    found = {row["id"]: row for row in read_rows(output)}
    assert set(found) == {"1", "two"}
    assert len(found["1"]["token_ids"]) == 3
    assert len(found["two"]["token_ids"]) == 4
    assert found["1"]["params"]["logit_bias"] == {"7": 0.1}
    assert found["1"]["finish_reason"] == "length"
    assert output_digest(found["1"]["token_ids"], found["1"]["logprobs"]) == found["1"]["receipt"]["output_digest"]
    assert params_from_dict(found["1"]["params"]).digest() == found["1"]["receipt"]["params_digest"]


def test_batch_resumes(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": f"ü{i}", "seed": i} for i in range(6)))
    output = tmp_path / "out.jsonl"
    assert corun("batch", source, "-o", output).code == 0
    whole = output.read_bytes().splitlines(keepends=True)
    before, umlaut, _ = whole[3].partition("ü".encode())
    torn = before + umlaut[:1]
    output.write_bytes(b"".join(whole[:3]) + torn)  # As a power cut leaves it, in the middle of a character.
    fake.requests.clear()
    done = corun("batch", source, "-o", output)
    assert done.code == 0
    assert "dropped an unfinished last line" in done.err
    assert "3 finished, 3 were there before of 6 prompts" in done.err
    assert len(fake.requests) == 3
    assert sorted(json.loads(line)["id"] for line in output.read_text().splitlines()) == list("123456")
    fake.requests.clear()
    assert corun("batch", source, "-o", output).code == 0
    assert not fake.requests


@pytest.mark.parametrize("change", [{"prompt": "other"}, {"seed": 9}, {"params": {"max_tokens": 9}}])
def test_batch_does_not_mix_two_inputs(corun: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    row = {"prompt": "p", "seed": 1, "id": "a"}
    output = tmp_path / "out.jsonl"
    assert corun("batch", write_rows(tmp_path / "in.jsonl", row), "-o", output).code == 0
    before = output.read_bytes()
    done = corun("batch", write_rows(tmp_path / "in.jsonl", row | change), "-o", output)
    assert done.code == 2
    assert "which has the same id" in done.err
    assert output.read_bytes() == before


def test_batch_goes_on_past_refused_prompts(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    fake.refused_prompts["bad"] = InvalidArgumentError("prompt.text", "bad", "must be good")
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "bad"}, {"prompt": "a"}, {"prompt": "b"})
    done = corun("batch", source, "-o", tmp_path / "out.jsonl")
    assert done.code == 2
    assert f"refused {source}:1: prompt.text = 'bad': must be good" in done.err
    assert "2 finished, 1 refused of 3 prompts" in done.err
    assert len(read_rows(tmp_path / "out.jsonl")) == 2


def test_batch_keeps_what_it_has_when_the_cluster_goes(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    fake.refused_prompts["p3"] = UnavailableError("no decode node has joined")
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(6)))
    done = corun("batch", source, "-o", tmp_path / "out.jsonl", "--concurrency", 1)
    assert done.code == 4
    assert "3 finished, 3 left of 6 prompts; run the same command again" in done.err
    assert "no decode node has joined" in done.err
    assert len(read_rows(tmp_path / "out.jsonl")) == 3


def test_batch_waits_for_an_overloaded_router(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    fake.errors.append(OverloadedError("queue full", 0.1))
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"})
    assert corun("batch", source, "-o", tmp_path / "out.jsonl").code == 0
    assert len(fake.requests) == 2


def test_batch_bounds_what_is_in_flight(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(30)))
    assert corun("batch", source, "-o", tmp_path / "out.jsonl", "--concurrency", 3).code == 0
    assert fake.most_running <= 3


def test_batch_seed_depends_on_the_row_not_on_the_order(corun: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "id": i} for i in range(4)] + [{"prompt": "q", "id": "own", "seed": 8}]
    outputs = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        assert (
            corun("batch", write_rows(tmp_path / name, *order), "-o", tmp_path / f"{name}.out", "--seed", 7).code == 0
        )
        outputs.append({row["id"]: (row["seed"], row["text"]) for row in read_rows(tmp_path / f"{name}.out")})
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
        ('{"prompt": "a", "params": {"top_pp": 1}}', "params.top_pp = 1: is not a sampling parameter"),
        ('{"prompt": "a", "params": {"top_p": 1.5}}', "sampling_params.top_p = 1.5: must be in [1e-09, 1]"),
        ('{"prompt": "a", "params": {"logit_bias": {"x": 1}}}', "sampling_params.logit_bias = 'x': must be an integer"),
        ('{"prompt": "a", "id": "1"}', "must be unique"),
    ],
)
def test_batch_checks_every_row_before_the_first_is_sent(
    corun: Any, fake: FakeCluster, tmp_path: Path, line: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    done = corun("batch", source, "-o", tmp_path / "out.jsonl")
    assert done.code == 2
    assert f"{source}:3: " in done.err or "must be a JSON object" in message
    assert message in done.err
    assert not fake.requests
    assert not (tmp_path / "out.jsonl").exists()


def test_batch_files_that_cannot_be(corun: Any, tmp_path: Path) -> None:
    missing = corun("batch", tmp_path / "none.jsonl", "-o", tmp_path / "out.jsonl")
    assert (missing.code, missing.err) == (2, f"corun: {tmp_path}/none.jsonl: No such file or directory\n")
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"})
    assert corun("batch", source, "-o", source).code == 2
    for content in (b"something else\n", b"something else", b'{"id": 1}\n{"id": 2', b"\xff"):
        (tmp_path / "other").write_bytes(content)
        assert corun("batch", source, "-o", tmp_path / "other").code == 2
        assert (tmp_path / "other").read_bytes() == content


def test_batch_interrupted_says_how_to_go_on(fake: FakeCluster, tmp_path: Path) -> None:
    fake.gate.clear()
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    with start(fake, "batch", source, "-o", tmp_path / "out.jsonl") as process:
        while len(fake.requests) < 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == (
            f"{tmp_path}/out.jsonl: 0 finished, 2 left of 2 prompts; run the same command again to continue\n"
        )


@given(st.floats(width=32, allow_nan=False))
def test_short_floats_keep_every_fp32_bit(value: float) -> None:
    short = json.loads(json.dumps(short_fp32(value)))
    assert struct.pack("<f", short) == struct.pack("<f", value)
    assert len(repr(short)) <= len(repr(value))


def test_short_floats_are_short() -> None:
    assert [short_fp32(struct.unpack("<f", struct.pack("<f", x))[0]) for x in (0.1, -0.693147, 1e-7)] == [
        0.1,
        -0.693147,
        1e-7,
    ]


def test_params_survive_json() -> None:
    params = SamplingParams(
        temperature=0.3, stop="x", logit_bias={5: 0.1, 2: -3}, stop_token_ids=[4], n=2, logprobs=True
    )
    assert params_from_dict(json.loads(json.dumps(params_to_dict(params)))) == params


# verify


@pytest.fixture
def results(corun: Any, tmp_path: Path) -> Path:
    rows = [
        {"prompt": [1, 2, 3], "id": "plain", "params": {"logprobs": True}},
        {"prompt": [4], "id": "many", "params": {"n": 3, "max_tokens": 5, "logprobs": True}},
        {"prompt": [5], "id": "quiet"},
        {"prompt": PROMPT, "id": "text", "params": {"logprobs": True}},
    ]
    assert corun("batch", write_rows(tmp_path / "in.jsonl", *rows), "-o", tmp_path / "results.jsonl").code == 0
    return tmp_path / "results.jsonl"


def test_verify_runs_built_in_prompts_under_every_condition(corun: Any, fake: FakeCluster) -> None:
    done = corun("verify")
    assert done.code == 0
    report = json.loads(done.out.splitlines()[-1])
    assert report["match"] is True
    assert report["cases"] == 12
    assert report["conditions"] == {c.value: {"runs": 12, "equal": 12} for c in Condition}
    assert report["fingerprints"] == [FINGERPRINT]
    assert "every bit agrees" in done.out
    cases = fake.verified[0].cases
    assert all(max(case.prompt_token_ids) < 1000 for case in cases)
    assert {case.sampling_params.temperature == 0 for case in cases} == {True, False}
    assert len({len(case.prompt_token_ids) for case in cases}) == 12
    assert not any(case.output_digest for case in cases)


def test_verify_runs_results_against_their_receipts(corun: Any, fake: FakeCluster, results: Path) -> None:
    done = corun("verify", results, "--json", "--conditions", "alone", "shuffled", "--order-seed", 3)
    assert done.code == 0
    report = json.loads(done.out)
    assert (report["cases"], report["runs"]) == (6, 12)
    assert tuple(PROMPT.encode()) in {tuple(case.prompt_token_ids) for case in fake.verified[0].cases}
    receipts = {row["receipt"]["output_digest"] for row in read_rows(results)}
    assert receipts <= {case.output_digest for case in fake.verified[0].cases}
    assert {case.sampling_params.n for case in fake.verified[0].cases} == {1}
    assert fake.verified[0].order_seed == 3


def test_verify_writes_its_report_to_a_file(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    fake.broken = {Condition.CROWDED}
    done = corun("verify", "-o", tmp_path / "report.json")
    assert done.code == 3
    assert (tmp_path / "report.json").read_text() == done.out.splitlines()[-1] + "\n"


def test_verify_limit(corun: Any, results: Path) -> None:
    assert json.loads(corun("verify", results, "--json", "--limit", 2).out)["cases"] == 2
    assert corun("verify", results, "--limit", 0).code == 2


def test_verify_exits_3_when_bits_differ(corun: Any, fake: FakeCluster, results: Path) -> None:
    fake.broken = {Condition.CROWDED}
    done = corun("verify", results)
    assert done.code == 3
    report = json.loads(done.out.splitlines()[-1])
    assert report["match"] is False
    assert report["conditions"]["crowded"] == {"runs": 6, "equal": 0}
    assert report["conditions"]["alone"] == {"runs": 6, "equal": 6}
    assert {d["condition"] for d in report["differences"]} == {"crowded"}
    assert "BITS DIFFER" in done.out
    assert "plain, crowded: expected" in done.out


def test_verify_does_not_take_silence_for_agreement(corun: Any, fake: FakeCluster) -> None:
    fake.silent = True
    done = corun("verify", "--json")
    assert done.code == 3
    assert json.loads(done.out)["differences"][0]["reason"] == "the router gave no answer"


def change_row(results: Path, row_id: str, **change: Any) -> Path:
    """Change a row; `receipt` and `last` change fields of its receipt and of its last sample."""
    rows = read_rows(results)
    row = next(row for row in rows if row["id"] == row_id)
    row["receipt"] |= change.pop("receipt", {})
    if last := change.pop("last", {}):
        row["samples"][-1] |= last
    row |= change
    return write_rows(results, *rows)


@pytest.mark.parametrize(
    ("row_id", "change"),
    [
        ("plain", {"seed": 1}),
        ("plain", {"prompt": [1, 2, 4]}),
        ("plain", {"params": {"temperature": 0.5}}),
        ("plain", {"token_ids": [1, 2]}),
        ("plain", {"logprobs": [-0.5] * 16}),
        ("plain", {"logprobs": []}),
        ("plain", {"logprobs": [1e300] * 16}),  # This is no fp32 value.
        ("quiet", {"token_ids": list(range(16))}),
        ("quiet", {"token_ids": [1, 2, 3]}),
        ("quiet", {"token_ids": "tokens"}),
        ("quiet", {"finish_reason": "stop"}),
        ("quiet", {"request_id": "another"}),
        ("quiet", {"receipt": {"num_output_tokens": 15}}),
        ("quiet", {"receipt": {"num_prompt_tokens": 2}}),
        ("quiet", {"receipt": {"sample_index": 1}}),
        ("quiet", {"receipt": {"finish_reason": "stop"}}),
        ("many", {"token_ids": [1, 2, 3, 4, 5]}),  # Beside its samples, the row repeats the first of them.
        ("many", {"text": "other"}),
        ("many", {"last": {"token_ids": [1, 2, 3, 4, 5]}}),
        ("many", {"last": {"finish_reason": "stop"}}),
        ("many", {"last": {"sample_index": 0}}),
        ("many", {"samples": []}),
    ],
)
def test_verify_finds_rows_that_were_changed(
    corun: Any, fake: FakeCluster, results: Path, row_id: str, change: dict[str, Any]
) -> None:
    done = corun("verify", change_row(results, row_id, **change))
    assert (done.code in (2, 3), "corun: " in done.err) == (True, True)
    assert not fake.verified


@pytest.mark.parametrize("name", ["text", "token_ids", "finish_reason", "logprobs"])
def test_verify_refuses_rows_that_lost_a_part(corun: Any, fake: FakeCluster, results: Path, name: str) -> None:
    rows = [row for row in read_rows(results) if row["id"] == "plain"]
    del rows[0][name]
    done = corun("verify", write_rows(results, *rows))
    assert (done.code, f"results.jsonl:1: {name} = None: must be set" in done.err) == (2, True)
    assert not fake.verified


@pytest.mark.parametrize(
    ("row_id", "change", "reason"),
    [
        ("quiet", {"text": "other"}, "its text is not that of its tokens"),
        ("many", {"last": {"text": ""}}, "its text is not that of its tokens"),
        # Rows and receipts that were changed together agree with each other, but with no run.
        ("quiet", {"finish_reason": "stop", "receipt": {"finish_reason": "stop"}}, "finish reason was stop, is length"),
        ("quiet", {"receipt": {"output_digest": "0" * 64}}, f"expected {'0' * 64}"),
    ],
)
def test_verify_finds_what_only_a_run_can_tell(
    corun: Any, results: Path, row_id: str, change: dict[str, Any], reason: str
) -> None:
    done = corun("verify", change_row(results, row_id, **change), "--json", "--conditions", "alone")
    report = json.loads(done.out)
    assert (done.code, report["match"], report["runs"]) == (3, False, 6)
    (difference,) = report["differences"]
    assert difference["case"].startswith(row_id)
    assert reason in difference["reason"]


def test_verify_checks_tokens_that_a_receipt_has_no_digest_of(corun: Any, fake: FakeCluster, results: Path) -> None:
    """Receipts of earlier versions have none. The run tells whether a row's tokens are right."""
    (row,) = (row for row in read_rows(results) if row["id"] == "quiet")
    del row["receipt"]["tokens_digest"]
    assert corun("verify", write_rows(results, row)).code == 0
    done = corun("verify", write_rows(results, row | {"token_ids": list(range(16))}), "--json")
    assert (done.code, fake.verified != []) == (3, True)
    assert "tokens were" in json.loads(done.out)["differences"][0]["reason"]


@pytest.mark.parametrize("name", ["tokens_digest", "text_digest"])
def test_verify_does_not_take_a_router_that_says_less_for_agreement(
    corun: Any, fake: FakeCluster, results: Path, name: str
) -> None:
    fake.unsaid = {name}
    done = corun("verify", results, "--json")
    assert done.code == 3
    assert {d["reason"].partition(":")[0] for d in json.loads(done.out)["differences"]} == {
        f"the router gave no {name}"
    }


def test_verify_compares_all_that_a_built_in_prompt_gave_first(corun: Any, fake: FakeCluster) -> None:
    fake.stopping = {Condition.SHUFFLED}
    done = corun("verify", "--json")
    report = json.loads(done.out)
    assert (done.code, report["conditions"]["alone"]["equal"], report["conditions"]["shuffled"]["equal"]) == (3, 12, 0)
    assert report["differences"][0]["reason"] == "its finish reason was length, is stop"


def test_verify_goes_on_where_a_router_ended_a_call(corun: Any, fake: FakeCluster) -> None:
    fake.results_per_call = 20
    done = corun("verify", "--json")
    report = json.loads(done.out)
    assert (done.code, report["runs"], report["missing_runs"]) == (0, 48, 0)
    assert report["conditions"] == {c.value: {"runs": 12, "equal": 12} for c in Condition}
    # A later call has to give what an earlier one gave.
    assert [len(request.cases) * len(request.conditions) for request in fake.verified] == [48, 4, 24, 4]
    assert [bool(request.cases[0].output_digest) for request in fake.verified] == [False, True, True, True]


def test_verify_ends_with_what_it_has_when_a_call_gives_nothing(corun: Any, fake: FakeCluster) -> None:
    fake.errors = [DeadlineError("no slot was idle")]
    done = corun("verify")
    assert (done.code, done.out) == (1, "")
    assert "no slot was idle" in done.err


def test_verify_shows_its_results_when_the_cluster_goes(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    def go(number: int) -> None:
        if number == 13:
            raise RuntimeError("gone")

    fake.on_result = go
    done = corun("verify", "-o", tmp_path / "report.json")
    assert (done.code, done.err.startswith("corun: ")) == (1, True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["match"], report["runs"], report["missing_runs"]) == (False, 13, 35)
    assert "12 cases, 13 runs: every bit agrees; 35 of 48 runs were not run" in done.out


def test_verify_shows_its_results_at_ctrl_c(corun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count(1)

    def advance(bar: ProgressBar) -> None:
        if next(counted) == 13:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "advance", advance)
    done = corun("verify")
    assert (done.code, done.err) == (130, "")
    report = json.loads(done.out.splitlines()[-1])
    assert (report["match"], report["runs"], report["missing_runs"]) == (False, 13, 35)
    assert report["conditions"]["alone"] == {"runs": 12, "equal": 12}
    assert "35 of 48 runs were not run" in done.out


def test_verify_takes_each_condition_once(corun: Any, fake: FakeCluster) -> None:
    done = corun("verify", "--conditions", "alone", "alone")
    assert (done.code, done.err) == (2, "corun: conditions[1] = 'alone': must be given once\n")
    assert not fake.verified


def test_verify_says_that_the_contract_is_another(corun: Any, results: Path) -> None:
    rows = read_rows(results)
    row = next(row for row in rows if row["id"] == "plain")
    row["receipt"]["fingerprint"] = "a" * 64
    done = corun("verify", write_rows(results, row), "--json")
    assert done.code == 3
    assert "made under contract aaaa" in json.loads(done.out)["differences"][0]["reason"]


@pytest.mark.parametrize(
    "row", [{}, {"id": 1}, {"id": "a", "prompt": [1], "params": {}, "seed": 1, "receipt": {}, "samples": [3]}]
)
def test_verify_refuses_what_is_no_result(corun: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    done = corun("verify", write_rows(tmp_path / "bad.jsonl", row))
    assert done.code == 2
    assert "bad.jsonl:1" in done.err


@pytest.fixture
def reproduction(results: Path, tmp_path: Path) -> Path:
    row = next(row for row in read_rows(results) if row["id"] == "quiet")
    return write_rows(tmp_path / "audit.json", row | {"audit": {"receipt": row["receipt"] | {"seed": 1}}})


def test_verify_runs_what_an_audit_found(corun: Any, fake: FakeCluster, reproduction: Path) -> None:
    done = corun("verify", "--reproduction", reproduction, "--json")
    assert done.code == 0
    (row,) = read_rows(reproduction)
    (case,) = fake.verified[0].cases
    assert (case.output_digest, case.seed) == (row["receipt"]["output_digest"], row["seed"])
    fake.broken = {Condition.ALONE}
    assert corun("verify", "--reproduction", reproduction).code == 3


def test_verify_sees_an_end_for_another_reason_in_what_an_audit_found(
    corun: Any, fake: FakeCluster, reproduction: Path
) -> None:
    """The bits of both runs were equal, so only why they ended can tell who was wrong."""
    (row,) = read_rows(reproduction)
    row["audit"]["receipt"]["finish_reason"] = "stop"
    write_rows(reproduction, row)
    assert corun("verify", "--reproduction", reproduction).code == 0
    fake.stopping = {Condition.ALONE}
    done = corun("verify", "--reproduction", reproduction, "--json", "--conditions", "alone")
    assert done.code == 3
    (difference,) = json.loads(done.out)["differences"]
    assert difference["reason"] == "its finish reason was length, is stop, as the audit did"


def test_verify_sends_the_text_of_a_prompt_to_be_tokenized_again(corun: Any, fake: FakeCluster, results: Path) -> None:
    assert corun("verify", results).code == 0
    assert [case.text for case in fake.verified[0].cases if case.text] == [PROMPT]


def test_verify_refuses_what_is_no_reproduction(corun: Any, results: Path, reproduction: Path, tmp_path: Path) -> None:
    assert "must be a file that an audit wrote" in corun("verify", "--reproduction", results).err
    assert corun("verify", "--reproduction", write_rows(tmp_path / "empty")).code == 2
    assert corun("verify", "--reproduction", tmp_path / "none").code == 2
    assert "without results" in corun("verify", results, "--reproduction", reproduction).err
    (row,) = read_rows(reproduction)
    del row["audit"]["receipt"]["seed"]
    done = corun("verify", "--reproduction", write_rows(reproduction, row))
    assert (done.code, "audit.json:1: receipt.seed" in done.err) == (2, True)


def test_verify_of_nothing_is_refused(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    assert corun("verify", write_rows(tmp_path / "empty.jsonl")).code == 2
    fake.status = replace(fake.status, nodes=())
    assert corun("verify").code == 4


# status


def test_status_shows_slots_nodes_queue_and_fingerprint(corun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    done = corun("status")
    assert done.code == 0
    lines = [line.strip() for line in done.out.splitlines()]
    assert "■■" + "□" * 62 in lines
    assert "□" * 35 + "■" in lines
    for text in ("router-a", FINGERPRINT, "2 of 4096", "finished 7", "mismatches 0"):
        assert text in done.out
    for text in ("prefill-0", "decode-0", "3/100 slots", "2" * 16):
        assert text in done.out


def test_status_says_why_a_node_is_not_used(corun: Any, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    prefill, decode = fake.status.nodes
    refused = replace(decode, state=NodeState.REFUSED, detail="model.dtype: [bold]x[/] != y")
    fake.status = replace(fake.status, nodes=(prefill, refused))
    done = corun("status")
    assert done.code == 4
    assert "refused: model.dtype: [bold]x[/] != y" in done.out


def test_status_does_not_call_a_node_lost_that_was_told_to_end(
    corun: Any, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    prefill, decode = fake.status.nodes
    fake.status = replace(fake.status, nodes=(prefill, replace(decode, state=NodeState.LOST, detail=GONE_AS_PLANNED)))
    out = corun("status").out
    assert "gone as planned" in out
    assert "lost" not in out


def test_status_shows_audits(corun: Any, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert "audited 0 (0 on the same node), mismatches 0, failed 0, skipped 0, waiting 0" in corun("status").out
    audit = AuditStatus(matched=9, mismatched=1, failed=2, skipped=3, same_node=4, waiting=5, last_mismatch="[b] d1")
    fake.status = replace(fake.status, audit=audit)
    out = corun("status").out
    assert "audited 10 (4 on the same node), mismatches 1, failed 2, skipped 3, waiting 5" in out
    assert "last mismatch [b] d1" in out
    assert json.loads(corun("status", "--json").out)["audit"] == asdict(audit)


def test_status_json(corun: Any) -> None:
    done = corun("status", "--json")
    status = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert (status["serving"], status["fingerprint"]) == (True, FINGERPRINT)
    assert status["nodes"][1]["load"]["slots_in_use"] == [0, 1, 99]
    assert status["nodes"][1]["node"]["contract"]["decode"]["slots"] == 100
    assert status["nodes"][1]["state"] == "ready"


def test_status_of_an_empty_cluster(corun: Any, fake: FakeCluster) -> None:
    fake.status = replace(fake.status, nodes=(), fingerprint="")
    done = corun("status")
    assert done.code == 4
    assert "no node has joined" in done.out


def test_status_without_unicode(fake: FakeCluster) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "corun", "status", "--router", fake.address]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert "##" + "." * 62 in found.stdout


# fingerprint


def test_fingerprint_is_one_line(corun: Any, fake: FakeCluster) -> None:
    assert corun("fingerprint").out == FINGERPRINT + "\n"
    fake.status = replace(fake.status, nodes=(), fingerprint="")
    assert corun("fingerprint").code == 4


def test_fingerprint_explains(corun: Any) -> None:
    out = corun("fingerprint", "--explain").out
    for name in ("model.weights_digest", "prefill.chunk_size", "decode.sampler"):
        assert name in out


def test_fingerprint_diff_of_files_and_cluster(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    saved = tmp_path / "monday.jsonl"
    saved.write_text(corun("fingerprint", "--json").out)
    assert len(read_rows(saved)) == 2
    same = corun("fingerprint", "--diff", saved, "cluster")
    assert (same.code, same.out) == (0, "no field differs\n")

    nodes = [
        replace(n, node=replace(n.node, contract_json=contract(n.node.role, driver="9"))) for n in fake.status.nodes
    ]
    fake.status = replace(fake.status, nodes=tuple(nodes))
    different = corun("fingerprint", "--diff", saved, "cluster", "--json")
    assert different.code == 3
    assert json.loads(different.out) == {"field": "model.driver", "values": ["x", "9"]}
    assert "model.driver" in corun("fingerprint", "--diff", saved, "decode-0").out


def test_fingerprint_diff_of_nodes(corun: Any, fake: FakeCluster, tmp_path: Path) -> None:
    prefill, decode = fake.status.nodes
    other = replace(
        decode.node,
        ref=replace(decode.node.ref, node_id="decode-1"),
        contract_json=contract(NodeRole.DECODE, dtype="y"),
    )
    refused = replace(decode, node=other, state=NodeState.REFUSED)
    fake.status = replace(fake.status, nodes=(prefill, decode, refused))
    done = corun("fingerprint", "--diff", "decode-0", "decode-1", "--json")
    assert (done.code, json.loads(done.out)["field"]) == (3, "model.dtype")
    unknown = corun("fingerprint", "--diff", "decode-0", "decode-7")
    assert unknown.code == 2
    assert "prefill-0, decode-0, decode-1" in unknown.err
    bad = tmp_path / "bad"
    bad.write_text("{}\n")
    assert corun("fingerprint", "--diff", bad, "cluster").code == 2


# up and model


def test_up_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    launch = SimpleNamespace(run=lambda spec, **options: calls.append({"spec": spec, **options}) or 7)
    monkeypatch.setitem(sys.modules, "corun.launch", launch)  # type: ignore[arg-type]
    flags = ["--decode", "2", "--slots", "8", "--port", "0", "--tls-clients", "--audit-dir", "x", "--log-dir", "y"]
    assert main(["up", *flags]) == 7
    assert calls[0] == {"spec": calls[0]["spec"], "ray_address": None, "log_dir": "y"}
    pool = calls[0]["spec"].pool()
    assert (pool.model, pool.count("prefill"), pool.count("decode")) == ("tiny", 1, 2)
    assert pool.settings("router") == {"port": 0, "tls_clients": True, "audit_dir": str(Path("x").resolve())}
    assert pool.settings("decode") == {"model": "tiny", "slots": 8}


def test_every_flag_of_up_reaches_a_process() -> None:
    for part, names in up.SETTINGS.items():
        for name in names:
            value: Any = "/x" if name in {"model", "audit_dir"} else object()
            pool = Up(**{name: value}).spec().pool()
            assert getattr(pool, part) == ({} if part != "common" else {"model": "tiny"}) | {name: value}
    assert Up(prefill=2, decode=3).spec().pool().replicas == {"prefill": 2, "decode": 3}
    values: dict[str, Any] = {known.name: True if known.type == "bool" else "/x" for known in fields(Security)}
    security = Security(**values)
    assert Up(security=security).spec().security == security


def test_help_of_up_has_meaning_and_default_of_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = " ".join(re.sub(r"[\u2500-\u257f]", "", capsys.readouterr().out).split())
    assert "--chunk-size INT Prompt tokens of one step; part of the contract. (default: 2048)" in shown
    assert "--tls-key STR PEM file of its private key." in shown


class TestUpWithAFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "cluster.toml"
        path.write_text(
            '[pools.a]\nmodel = "org/model"\ntensor_parallel_size = 2\n[pools.a.router]\nreplicas = 2\nport = 7001\n'
            '[pools.b]\nmodel = "tiny"\nnodes_per_gpu = 4\n[pools.b.decode]\nslots = 9\nreplicas = 3\nport = 7101\n'
        )
        return path

    def test_check_says_what_would_run(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(preflight, "look", lambda spec: [Finding("memory", "1 GiB", "2 GiB free", "ok")])
        monkeypatch.setattr(up, "default_slots", lambda: 256)
        assert main(["up", "--check", str(file)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[7:] == [[], ["needs", "has"], ["memory", "1", "GiB", "2", "GiB", "free", "ok"]]
        assert lines[:7] == [
            ["pool", "role", "replicas", "model", "slots", "TP", "nodes/GPU", "ports"],
            ["a", "router", "2", "7001-7002"],
            ["a", "prefill", "1", "org/model", "2", "any"],
            ["a", "decode", "1", "org/model", "256", "2", "any"],
            ["b", "router", "1", "50051"],
            ["b", "prefill", "1", "tiny", "1", "4", "any"],
            ["b", "decode", "3", "tiny", "9", "1", "4", "7101-7103"],
        ]

    def test_check_fails_where_it_would_not_start(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = [Finding("memory", "2 GiB", "1 GiB free", "fails"), Finding("cores", "2", "1", "slow")]
        monkeypatch.setattr(preflight, "look", lambda spec: found)
        assert main(["up", "--check", str(file)]) == 1
        assert capsys.readouterr().out.endswith("it would not start here: memory\n")
        assert main(["up", "--check", "--ray-address", "auto", str(file)]) == 0
        assert "not looked at: the machines of the Ray cluster at auto" in capsys.readouterr().out

    def test_check_says_what_is_wrong(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file.write_text(file.read_text().replace("slots", "slot"))
        assert main(["up", "--check", str(file)]) == 2
        assert f"{file}: [pools.b.decode] slot = 9: is not a key here; the nearest is slots" in capsys.readouterr().err
        file.write_text('[pools.a]\nmodel = "./none"')
        assert main(["up", "--check", str(file)]) == 2
        assert f"{file}: [pools.a] model = " in capsys.readouterr().err

    @pytest.mark.parametrize("flags", [["--slots", "256"], ["--port", "0"], ["--insecure"], ["--model", "tiny"]])
    def test_a_file_and_its_flags_do_not_mix(
        self, flags: list[str], file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["up", str(file), *flags]) == 2
        assert f"must be left out: {file} says it" in capsys.readouterr().err

    def test_the_spec_of_the_file_is_run(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        launch = SimpleNamespace(run=lambda *args, **options: calls.append((*args, options)) or 0)
        monkeypatch.setitem(sys.modules, "corun.launch", launch)  # type: ignore[arg-type]
        assert main(["up", str(file), "--ray-address", "auto"]) == 0
        assert calls == [(read(file), {"ray_address": "auto", "log_dir": None})]


@pytest.mark.parametrize(
    ("command", "module", "told"),
    [
        (["up"], "corun.launch", "make setup"),
        (["model"], "corun.models.tiny", "make setup"),
        (["gateway"], "corun.gateway.app", "pip install '.[router]'"),
        (["certs", "secrets"], "corun.cli.issue_certs", "pip install '.[router]'"),
        (["bench", "report", "result.json", "-o", "page"], "corun_bench.report.views", "pip install '.[bench]'"),
    ],
)
def test_a_bare_install_says_what_is_missing(
    command: list[str], module: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # As if the package were not there.
    assert main(command) == 1
    assert told in capsys.readouterr().err


def test_model_prints_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    assert main(["model", str(tmp_path / "tiny")]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()
