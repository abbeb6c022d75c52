"""What `corun verify` sends in one call."""

from __future__ import annotations

import pytest

from corun.cli import verify_report
from corun.params import SamplingParams
from corun.records.verification import NamedCase, VerifyCase
from corun.rpc import codec


def named(number: int, prompt_tokens: int = 3) -> NamedCase:
    prompt = (70_000,) * prompt_tokens  # Three bytes each.
    case = VerifyCase(prompt_token_ids=prompt, sampling_params=SamplingParams(), seed=number)
    return NamedCase(name=str(number), case=case)


@pytest.mark.parametrize(
    ("prompts", "sizes"),
    [([3] * 600, [256, 256, 88]), ([100_000] * 20, [6, 6, 6, 2]), ([3, 2_000_000, 3], [1, 1, 1]), ([], [])],
)
def test_a_call_carries_so_many_cases_and_bytes(prompts: list[int], sizes: list[int]) -> None:
    cases = [named(number, tokens) for number, tokens in enumerate(prompts)]
    parts = list(verify_report._calls(cases))
    assert [len(part) for _, part in parts] == sizes
    assert [case for _, part in parts for case in part] == cases
    assert [start for start, _ in parts] == [sum(sizes[:number]) for number in range(len(sizes))]
    for _, part in parts:
        size = codec.verify_request([each.case for each in part], ()).ByteSize()
        assert len(part) == 1 or size <= verify_report.BYTES_PER_CALL
