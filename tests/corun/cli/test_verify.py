"""`corun verify`: what it sends, what it finds, and what it says."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from corun.cli import verify_report
from corun.client.client import Client
from corun.client.progress import ProgressBar
from corun.errors import DataLossError, DeadlineError, OverloadedError
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.records.verification import Condition, NamedCase, VerifyCase, VerifyResult, cases_from_row
from corun.rpc import codec
from tests.corun.cli.conftest import PROMPT, read_rows, write_rows
from tests.corun.fake_router import FINGERPRINT, FakeRouter

ROWS = [
    {"prompt": [1, 2, 3], "id": "plain", "params": {"logprobs": True}},
    {"prompt": [4], "id": "many", "params": {"n": 3, "max_tokens": 5, "logprobs": True}},
    {"prompt": [5], "id": "quiet"},
    {"prompt": PROMPT, "id": "text", "params": {"logprobs": True}},
]
TWO_WITH_TOPS = {"prompt": [1], "id": "two", "params": {"n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 2}}


@pytest.fixture
def results(corun: Any, tmp_path: Path) -> Path:
    assert corun("batch", write_rows(tmp_path / "in.jsonl", *ROWS), "-o", tmp_path / "results.jsonl").code == 0
    return tmp_path / "results.jsonl"


def row_of(results: Path, name: str) -> dict[str, Any]:
    return next(row for row in read_rows(results) if row["id"] == name)


def report_of(done: Any) -> Any:
    return json.loads(done.out.splitlines()[-1])


def test_built_in_prompts_run_under_every_condition(corun: Any, fake: FakeRouter) -> None:
    done = corun("verify")
    report = report_of(done)
    assert (done.code, report["match"], report["cases"], report["fingerprints"]) == (0, True, 12, [FINGERPRINT])
    assert report["conditions"] == {c.value: {"runs": 12, "equal": 12} for c in Condition}
    assert "every bit agrees" in done.out
    cases = fake.verified[0].cases
    assert all(max(case.prompt_token_ids) < 1000 for case in cases)
    assert {case.sampling_params.temperature == 0 for case in cases} == {True, False}
    assert len({len(case.prompt_token_ids) for case in cases}) == 12
    assert not any(case.output_digest for case in cases)


def test_results_run_against_their_receipts(corun: Any, fake: FakeRouter, results: Path) -> None:
    done = corun("verify", results, "--json", "--conditions", "alone", "shuffled", "--order-seed", 3)
    report = json.loads(done.out)
    assert (done.code, report["cases"], report["runs"]) == (0, 6, 12)
    request, again = fake.verified  # A call for each condition.
    assert again.cases == request.cases
    assert tuple(PROMPT.encode()) in {tuple(case.prompt_token_ids) for case in request.cases}
    assert [case.text for case in request.cases if case.text] == [PROMPT]  # To be tokenized again.
    digests = {row["receipt"]["output_digest"] for row in read_rows(results)}
    assert digests <= {case.output_digest for case in request.cases}
    assert ({case.sampling_params.n for case in request.cases}, request.order_seed) == ({1}, 3)
    assert json.loads(corun("verify", results, "--json", "--limit", 2).out)["cases"] == 2
    row = row_of(results, "quiet")
    # How the row was computed is information: no bit depends on it, and the new run was computed in another way.
    row["receipt"] |= {"cached_tokens": 48, "certificates": "f" * 64}
    assert corun("verify", write_rows(results, row)).code == 0


def test_different_bits_exit_3_and_are_shown_and_written(
    corun: Any, fake: FakeRouter, results: Path, tmp_path: Path
) -> None:
    fake.broken = {Condition.CROWDED}
    done = corun("verify", results, "-o", tmp_path / "report.json")
    report = report_of(done)
    assert (done.code, report["match"]) == (3, False)
    assert report["conditions"]["crowded"] == {"runs": 6, "equal": 0}
    assert report["conditions"]["alone"] == {"runs": 6, "equal": 6}
    assert {d["condition"] for d in report["differences"]} == {"crowded"}
    assert "BITS DIFFER" in done.out
    assert "plain, crowded: expected" in done.out
    assert (tmp_path / "report.json").read_text() == done.out.splitlines()[-1] + "\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"silent": True}, "the router gave no answer"),
        ({"without_texts": True}, "the router gave no text_digest: it cannot be checked"),
        ({"stopping": {Condition.SHUFFLED}}, "its finish reason was length, is stop"),
    ],
)
def test_nothing_less_than_the_same_is_agreement(
    corun: Any, fake: FakeRouter, change: dict[str, Any], reason: str
) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    done = corun("verify", "--json")
    assert done.code == 3
    assert {d["reason"] for d in json.loads(done.out)["differences"]} == {reason}


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "texts"])
def test_alternatives_are_compared_with_those_of_the_run(corun: Any, tmp_path: Path, field: str) -> None:
    row = {"prompt": [1], "id": "tops", "params": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}}
    results = tmp_path / "tops.jsonl"
    assert corun("batch", write_rows(tmp_path / "in.jsonl", row), "-o", results).code == 0
    assert corun("verify", results).code == 0
    (found,) = read_rows(results)
    found["top_logprobs"][1][field].reverse()
    done = corun("verify", write_rows(results, found), "--json")
    reasons = {each["reason"] for each in json.loads(done.out)["differences"]}
    assert (done.code, reasons) == (3, {"its top_logprobs are not those of the run"})
    del found["top_logprobs"]
    done = corun("verify", write_rows(results, found))
    assert "row tops: its number of top_logprobs is not that of its receipt" in done.err


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
        ("text", {"prompt": "\ud800"}),
    ],
)
def test_rows_that_were_changed_are_found(
    corun: Any, fake: FakeRouter, results: Path, row_id: str, change: dict[str, Any]
) -> None:
    done = corun("verify", change_row(results, row_id, **change))
    assert (done.code in (2, 3), "corun: " in done.err) == (True, True)
    assert not fake.verified


@pytest.mark.parametrize("field", ["logprobs", "top_logprobs"])
def test_what_a_row_repeats_of_its_first_sample_is_the_same(corun: Any, tmp_path: Path, field: str) -> None:
    """The sign of a zero is a bit, too."""
    results = tmp_path / "two.jsonl"
    assert corun("batch", write_rows(tmp_path / "in.jsonl", TWO_WITH_TOPS), "-o", results).code == 0
    (row,) = read_rows(results)
    sample = row["samples"][0]
    sample["logprobs"][0] = row["logprobs"][0] = 0.0
    sample["receipt"]["output_digest"] = output_digest(sample["token_ids"], sample["logprobs"])
    row["receipt"] = sample["receipt"]
    assert len(cases_from_row("here", row)) == 2
    changed = row["logprobs"] if field == "logprobs" else row["top_logprobs"][0]["logprobs"]
    changed[0] = -0.0 if field == "logprobs" else -1.0
    with pytest.raises(DataLossError, match=f"row two: its {field} is not that of sample 0"):
        cases_from_row("here", row)


@pytest.mark.parametrize("name", ["text", "token_ids", "finish_reason", "logprobs"])
def test_rows_that_lost_a_part_are_refused(corun: Any, fake: FakeRouter, results: Path, name: str) -> None:
    row = row_of(results, "plain")
    del row[name]
    done = corun("verify", write_rows(results, row))
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
        ("plain", {"receipt": {"fingerprint": "a" * 64}}, "made under contract aaaa"),
    ],
)
def test_what_only_a_run_can_tell_is_found(
    corun: Any, results: Path, row_id: str, change: dict[str, Any], reason: str
) -> None:
    done = corun("verify", change_row(results, row_id, **change), "--json", "--conditions", "alone")
    report = json.loads(done.out)
    assert (done.code, report["match"], report["runs"]) == (3, False, 6)
    (difference,) = report["differences"]
    assert difference["case"].startswith(row_id)
    assert reason in difference["reason"]


def test_a_call_that_a_router_ended_is_followed_by_others(corun: Any, fake: FakeRouter) -> None:
    fake.results_per_call = 8
    done = corun("verify", "--json")
    report = json.loads(done.out)
    assert (done.code, report["runs"], report["missing_runs"]) == (0, 48, 0)
    assert report["conditions"] == {c.value: {"runs": 12, "equal": 12} for c in Condition}
    # A later call has to give what an earlier one gave.
    assert [len(request.cases) for request in fake.verified] == [12, 4] * 4
    assert [bool(request.cases[0].output_digest) for request in fake.verified] == [False] * 2 + [True] * 6


def test_a_call_that_gives_nothing_ends_it(corun: Any, fake: FakeRouter) -> None:
    fake.errors = [DeadlineError("no slot was idle")]
    done = corun("verify")
    assert (done.code, done.out, "no slot was idle" in done.err) == (1, "", True)


def test_results_are_shown_when_the_cluster_goes(corun: Any, fake: FakeRouter, tmp_path: Path) -> None:
    def go(number: int) -> None:
        if number == 7:
            raise RuntimeError("gone")

    fake.on_result = go
    done = corun("verify", "-o", tmp_path / "report.json")
    assert (done.code, done.err.startswith("corun: ")) == (1, True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["match"], report["runs"], report["missing_runs"]) == (False, 7, 41)
    assert "12 cases, 7 runs: every bit agrees; 41 of 48 runs were not run" in done.out


def test_results_are_shown_at_ctrl_c(corun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count(1)

    def advance(bar: ProgressBar) -> None:
        if next(counted) == 13:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "advance", advance)
    done = corun("verify")
    report = report_of(done)
    assert (done.code, done.err) == (130, "")
    assert (report["match"], report["runs"], report["missing_runs"]) == (False, 13, 35)
    assert report["conditions"]["alone"] == {"runs": 12, "equal": 12}


@pytest.fixture
def reproduction(results: Path, tmp_path: Path) -> Path:
    row = row_of(results, "quiet")
    return write_rows(tmp_path / "audit.json", row | {"audit": {"receipt": row["receipt"] | {"seed": 1}}})


def test_a_report_that_cannot_be_written_is_refused_first(corun: Any, fake: FakeRouter, results: Path) -> None:
    """Results are evidence: a report does not take their place."""
    before, missing = results.read_bytes(), results.parent / "none" / "report.json"
    done = corun("verify", results, "-o", missing)
    assert (done.code, done.err) == (2, f"corun: {missing}: No such file or directory\n")
    done = corun("verify", results, "-o", results)
    assert (done.code, "must not be what is verified" in done.err) == (2, True)
    assert (results.read_bytes(), fake.verified) == (before, [])


def test_what_an_audit_found_is_run(corun: Any, fake: FakeRouter, reproduction: Path) -> None:
    assert corun("verify", "--reproduction", reproduction, "--json").code == 0
    (row,) = read_rows(reproduction)
    (case,) = fake.verified[0].cases
    assert (case.output_digest, case.seed) == (row["receipt"]["output_digest"], row["seed"])
    fake.broken = {Condition.ALONE}
    assert corun("verify", "--reproduction", reproduction).code == 3


def test_an_end_for_another_reason_is_seen_in_what_an_audit_found(
    corun: Any, fake: FakeRouter, reproduction: Path
) -> None:
    """The bits of both runs were equal, so only why they ended can tell who was wrong."""
    (row,) = read_rows(reproduction)
    row["audit"]["receipt"]["finish_reason"] = "stop"
    write_rows(reproduction, row)
    assert corun("verify", "--reproduction", reproduction).code == 0
    fake.stopping = {Condition.ALONE}
    done = corun("verify", "--reproduction", reproduction, "--json", "--conditions", "alone")
    (difference,) = json.loads(done.out)["differences"]
    assert (done.code, difference["reason"]) == (3, "its finish reason was length, is stop, as the audit did")


def test_files_that_are_no_results_or_reproductions(
    corun: Any, fake: FakeRouter, results: Path, reproduction: Path, tmp_path: Path
) -> None:
    whole = {"id": "a", "prompt": [1], "params": {}, "seed": 1, "receipt": {}, "samples": [3]}
    (broken,) = read_rows(reproduction)
    del broken["audit"]["receipt"]["seed"]
    for words, message in (
        ([write_rows(tmp_path / "a.jsonl", {})], "a.jsonl:1"),
        ([write_rows(tmp_path / "b.jsonl", {"id": 1})], "b.jsonl:1"),
        ([write_rows(tmp_path / "c.jsonl", whole)], "c.jsonl:1"),
        ([write_rows(tmp_path / "empty.jsonl")], "must hold at least one result"),
        ([results, "--limit", 0], "limit = 0"),
        ([results, "--reproduction", reproduction], "without results"),
        (["--reproduction", results], "must be a file that an audit wrote"),
        (["--reproduction", write_rows(tmp_path / "empty")], "must be a file that an audit wrote"),
        (["--reproduction", tmp_path / "none"], "none"),
        (["--reproduction", write_rows(tmp_path / "broken.json", broken)], "broken.json:1: receipt.seed"),
        (["--conditions", "alone", "alone"], "conditions[1] = 'alone': must be given once"),
    ):
        done = corun("verify", *words)
        assert (done.code, message in done.err) == (2, True), done.err
    assert not fake.verified
    fake.status = replace(fake.status, nodes=())
    assert corun("verify").code == 4


@pytest.mark.parametrize(
    ("prompts", "sizes"),
    [([3] * 600, [256, 256, 88]), ([100_000] * 20, [6, 6, 6, 2]), ([3, 2_000_000, 3], [1, 1, 1]), ([], [])],
)
def test_a_call_carries_so_many_cases_and_bytes(prompts: list[int], sizes: list[int]) -> None:
    cases = [
        NamedCase(
            name=str(number),  # Each token has three bytes.
            case=VerifyCase(prompt_token_ids=(70_000,) * tokens, sampling_params=SamplingParams(), seed=number),
        )
        for number, tokens in enumerate(prompts)
    ]
    parts = list(verify_report._calls(cases))
    assert [len(part) for _, part in parts] == sizes
    assert [case for _, part in parts for case in part] == cases
    assert [start for start, _ in parts] == [sum(sizes[:number]) for number in range(len(sizes))]
    for _, part in parts:
        size = codec.verify_request([each.case for each in part], ()).ByteSize()
        assert len(part) == 1 or size <= verify_report.BYTES_PER_CALL


class _OneCase:
    """A client whose calls answer one case, or raise the next error, and note the time that they were given."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.timeouts: list[float | None] = []

    def verify(
        self, cases: Any, conditions: list[Condition], *, order_seed: int, timeout_s: float | None
    ) -> Iterator[VerifyResult]:
        self.timeouts.append(timeout_s)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        yield VerifyResult(case_index=0, condition=conditions[0], match=True, expected_digest="")


def one_case() -> verify_report.Verification:
    case = VerifyCase(prompt_token_ids=(1,), sampling_params=SamplingParams(), seed=1)
    return verify_report.Verification([NamedCase(name="a", case=case)], [Condition.ALONE, Condition.CROWDED])


def test_no_call_is_made_once_the_time_is_over() -> None:
    client = _OneCase()
    over: Any = lambda: setattr(verify_report.Deadline, "remaining_s", 0.0)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_report.Deadline, "remaining_s", 1.0)
        with pytest.raises(DeadlineError, match="crowded in time"):
            one_case().run(cast("Client", client), on_result=over)
    assert client.timeouts == [1.0]


def test_a_verification_waits_for_one_that_began_between_its_calls() -> None:
    client = _OneCase(None, OverloadedError("another runs", 0.01))
    assert one_case().run(cast("Client", client)).num_missing == 0
    assert len(client.timeouts) == 3
    with pytest.raises(OverloadedError):
        one_case().run(cast("Client", _OneCase(OverloadedError("another runs", 0.01))))
