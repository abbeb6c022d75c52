from __future__ import annotations

from typing import Any

import pytest

from corun.errors import InternalError
from corun_bench.driver import Outcome, Request
from corun_bench.engines import IndependentEngines, PlainProxy
from tests.bench.targets import FakeEngine

REQUEST = Request(index=0, prompt_token_ids=(1, 2), max_tokens=9, seed=5)


async def test_each_request_goes_to_the_least_busy_engine() -> None:
    engines: Any = [FakeEngine("a"), FakeEngine("b")]
    target = IndependentEngines(engines)
    for _ in range(4):
        await target.run(Outcome(request=REQUEST), logprobs=False)
    assert [len(engine.asked) for engine in engines] == [2, 2]


async def test_the_proxy_prefills_one_token_and_hands_on_what_prefill_says() -> None:
    prefill, decode = FakeEngine("p", {"remote_engine_id": "p"}), FakeEngine("d")
    found = Outcome(request=REQUEST)
    await PlainProxy([prefill], [decode]).run(found, logprobs=True)  # type: ignore[list-item]
    (name, first, wanted), (same, second, handed) = prefill.asked[0], decode.asked[0]
    assert name == same
    assert (first["max_tokens"], first["seed"], second["max_tokens"], second["logprobs"]) == (1, 5, 9, 0)
    assert wanted is not None
    assert wanted["do_remote_decode"]
    assert handed == {"remote_engine_id": "p"}
    assert len(found.arrivals) == 1  # of decode alone
    with pytest.raises(InternalError, match="p gave no transfer parameters"):
        await PlainProxy([FakeEngine("p")], [decode]).run(found, logprobs=False)  # type: ignore[list-item]
