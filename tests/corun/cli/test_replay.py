"""`corun replay` and `corun diff`: where a recorded output and another one part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main
from corun.records.reproduction import parting
from corun.types import NodeRole
from tests.corun import fake_router
from tests.corun.cli.conftest import read_rows, write_rows
from tests.corun.fake_router import FakeRouter, contract

ROWS = [
    {"prompt": [1, 2, 3], "id": "plain", "seed": 1, "params": {"logprobs": True, "max_tokens": 6}},
    {"prompt": [4], "id": "many", "seed": 2, "params": {"n": 2, "max_tokens": 5, "logprobs": True}},
    {"prompt": "ü", "id": "quiet", "seed": 3, "params": {"max_tokens": 4}},
]


@pytest.fixture
def results(corun: Any, tmp_path: Path) -> Path:
    assert corun("batch", write_rows(tmp_path / "in.jsonl", *ROWS), "-o", tmp_path / "before.jsonl").code == 0
    return tmp_path / "before.jsonl"


def test_an_id_may_be_no_unicode(corun: Any, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "id": "\ud800"} for row in read_rows(results) if row["id"] != "many"]
    first, second = (write_rows(tmp_path / f"{n}.jsonl", rows[n]) for n in (0, 1))
    assert corun("replay", first).out.startswith("\\ud800: BIT-EXACT")
    assert corun("replay", first, "--json").out.startswith('{"id": "\\ud800", "match": true')
    for flags in ((), ("--json",)):
        assert main(["diff", str(first), str(second), *flags]) == 3
        assert "\\ud800" in capsys.readouterr().out


@pytest.fixture
def again(corun: Any, tmp_path: Path, results: Path) -> Callable[[], Path]:
    """A function that runs the same prompts once more."""

    def run() -> Path:
        assert corun("batch", tmp_path / "in.jsonl", "-o", tmp_path / "after.jsonl").code == 0
        return tmp_path / "after.jsonl"

    return run


@pytest.fixture
def other_bits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, float], None]:
    """A function that lets the router draw another token, or another log probability, at one position."""
    right = fake_router.sample_output

    def change(position: int, token: int, logprob: float) -> None:
        def drawn(prompt: tuple[int, ...], seed: int, count: int) -> list[tuple[int, float]]:
            found = right(prompt, seed, count)
            found[position] = (found[position][0] ^ token, found[position][1] * logprob)
            return found

        monkeypatch.setattr(fake_router, "sample_output", drawn)

    return change


@pytest.fixture
def other_contract(monkeypatch: pytest.MonkeyPatch, fake: FakeRouter) -> Callable[[], None]:
    """A function that starts the cluster anew, as it were, with another driver."""

    def change() -> None:
        monkeypatch.setattr(fake_router, "FINGERPRINT", "b" * 64)
        roles = (NodeRole.PREFILL, NodeRole.DECODE)
        nodes = zip(fake.status.nodes, roles, strict=True)
        changed = tuple(replace(n, node=replace(n.node, contract_json=contract(r, driver="y"))) for n, r in nodes)
        fake.status = replace(fake.status, fingerprint="b" * 64, nodes=changed)

    return change


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """A function that compares two files, which needs no router."""

    def run(*argv: object) -> SimpleNamespace:
        code = main(["diff", *map(str, argv)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def test_what_was_recorded_is_drawn_again(corun: Any, results: Path) -> None:
    done = corun("replay", results)
    assert done.code == 0
    assert "many[1]: BIT-EXACT; 5 tokens, seed" in done.out
    assert done.out.splitlines()[-1] == "4 of 4 samples are BIT-EXACT"
    assert corun("replay", results, "--id", "quiet").out == "quiet: BIT-EXACT; 4 tokens, seed 3\n"


def test_a_single_generation_is_a_record(corun: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(corun("generate", "hello", "--seed", 4, "--max-tokens", 3, "--json").out)
    assert corun("replay", record).out.endswith(": BIT-EXACT; 3 tokens, seed 4\n")


@pytest.mark.parametrize(("token", "logprob"), [(1, 1.0), (0, 1.5)])
def test_the_first_token_or_log_probability_that_differs_is_named(
    corun: Any, results: Path, other_bits: Callable[..., None], token: int, logprob: float
) -> None:
    other_bits(3, token, logprob)
    done = corun("replay", results, "--id", "plain")
    assert (done.code, "plain: DIFFERS at token 3: " in done.out) == (3, True)
    recorded, now = done.out.partition(": DIFFERS at token 3: ")[2].partition(" (recorded and now)")[0].split(" and ")
    assert (recorded.split()[0] == now.split()[0]) is (token == 0)
    assert (recorded.split()[2] == now.split()[2]) is (logprob == 1.0)


def test_a_log_probability_that_was_not_recorded_is_told_by_the_digest(
    corun: Any, results: Path, other_bits: Callable[..., None]
) -> None:
    other_bits(1, 0, 1.5)
    done = corun("replay", results, "--id", "quiet", "--json")
    found = json.loads(done.out)
    assert (done.code, found["match"], "by a log probability" in found["difference"]) == (3, False, True)


def test_alternatives_are_compared(corun: Any, tmp_path: Path) -> None:
    row = {"prompt": [1], "id": "tops", "params": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}}
    recorded = tmp_path / "tops.jsonl"
    assert corun("batch", write_rows(tmp_path / "in.jsonl", row), "-o", recorded).code == 0
    assert corun("replay", recorded).code == 0
    (found,) = read_rows(recorded)
    found["top_logprobs"][1]["logprobs"].reverse()
    done = corun("replay", write_rows(recorded, found))
    assert (done.code, "DIFFERS at the top_logprobs" in done.out) == (3, True)


def test_another_contract_is_told(corun: Any, results: Path, other_contract: Callable[[], None]) -> None:
    other_contract()
    done = corun("replay", results, "--id", "plain")
    assert (done.code, "another contract: recorded " in done.out, "b" * 64 in done.out) == (0, True, True)


def test_unknown_ids_and_changed_records_are_refused(corun: Any, results: Path) -> None:
    assert "must be the id of a row" in corun("replay", results, "--id", "nobody").err
    rows = read_rows(results)
    write_rows(results, {**rows[0], "seed": 9})
    assert corun("replay", results).code == 3


def test_equal_runs_have_no_difference(diff: Any, results: Path, again: Callable[[], Path]) -> None:
    done = diff(results, again())
    assert (done.code, done.out.splitlines()[-1]) == (0, "3 rows in both: every bit agrees")
    assert "one contract: " in done.out


def test_other_alternatives_are_a_difference(corun: Any, diff: Any, tmp_path: Path) -> None:
    """All tokens, and their own log probabilities, are the same."""
    row = {"prompt": [1], "id": "tops", "params": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}}
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    assert corun("batch", write_rows(tmp_path / "in.jsonl", row), "-o", before).code == 0
    assert diff(before, before).code == 0
    (found,) = read_rows(before)
    found["top_logprobs"][1]["logprobs"].reverse()
    done = diff(before, write_rows(after, found))
    assert (done.code, "tops: the top_logprobs of token 1" in done.out) == (3, True)


def test_where_two_runs_part_and_what_their_contracts_have_otherwise(
    diff: Any,
    results: Path,
    again: Callable[[], Path],
    other_bits: Callable[..., None],
    other_contract: Callable[[], None],
) -> None:
    other_contract()
    other_bits(2, 1, 1.0)
    done = diff(results, again())
    assert done.code == 3
    assert "many: sample 0, token 2: " in done.out
    assert "  model.driver: x and y" in done.out
    assert "3 rows in both: 3 differ" in done.out
    report = [json.loads(line) for line in diff(results, again(), "--json").out.splitlines()]
    assert {row["id"] for row in report[:-1]} == {"plain", "many", "quiet"}
    assert report[-1]["contract"]["fields"] == {"model.driver": ["x", "y"]}


def test_contracts_that_were_not_kept_are_unknown(
    diff: Any, results: Path, again: Callable[[], Path], other_contract: Callable[[], None]
) -> None:
    other_contract()
    after = again()
    results.with_suffix(".contracts.jsonl").unlink()
    done = diff(results, after)
    assert (done.code, "is not known: " in done.out) == (0, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 9}, "plain: seed: 1 and 9"),
        ({"prompt": [1, 2, 4]}, "plain: prompt: [1, 2, 3] and [1, 2, 4]"),
        ({"params": {"max_tokens": 3}}, "plain: max_tokens: 6 and 3"),
    ],
)
def test_what_was_asked_comes_first(
    corun: Any, diff: Any, tmp_path: Path, results: Path, change: dict[str, Any], said: str
) -> None:
    other = tmp_path / "other.jsonl"
    assert corun("batch", write_rows(tmp_path / "changed.jsonl", ROWS[0] | change), "-o", other).code == 0
    done = diff(results, other)
    assert (done.code, said in done.out, "; 2 only in the first" in done.out) == (3, True, True)


def test_files_without_a_common_row_are_refused(diff: Any, tmp_path: Path, results: Path) -> None:
    other = shutil.copy(results, tmp_path / "renamed.jsonl")
    write_rows(other, *({**row, "id": f"{row['id']}-2"} for row in read_rows(results)))
    assert "must have an id in common" in diff(results, other).err


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (([1, 2], [-1.0, -2.0]), ([1, 2], [-1.0, -2.0]), ""),
        (([1, 2], [-1.0, 0.0]), ([1, 2], [-1.0, -0.0]), "token 1: 2 (logprob 00000000) and 2 (logprob 80000000)"),
        (([1, 2], []), ([1, 2], [-1.0, -2.0]), ""),
        (([1, 2], []), ([1, 2, 3], []), "token 2: the end and 3"),
        (([], []), ([3], [-1.0]), "token 0: the end and 3"),
    ],
)
def test_bits_are_compared(first: Any, second: Any, found: str) -> None:
    assert parting(first, second) == found
