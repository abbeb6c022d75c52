"""Check a cluster against itself: run results or built-in prompts again and compare every bit.

This module owns the built-in cases, the calls, and the report on the answers. The router's `Verify` does the runs, and
`corun.records.verification` makes cases of rows. This module must not know how a report is shown.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from corun.client.client import Client
from corun.client.routers import Deadline
from corun.errors import DataLossError, DeadlineError, OverloadedError, UnavailableError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.verification import Condition, NamedCase, VerifyCase, VerifyResult, all_if_none
from corun.rpc import codec
from corun.types import ClusterStatus, NodeState

BYTES_PER_CALL = 2 * 1024 * 1024
"""The most bytes of several cases in one call. A router takes 4 MiB, plus one case with a prompt of the model's
length."""
CASES_PER_CALL = 256
"""The most cases that one call to the router carries."""
TIMEOUT_S = 3600.0
"""The time in seconds for the cases of one call, over as many calls as the router needs to finish them."""
BUILT_IN_CASES = 12
_MAX_PROMPT = 200
_BUILT_IN_OUTPUT = 24
_SAME = {
    "tokens_digest": "tokens were",
    "num_output_tokens": "number of tokens was",
    "num_prompt_tokens": "number of prompt tokens was",
    "finish_reason": "finish reason was",
    "prompt_digest": "prompt was",
    "params_digest": "parameters were",
    "seed": "seed was",
}
"""The receipt fields, beside contract and output, that are the same in all runs of one case, each with its words."""


@dataclass(kw_only=True, slots=True)
class Report:
    """The sum of all runs so far. It is also valid when the runs were interrupted."""

    num_cases: int
    num_runs: int
    """The number of runs that were asked for."""
    runs: Counter[Condition] = field(default_factory=Counter)
    """The number of runs that have a result, by condition."""
    equal: Counter[Condition] = field(default_factory=Counter)
    differences: list[dict[str, str]] = field(default_factory=list)
    """The runs whose results are not the expected ones: case, condition and reason of each."""
    fingerprints: set[str] = field(default_factory=set)

    @property
    def match(self) -> bool:
        """True if there is at least one run, no run is missing, and every run was equal."""
        return not self.differences and bool(self.runs) and not self.num_missing

    @property
    def num_missing(self) -> int:
        """The number of runs without a result."""
        return self.num_runs - self.runs.total()

    def add(self, named: NamedCase, condition: Condition, difference: str) -> None:
        """Count one run. difference: why it is not as expected; empty if it is."""
        self.runs[condition] += 1
        if difference:
            self.differences.append({"case": named.name, "condition": condition.value, "reason": difference})
        else:
            self.equal[condition] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        counts = {c.value: {"runs": self.runs[c], "equal": self.equal[c]} for c in Condition if self.runs[c]}
        return {
            "match": self.match,
            "cases": self.num_cases,
            "runs": self.runs.total(),
            "missing_runs": self.num_missing,
            "conditions": counts,
            "fingerprints": sorted(self.fingerprints),
            "differences": self.differences,
        }


class Verification:
    """Runs cases again under conditions; without conditions, under all of them. `report` grows as results come."""

    def __init__(
        self, cases: Sequence[NamedCase], conditions: Sequence[Condition] = (), *, order_seed: int = 0
    ) -> None:
        self._cases = cases
        self._conditions = all_if_none(conditions)
        self._order_seed = order_seed
        self._first: dict[NamedCase, VerifyResult] = {}  # The first whole result of each case.
        self.report = Report(num_cases=len(cases), num_runs=len(cases) * len(self._conditions))

    def run(
        self, client: Client, *, timeout_s: float = TIMEOUT_S, on_result: Callable[[], None] = lambda: None
    ) -> Report:
        """Run all cases and return the report. If an error is raised, `report` still has all earlier results.

        timeout_s: the time for the cases of one call, at most 256, under all conditions.
        """
        for start, cases in _calls(self._cases):
            deadline = Deadline(timeout_s)
            for condition in self._conditions:
                owed = list(range(len(cases)))  # The indices of the cases without a result.
                while owed:  # A router ends a call that takes too long, so there may be more.
                    before = len(owed)
                    try:
                        for _ in self._call(client, cases, condition, owed, deadline, self._order_seed + start):
                            on_result()
                    except DeadlineError:
                        if len(owed) == before or not deadline.remaining_s:
                            raise
                    except OverloadedError as error:  # Another verification began between two of these calls.
                        if not self.report.runs or error.retry_after_s >= deadline.remaining_s:
                            raise
                        time.sleep(error.retry_after_s)
        return self.report

    def _call(
        self,
        client: Client,
        cases: Sequence[NamedCase],
        condition: Condition,
        owed: list[int],
        deadline: Deadline,
        order_seed: int,
    ) -> Iterator[VerifyResult]:
        """Make one call, for the cases that are owed under a condition. Yield each result once it is in the report.

        Raises DeadlineError if the router ended the call, or if no time is left for one.
        """
        indices = owed.copy()
        asked = [self._case(cases[index]) for index in indices]
        timeout_s = deadline.remaining_s
        if not timeout_s:
            raise DeadlineError(f"{len(owed)} cases have not been run under {condition.value} in time")
        for result in client.verify(asked, [condition], order_seed=order_seed, timeout_s=timeout_s):
            index = indices[result.case_index] if result.case_index < len(indices) else -1
            if index not in owed or result.condition is not condition:
                raise DataLossError(
                    f"the router answered case {result.case_index} under {result.condition.value}, which was not asked"
                )
            owed.remove(index)
            if result.receipt is not None:
                self.report.fingerprints.add(result.receipt.fingerprint)
                self._first.setdefault(cases[index], result)
            difference = _difference(cases[index], self._first.get(cases[index]), result)
            self.report.add(cases[index], condition, difference)
            yield result
        while owed:  # A case that was not run is not verified.
            self.report.add(cases[owed.pop(0)], condition, "the router gave no answer")

    def _case(self, named: NamedCase) -> VerifyCase:
        """Return the case to run next. It carries the output digest of its first run, which later calls must repeat."""
        first = self._first.get(named)
        if named.case.output_digest or first is None or first.receipt is None:
            return named.case
        return replace(named.case, output_digest=first.receipt.output_digest)


def _calls(cases: Sequence[NamedCase]) -> Iterator[tuple[int, list[NamedCase]]]:
    """Cut cases into parts that one call carries. Yield each part with the number of cases before it."""
    part: list[NamedCase] = []
    start = size = 0
    for number, named in enumerate(cases):
        bytes_of_it = codec.verify_request([named.case], ()).ByteSize()
        if part and (len(part) == CASES_PER_CALL or size + bytes_of_it > BYTES_PER_CALL):
            yield start, part
            part, start, size = [], number, 0
        part.append(named)
        size += bytes_of_it
    if part:
        yield start, part


def built_in_cases(status: ClusterStatus, count: int = BUILT_IN_CASES) -> list[NamedCase]:
    """Return prompts of token ids for any model: several lengths, greedy and seeded, with and without penalties.

    Raises UnavailableError if no node has joined, since the nodes tell the size of the vocabulary.
    """
    nodes = [node.node for node in status.nodes if node.state is not NodeState.REFUSED]
    if not nodes:
        raise UnavailableError("no node has joined, so the model is not known")
    vocab_size = min(node.vocab_size for node in nodes)
    max_model_len = min(node.max_model_len for node in nodes)
    max_tokens = min(_BUILT_IN_OUTPUT, max(1, max_model_len // 4))
    room = min(_MAX_PROMPT, max_model_len - max_tokens)
    found = []
    for index in range(count):
        length = 1 + (index * 37) % room
        stream = hashlib.shake_256(b"corun.verify" + struct.pack("<I", index)).digest(4 * length)
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.0)[index % 3],
            top_p=0.95 if index % 4 == 1 else 1.0,
            top_k=40 if index % 4 == 2 else 0,
            presence_penalty=0.5 if index % 4 == 3 else 0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        prompt = tuple(word % vocab_size for word in struct.unpack(f"<{length}I", stream))
        case = VerifyCase(prompt_token_ids=prompt, sampling_params=params, seed=1000 + index)
        found.append(NamedCase(name=f"built-in-{index}", case=case))
    return found


def _difference(named: NamedCase, first: VerifyResult | None, result: VerifyResult) -> str:
    """Return why a run is not as expected; empty if it is.

    first: the first result of the case. It is what is expected if the case has no receipt of its own.
    """
    if result.error:
        return f"failed: {result.error}"
    if result.receipt is None or first is None or first.receipt is None:
        return "the router gave no receipt"
    expected = named.receipt or first.receipt
    return next(_differences(named, expected, first, result, result.receipt), "")


def _differences(
    named: NamedCase, expected: Receipt, first: VerifyResult, result: VerifyResult, found: Receipt
) -> Iterator[str]:
    audit = named.audit
    is_as_audited = audit and (audit.output_digest, audit.finish_reason) == (found.output_digest, found.finish_reason)
    known = ", as the audit did" if is_as_audited else ""
    if not result.match or found.output_digest != expected.output_digest:
        yield f"expected {expected.output_digest}, got {found.output_digest}{known}"
    if found.fingerprint != expected.fingerprint:
        yield f"made under contract {expected.fingerprint}, run under {found.fingerprint}"
    if not result.text_digest:
        yield "the router gave no text_digest: it cannot be checked"
    for name, words in _SAME.items():
        was, now = (getattr(value, "value", value) for value in (getattr(expected, name), getattr(found, name)))
        if was != now:
            yield f"its {words} {was}, is {now}{known}"
    if result.text_digest != (named.text_digest or first.text_digest):
        yield "its text is not that of its tokens" if named.text_digest else "its text is another than it was first"
    if result.alternatives_digest != (named.alternatives_digest or first.alternatives_digest):
        yield "its top_logprobs are not those of the run"
