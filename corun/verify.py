"""Checks a cluster against itself: runs results or built-in prompts again and compares every bit.

Owns which cases are run and what the answers add up to; the runs themselves are the router's `Verify`. This module
must not know how a report is shown.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from corun.client import Client
from corun.cluster import ClusterStatus, Condition, NodeState, VerifyCase, VerifyResult
from corun.errors import DataLossError, InvalidArgumentError, UnavailableError
from corun.params import SamplingParams, check_token_ids
from corun.receipt import Receipt, output_digest, prompt_digest
from corun.rows import located, params_from_dict

CASES_PER_CALL = 256
"""Cases that one call to the router carries; they are each other's crowd."""
BUILT_IN_CASES = 12
_MAX_PROMPT = 200
_BUILT_IN_OUTPUT = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCase:
    """A case, what to call it, and the fingerprint under which it was first run (empty: never)."""

    name: str
    case: VerifyCase
    fingerprint: str = ""
    audit_digest: str = ""
    """What the run gave that was found to differ, for a case from a reproduction file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One run that was not what it had to be."""

    name: str
    condition: Condition
    reason: str

    def to_dict(self) -> dict[str, str]:
        return {"case": self.name, "condition": self.condition.value, "reason": self.reason}


@dataclass(kw_only=True, slots=True)
class Report:
    """What all runs add up to."""

    num_cases: int
    runs: Counter[Condition] = field(default_factory=Counter)
    equal: Counter[Condition] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)

    @property
    def match(self) -> bool:
        """True if there were runs and every one of them was equal."""
        return not self.differences and bool(self.runs)

    def add(self, named: NamedCase, result: VerifyResult) -> None:
        self.runs[result.condition] += 1
        if result.receipt is not None:
            self.fingerprints.add(result.receipt.fingerprint)
        if reason := _difference(named, result):
            self.differ(named, result.condition, reason)
        else:
            self.equal[result.condition] += 1

    def differ(self, named: NamedCase, condition: Condition, reason: str) -> None:
        self.differences.append(Difference(name=named.name, condition=condition, reason=reason))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        counts = {c.value: {"runs": self.runs[c], "equal": self.equal[c]} for c in Condition if self.runs[c]}
        return {
            "match": self.match,
            "cases": self.num_cases,
            "runs": sum(self.runs.values()),
            "conditions": counts,
            "fingerprints": sorted(self.fingerprints),
            "differences": [difference.to_dict() for difference in self.differences],
        }


def run(
    client: Client,
    cases: Sequence[NamedCase],
    conditions: Sequence[Condition] = (),
    *,
    order_seed: int = 0,
    timeout_s: float | None = None,
    on_result: Callable[[], None] = lambda: None,
) -> Report:
    """Runs every case under every condition (none given: all). timeout_s: of each call, of up to 256 cases."""
    report = Report(num_cases=len(cases))
    conditions = tuple(conditions) or tuple(Condition)
    for start in range(0, len(cases), CASES_PER_CALL):
        part = cases[start : start + CASES_PER_CALL]
        results = client.verify(
            [named.case for named in part], conditions, order_seed=order_seed + start, timeout_s=timeout_s
        )
        _collect(report, part, conditions, results, on_result)
    return report


