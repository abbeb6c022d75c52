"""What all commands have in common: help, errors, exit codes; and the commands that ask a router one thing."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from corun import __version__
from corun.cli import COMMANDS, main
from corun.cli.generate import for_terminal
from corun.cli.status import WITHOUT, picture
from corun.contract import CONTRACT_VERSION
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from corun.receipt import Receipt, output_digest
from corun.types import GONE_AS_PLANNED, AuditStatus, FreedomStatus, NodeRole, NodeState, NodeStatus
from tests.corun.cli.conftest import PROMPT, read_rows, write_rows
from tests.corun.fake_router import FINGERPRINT, WAIT_S, FakeRouter, contract


def ended(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    """Return exit code, stdout and stderr of a command line that argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code, *capsys.readouterr()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = ended(capsys, "--help")
    for name, kind in COMMANDS.items():
        line = next(line for line in listed.splitlines() if f"• {name}" in line)
        assert (kind.__doc__ or "").partition("\n")[0] in line
        code, text, _ = ended(capsys, name, "--help")
        assert (code, f"corun {name}" in text.partition("examples:\n")[2]) == (0, True)
    assert ended(capsys, "--version") == (0, f"corun {__version__} (contract {CONTRACT_VERSION})\n", "")


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        ([], ""),
        (["generate", "--frobnicate"], ""),
        (["generate", "x", "--seed", "y"], ""),
        (["generate", "x", "--priority", "urgent"], ""),
        (["stauts"], "perhaps you meant: corun status\n"),
        (["genrate", "x"], "perhaps you meant: corun generate\n"),
        (["bench", "reprot"], "perhaps you meant: corun bench report\n"),
        (["frobnicate"], "must be one of up, scale, gateway"),
        (["bench", "frobnicate"], "it must be one of compare, report, kernels, router, plan, serve"),
    ],
)
def test_usage_errors_exit_2_and_say_what_was_meant(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended(capsys, *argv)
    assert (code, out, meant in err) == (2, "", True), err
    assert not meant or err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [["up", "--slots", "abc"], ["up", "--dtype", "fp8"], ["generate", "x", "--seed", "None"], ["up", "a", "b"]],
)
def test_usage_errors_do_not_speak_of_python(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ended(capsys, *argv)
    assert (code, "NoneType" in err, "{None}" in err, "'None'," in err) == (2, False, False, False), err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("prompt.text", "x", "must be y"), 2),
        (PermissionDeniedError("priority", "high", "must be normal or lower for client me"), 2),
        (ContractMismatchError("they differ", {"dtype": ("a", "b")}), 3),
        (UnavailableError("no prefill node has joined"), 4),
        (OverloadedError("queue full", 1), 4),
        (InternalError("internal error, id 7"), 1),
    ],
)
def test_errors_are_one_line_with_an_exit_code(corun: Any, fake: FakeRouter, error: CorunError, code: int) -> None:
    fake.errors.append(error)
    done = corun("generate", PROMPT)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("corun: ")
    assert done.err.count("\n") == 1


def test_no_router_is_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--router", "127.0.0.1:1", "--connect-timeout-s", "0.2"]) == 4
    told = capsys.readouterr().err
    assert "no router answers at 127.0.0.1:1 (waited 0.2 s, without TLS: a router that has it needs tls_ca)" in told
    assert told.endswith("; start a cluster with corun up, or name a running one with --router HOST:PORT\n")
    assert main(["status", "--router", "localhost:99999"]) == 2
    assert "address = 'localhost:99999': must be host:port, with a port in [1, 65535]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "option"),
    [
        (UnauthenticatedError("ClusterService needs a client's token"), "--token-file FILE or CORUN_TOKEN_FILE"),
        (DeadlineError("the deadline passed in an attempt of sample 0"), "--timeout-s"),
    ],
)
def test_errors_name_the_option_that_helps(corun: Any, fake: FakeRouter, error: CorunError, option: str) -> None:
    fake.errors.append(error)
    assert f"{error}; {option} " in corun("generate", PROMPT).err