def built_in_cases(status: ClusterStatus, count: int = BUILT_IN_CASES) -> list[NamedCase]:
    """Prompts of token ids for any model: several lengths, greedy and seeded, with and without penalties.

    Raises UnavailableError if no node has joined that says how large the vocabulary is.
    """
    nodes = [node.node for node in status.nodes if node.state is not NodeState.REFUSED]
    if not nodes:
        raise UnavailableError("no node has joined, so the model is not known")
    vocab_size = min(node.vocab_size for node in nodes)
    max_model_len = min(node.max_model_len for node in nodes)
    max_tokens = min(_BUILT_IN_OUTPUT, max(1, max_model_len // 4))
    room = min(_MAX_PROMPT, max_model_len - max_tokens)
    return [_built_in_case(i, vocab_size, 1 + (i * 37) % room, max_tokens) for i in range(count)]


def cases_from_row(where: str, row: Mapping[str, Any]) -> list[NamedCase]:
    """The samples of one row of `corun batch`. Raises DataLossError if the row is not what its own receipt says."""
    samples = row.get("samples") or [row]
    names = [str(row["id"])] if len(samples) == 1 else [f"{row['id']}[{i}]" for i in range(len(samples))]
    try:
        return [_case_of(name, row, sample) for name, sample in zip(names, samples, strict=True)]
    except InvalidArgumentError as error:
        raise located(where, error) from None
    except (AttributeError, KeyError, TypeError, ValueError, struct.error):
        raise InvalidArgumentError(where, row, "is not a result of corun batch") from None


def case_from_reproduction(where: str, row: Mapping[str, Any]) -> NamedCase:
    """The sample of a file that an audit wrote; expected is what the client got."""
    (named,) = cases_from_row(where, row)
    try:
        audit = Receipt.from_dict(row["audit"]["receipt"])
    except InvalidArgumentError as error:
        raise located(where, error) from None
    return replace(named, audit_digest=audit.output_digest)


def _collect(
    report: Report,
    part: Sequence[NamedCase],
    conditions: Sequence[Condition],
    results: Iterable[VerifyResult],
    on_result: Callable[[], None],
) -> None:
    owed = {(index, condition): None for condition in conditions for index in range(len(part))}
    for result in results:
        key = (result.case_index, result.condition)
        if key not in owed:
            raise DataLossError(f"the router answered case {key[0]} under {key[1].value}, which was not asked")
        del owed[key]
        report.add(part[result.case_index], result)
        on_result()
    for index, condition in owed:  # What was not run was not verified.
        report.runs[condition] += 1
        report.differ(part[index], condition, "the router gave no answer")


def _case_of(name: str, row: Mapping[str, Any], sample: Mapping[str, Any]) -> NamedCase:
    receipt = Receipt.from_dict(sample["receipt"])
    field = "prompt_token_ids" if isinstance(row["prompt"], str) else "prompt"
    prompt = check_token_ids(row[field], 2**32, field)
    params = replace(params_from_dict(row["params"]), n=1)  # Each sample is run by itself, with its own seed.
    _check_row(name, receipt, prompt, params, sample)
    case = VerifyCase(
        prompt_token_ids=prompt, sampling_params=params, seed=receipt.seed, output_digest=receipt.output_digest
    )
    return NamedCase(name=name, case=case, fingerprint=receipt.fingerprint)


def _check_row(
    name: str, receipt: Receipt, prompt: Sequence[int], params: SamplingParams, sample: Mapping[str, Any]
) -> None:
    found = {
        "seed": (sample.get("seed"), receipt.seed),
        "prompt": (prompt_digest(prompt), receipt.prompt_digest),
        "parameters": (params.digest(), receipt.params_digest),
    }
    if sample.get("logprobs"):
        digest = output_digest(sample.get("token_ids", ()), sample["logprobs"])
        found["tokens and log probabilities"] = (digest, receipt.output_digest)
    for what, (row_value, stated) in found.items():
        if row_value != stated:
            raise DataLossError(f"row {name}: its {what} are not those of its receipt: the row was changed")


def _difference(named: NamedCase, result: VerifyResult) -> str:
    """Why a run is not what it had to be; empty if it is."""
    if result.error:
        return f"failed: {result.error}"
    found = "" if result.receipt is None else result.receipt.output_digest
    if not result.match:
        known = ", as the audit did" if found and found == named.audit_digest else ""
        return f"expected {result.expected_digest}, got {found}{known}"
    if result.receipt is not None and named.fingerprint not in ("", result.receipt.fingerprint):
        return f"made under contract {named.fingerprint}, run under {result.receipt.fingerprint}"
    return ""


def _built_in_case(index: int, vocab_size: int, length: int, max_tokens: int) -> NamedCase:
    stream = hashlib.shake_256(b"corun.verify" + struct.pack("<I", index)).digest(4 * length)
    prompt = tuple(word % vocab_size for word in struct.unpack(f"<{length}I", stream))
    params = SamplingParams(
        temperature=(0.0, 0.7, 1.0)[index % 3],
        top_p=0.95 if index % 4 == 1 else 1.0,
        top_k=40 if index % 4 == 2 else 0,
        presence_penalty=0.5 if index % 4 == 3 else 0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    case = VerifyCase(prompt_token_ids=prompt, sampling_params=params, seed=1000 + index)
    return NamedCase(name=f"built-in-{index}", case=case)