@pytest.mark.parametrize(
    ("command", "module", "told"),
    [
        (["up"], "corun.launch", "make setup"),
        (["model"], "corun.models.tiny", "make setup"),
        (["gateway"], "corun.gateway.app", "pip install '.[router]'"),
        (["certs", "secrets"], "corun.cli.issue_certs", "pip install '.[router]'"),
        (["bench", "report", "result.json", "-o", "page"], "corun_bench.report", "pip install '.[bench]'"),
    ],
)
def test_a_bare_install_says_what_is_missing(
    command: list[str], module: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # As if the package were not there.
    assert main(command) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "run"), [("router", "runpy.run_module('router', run_name='__main__')"), ("", "import corun.testing")]
)
def test_so_do_the_processes_and_the_fakes(module: str, run: str) -> None:
    script = f"import runpy, sys; sys.modules['prometheus_client'] = None; {run}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "pip install '.[router]'" in done.stderr) == (1, True)
    assert not module or done.stderr.count("\n") == 1


def test_model_prints_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    assert main(["model", str(tmp_path / "tiny")]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()


# generate


def test_generate_prints_text_then_seed_and_receipt(corun: Any) -> None:
    done = corun("generate", PROMPT, "--seed", 42, "--max-tokens", 5)
    reference = json.loads(corun("generate", PROMPT, "--seed", 42, "--max-tokens", 5, "--json").out)
    text, _, receipt = done.out.partition("\n")
    assert (done.code, text, len(text)) == (0, reference["text"], 5)
    fields = {line[:14].strip(): line[15:] for line in receipt.splitlines()}
    assert (fields["seed"], fields["fingerprint"]) == ("42", FINGERPRINT)
    assert fields["output digest"] == reference["receipt"]["output_digest"]
    assert fields["finish reason"] == "length, 5 tokens"


def test_generate_json_is_one_object(corun: Any) -> None:
    stops = ("--stop", "a", "--stop", "b c")
    done = corun("generate", "--token-ids", 1, 2, "--logprobs", "--n", 2, "--seed", 3, "--json", *stops)
    assert done.out.count("\n") == 1
    row = json.loads(done.out)
    assert (row["prompt"], row["seed"], row["params"]["n"], row["params"]["stop"]) == ([1, 2], 3, 2, ["a", "b c"])
    assert [sample["sample_index"] for sample in row["samples"]] == [0, 1]
    assert row["samples"][0]["token_ids"] == row["token_ids"]
    assert output_digest(row["token_ids"], row["logprobs"]) == row["receipt"]["output_digest"]
    assert Receipt.from_dict(row["receipt"]).seed == 3


def test_generate_shows_samples_one_after_another(corun: Any) -> None:
    options = ("generate", PROMPT, "--seed", 4, "--n", 3, "--max-tokens", 6)
    texts = [sample["text"] for sample in json.loads(corun(*options, "--json").out)["samples"]]
    assert corun(*options).out.startswith("\n\n".join(texts) + "\nsample         0\n")


def test_generate_refuses_what_no_router_needs_to_see(corun: Any, fake: FakeRouter) -> None:
    assert corun("generate").code == 2
    assert corun("generate", "x", "--token-ids", 1).code == 2
    assert "prompt = 'Once upon': must be in quotes" in corun("generate", "Once", "upon").err
    done = corun("generate", PROMPT, "--top-p", 1.5)
    assert (done.code, done.err) == (2, "corun: sampling_params.top_p = 1.5: must be in [1e-09, 1]\n")
    assert not fake.requests


def test_commands_say_how_urgent_they_are(corun: Any, fake: FakeRouter, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"prompt": "a"})
    assert corun("generate", "x", "--priority", "high").code == 0
    assert corun("generate", "x").code == 0
    assert corun("batch", rows, "-o", tmp_path / "1.jsonl").code == 0
    assert corun("batch", rows, "-o", tmp_path / "2.jsonl", "--priority", "normal").code == 0
    assert [request.priority for request in fake.requests] == [1, 2, 3, 2]


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_process_may_begin_without_streams(closed: str, fake: FakeRouter) -> None:
    """Some daemons do, and Python has none then."""
    for router, code in ((fake.address, 0), ("nowhere", 2)):
        line = f'exec "$0" -m corun generate x --router {router} {closed}'
        assert subprocess.run(["sh", "-c", line, sys.executable], check=False).returncode == code


def test_what_is_meant_for_a_closed_stderr_is_not_printed_on_stdout() -> None:
    line = ["sh", "-c", 'exec "$0" -m corun status --router nowhere 2>&-', sys.executable]
    done = subprocess.run(line, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_model_cannot_command_the_terminal() -> None:
    assert for_terminal("ok\tü\n\x1b[2J\x07") == "ok\tü\n\\x1b[2J\\x07"


def test_generate_streams(fake: FakeRouter, start: Any) -> None:
    fake.gate.clear()
    with start("generate", PROMPT) as process:
        assert len(process.stdout.read(1)) == 1  # Before the second token exists.
        fake.gate.set()
        assert "receipt" not in process.stdout.read()
        assert process.wait(WAIT_S) == 0


def test_ctrl_c_exits_130_without_a_traceback(fake: FakeRouter, start: Any) -> None:
    fake.gate.clear()
    with start("generate", PROMPT) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert (process.wait(WAIT_S), process.stderr.read()) == (130, "")
    assert fake.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error(start: Any, monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with start("fingerprint", "--explain") as process:
        process.stdout.close()
        assert (process.wait(WAIT_S), process.stderr.read()) == (141, "")


# status


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_status_shows_slots_nodes_queue_audits_and_fingerprint(corun: Any, fake: FakeRouter) -> None:
    done = corun("status")
    lines = [line.strip() for line in done.out.splitlines()]
    assert done.code == 0
    assert "■■■" + "□" * 61 in lines
    assert "□" * 36 in lines
    for text in ("router-a", FINGERPRINT, "2 of 4096", "finished 7, mismatches 0"):
        assert text in done.out
    for text in ("prefill-0", "decode-0", "3/100 slots, 2 in line", "3 of 100 slots in use, 2 in line", "2" * 16):
        assert text in done.out
    assert "audited 0 (0 on the same node), mismatches 0, failed 0, skipped 0, waiting 0" in lines
    audit = AuditStatus(matched=9, mismatched=1, failed=2, skipped=3, same_node=4, waiting=5, last_mismatch="[b] d1")
    fake.status = replace(fake.status, audit=audit)
    out = corun("status").out
    assert "audited 10 (4 on the same node), mismatches 1, failed 2, skipped 3, waiting 5" in out
    assert "last mismatch [b] d1" in out
    assert "\nno " not in out, "these nodes know no freedoms"
    done = corun("status", "--json")
    status = json.loads(done.out)
    node = status["nodes"][1]
    assert (done.out.count("\n"), status["serving"], status["fingerprint"]) == (1, True, FINGERPRINT)
    assert (node["state"], node["load"]["used_slots"], node["node"]["role"]) == ("ready", 3, "decode")
    assert (node["node"]["contract"]["decode"]["slots"], status["audit"]) == (100, asdict(audit))
    fake.status = replace(fake.status, nodes=(), fingerprint="")
    done = corun("status")
    assert (done.code, "no node has joined" in done.out) == (4, True)


@pytest.mark.parametrize(
    ("state", "detail", "shown"),
    [
        (NodeState.REFUSED, "model.dtype: [bold]x[/] != y", "refused: model.dtype: [bold]x[/] != y"),
        (NodeState.LOST, GONE_AS_PLANNED, "decode    gone as planned"),  # It was told to end.
    ],
)
def test_status_says_why_a_node_is_not_used(
    corun: Any, fake: FakeRouter, state: NodeState, detail: str, shown: str
) -> None:
    prefill, decode = fake.status.nodes
    fake.status = replace(fake.status, nodes=(prefill, replace(decode, state=state, detail=detail)))
    done = corun("status")
    assert (done.code, shown in re.sub(r"(?<=decode) +", "    ", done.out)) == (4, True), done.out


def test_status_says_what_nodes_may_do_and_why_not_the_rest(corun: Any, fake: FakeRouter) -> None:
    """Nodes with the same reason share a line; what they use stands beside their role."""
    prefill, decode = fake.status.nodes
    cut = FreedomStatus(name="chunks", refused="a prompt of 129 tokens, cut into pieces of 1, differs")
    one = replace(prefill.node, freedoms=(FreedomStatus(name="packed"), cut))
    alone = FreedomStatus(name="contexts", refused="each runs alone")  # A limit of `packed`, beside it.
    two = replace(one, ref=replace(one.ref, node_id="prefill-9"), freedoms=(*one.freedoms, alone))
    later = replace(decode.node, freedoms=(FreedomStatus(name="rows"), FreedomStatus(name="newer", refused="why")))
    nodes = [replace(prefill, node=one), replace(prefill, node=two), replace(decode, node=later)]
    fake.status = replace(fake.status, nodes=tuple(nodes))
    lines = [line.rstrip() for line in corun("status").out.splitlines()]
    assert f"no prompts cut anywhere on {one.ref.node_id}, prefill-9: {cut.refused}" in " ".join(lines)
    assert "no prompts with a context in a step with others on prefill-9: each runs alone" in lines
    assert f"no newer on {later.ref.node_id}: why" in lines
    assert lines[lines.index(WITHOUT) + 1].startswith("no ")
    assert [sum(f"+{name}" in line for line in lines) for name in ("packed", "rows", "chunks")] == [2, 1, 0]
    known = json.loads(corun("status", "--json").out)["nodes"][0]["node"]["freedoms"]
    assert known == [{"name": "packed", "refused": ""}, {"name": "chunks", "refused": cut.refused}]


@pytest.mark.parametrize("state", [NodeState.REFUSED, NodeState.LOST])
def test_status_says_of_no_node_that_is_not_used_that_it_is_only_slower(
    corun: Any, fake: FakeRouter, state: NodeState
) -> None:
    """Why it is not used is in its state."""
    prefill, decode = fake.status.nodes
    node = replace(decode.node, freedoms=(FreedomStatus(name="rows", refused="the self-test failed"),))
    fake.status = replace(fake.status, nodes=(prefill, replace(decode, node=node)))
    assert WITHOUT in corun("status").out
    fake.status = replace(fake.status, nodes=(prefill, replace(decode, node=node, state=state, detail="moved")))
    out = corun("status").out
    assert f"{state.value}: moved" in out
    assert WITHOUT not in out
    assert "smaller steps" not in out


def test_status_shows_the_sides_of_a_colocated_node_next_to_each_other(corun: Any, fake: FakeRouter) -> None:
    def side(status: NodeStatus, name: str, **told: Any) -> NodeStatus:
        return replace(status, node=replace(status.node, ref=replace(status.node.ref, node_id=name), **told))

    prefill, decode = fake.status.nodes
    refused = FreedomStatus(name="mixed", refused="a row moved")
    detail = "takes prompts only"
    c0 = side(prefill, "c0-prefill", engine_id="e"), side(decode, "c0-decode", engine_id="e", freedoms=(refused,))
    gone = replace(side(decode, "c0-decode", engine_id="f"), state=NodeState.LOST)
    nodes = (c0[0], side(prefill, "p1", engine_id="g"), replace(c0[1], detail=detail), side(decode, "d1"), gone)
    fake.status = replace(fake.status, nodes=nodes)
    table = corun("status").out.split("\n\n")[1]
    rows = [line.split()[:2] for line in table.splitlines() if "ago" in line]
    assert rows == [
        ["c0-prefill", "prefill"],
        ["c0-decode", "decode"],
        ["p1", "prefill"],
        ["d1", "decode"],
        ["c0-decode", "decode"],
    ]
    assert table.count("colocated") == 2
    assert f"ready: {detail}" in table
    assert "no prompts beside outputs in a step on c0-decode: a row moved" in corun("status").out
    known = json.loads(corun("status", "--json").out)["nodes"]
    assert [node["node"]["engine_id"] for node in known] == ["e", "g", "e", "", "f"]


def test_status_without_unicode(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    with start("status") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err, "###" + "." * 61 in out) == (0, "", True)


def test_what_a_stdout_cannot_write_is_written_as_an_escape(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with start("generate", "日本", "--json") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err, '"prompt": "\\u65e5\\u672c"' in out) == (0, "", True)


def test_the_node_table_fits_80_columns(fake: FakeRouter) -> None:
    nodes = [
        replace(
            node,
            load=replace(node.load, tokens=1_234_567, cached_tokens=411_523, steps=123_456, used_kv_blocks=12_345),
        )
        for node in fake.status.nodes
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(picture(replace(fake.status, nodes=tuple(nodes)), fake.address, console.options))
    text = console.export_text()
    for node in fake.status.nodes:
        assert node.node.ref.generation in text
        assert re.search(rf"^{node.node.ref.node_id} .* ago *$", text, flags=re.MULTILINE), text
    assert re.search(r"1234567 tokens .*\n.* 411523 cached .*\n.* 25% from cache ", text)


# fingerprint


def change_contracts(fake: FakeRouter, **model: str) -> None:
    nodes = [replace(n, node=replace(n.node, contract_json=contract(n.node.role, **model))) for n in fake.status.nodes]
    fake.status = replace(fake.status, nodes=tuple(nodes))


def test_fingerprint_is_one_line_or_explained(corun: Any, fake: FakeRouter) -> None:
    assert corun("fingerprint").out == FINGERPRINT + "\n"
    change_contracts(fake, driver="")
    out = corun("fingerprint", "--explain").out
    assert out.index("model.weights_digest") < out.index("prefill.chunk_size") < out.index("decode.sampler")
    assert re.search(r"^model\.driver +\(none\)$", out, flags=re.MULTILINE)
    fake.status = replace(fake.status, nodes=(), fingerprint="")
    assert corun("fingerprint").code == 4


def test_fingerprint_diff_of_files_and_cluster(corun: Any, fake: FakeRouter, tmp_path: Path) -> None:
    saved = tmp_path / "monday.jsonl"
    saved.write_text(corun("fingerprint", "--json").out)
    assert len(read_rows(saved)) == 2
    same = corun("fingerprint", "--diff", saved, "cluster")
    assert (same.code, same.out) == (0, "no field differs\n")
    change_contracts(fake, driver="9")
    different = corun("fingerprint", "--diff", saved, "cluster", "--json")
    assert (different.code, json.loads(different.out)) == (3, {"field": "model.driver", "values": ["x", "9"]})
    assert "model.driver" in corun("fingerprint", "--diff", saved, "decode-0").out
    roles = corun("fingerprint", "--diff", "prefill-0", "decode-0")
    assert (roles.code, roles.out) == (0, "no field differs\n"), "a field of one role is no difference"
    bad = write_rows(tmp_path / "bad", {})
    assert corun("fingerprint", "--diff", bad, "cluster").code == 2


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[" * 100_000, b'{"state": "ready"}\n\xff'])
def test_fingerprint_diff_of_a_file_that_is_none(corun: Any, tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "bad").write_bytes(content)
    done = corun("fingerprint", "--diff", file, "cluster")
    assert (done.code, "must be the output of corun fingerprint --json" in done.err) == (2, True)


def test_fingerprint_diff_of_nodes_and_refused_ones(corun: Any, fake: FakeRouter, tmp_path: Path) -> None:
    prefill, decode = fake.status.nodes
    ref = replace(decode.node.ref, node_id="decode-1")
    other = replace(decode.node, ref=ref, contract_json=contract(NodeRole.DECODE, dtype="y"))
    refused = replace(decode, node=other, state=NodeState.REFUSED)
    fake.status = replace(fake.status, nodes=(prefill, refused, decode))
    done = corun("fingerprint", "--diff", "decode-0", "decode-1", "--json")
    assert (done.code, json.loads(done.out)["field"]) == (3, "model.dtype")
    alone = corun("fingerprint", "--diff", "decode-0")
    assert (alone.code, alone.err) == (2, "corun: diff = ('decode-0',): must be two: files, nodes or 'cluster'\n")
    unknown = corun("fingerprint", "--diff", "decode-0", "decode-7")
    assert (unknown.code, "prefill-0, decode-1, decode-0" in unknown.err) == (2, True)
    saved = tmp_path / "saved.jsonl"
    saved.write_text(corun("fingerprint", "--json").out)
    for name in ("cluster", saved):
        assert corun("fingerprint", "--diff", name, "decode-0").code == 0
