"""Rules of the contract that the router keeps, each broken on purpose: the same check is green with and red without it.

The rules that engines keep are broken in tests/e2e/test_breaking.py, those of the schedulers (against the stock one) in
tests/prefill_node/test_scheduler.py and tests/decode_node/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from corun.errors import CorunError, DataLossError
from corun.params import SamplingParams
from corun.rpc import codec
from corun.testing.engines import expected
from corun.types import ResumePoint
from router import request
from router.output import SampleOutput
from tests.clusters import cluster, generate, send
from tests.router.asking import started

PARAMS = SamplingParams(max_tokens=60, logprobs=True)
PROMPT = (5, 6, 7)


async def neighbouring_seeds_differ(model: str) -> bool:
    """Rule 6: the samples of seed s share nothing with a request of seed s + 1."""
    async with cluster(model) as fake:
        samples = await generate(fake, PROMPT, replace(PARAMS, n=4), seed=9)
        drawn = {tuple(sample.token_ids) for sample in samples}
        others = [await generate(fake, PROMPT, PARAMS, seed=9 + i) for i in range(1, 5)]
        return not any(tuple(other.token_ids) in drawn for (other,) in others)


async def stream_over_a_lying_node_is_right(model: str) -> bool:
    """Rule 7: a stream that goes on elsewhere is the one right stream, or an error."""
    async with cluster(model, decodes=2) as fake:
        run = started(fake, PROMPT, PARAMS, seed=8)
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 10)
        fake.nodes[2].engine.corrupt = True
        await fake.nodes[1].kill()
        try:
            (output,) = await run
        except CorunError:
            return True
        ids, logprobs, _ = expected(PROMPT, PARAMS, 8)
        return (output.token_ids, output.logprobs) == (ids, logprobs)


async def what_was_never_sent_is_not_continued(model: str) -> bool:
    """Rule 7: a client that comes back with other bits than the cluster's gets an error, not the rest of another."""
    async with cluster(model) as fake:
        point = ResumePoint(sample_index=0, seed=8, num_tokens=3, output_digest="0" * 64, text_bytes=0)
        request = codec.generate_request(PROMPT, PARAMS, seed=8, request_id="r")
        try:
            await send(fake, codec.resumed_request(request, [point], ""))
        except DataLossError:
            return True
        return False


RULES: dict[str, tuple[Callable[[str], Awaitable[bool]], Any, str, Any]] = {
    # vLLM's own rule for n > 1.
    "seeds": (neighbouring_seeds_differ, request, "sample_seed", lambda seed, i: seed + i),
    "prefix": (stream_over_a_lying_node_is_right, SampleOutput, "_is_different", lambda output, at, record: False),
    "digest": (what_was_never_sent_is_not_continued, SampleOutput, "_check_received", lambda output: None),
}
"""What each rule keeps right, and what breaks the rule."""


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("rule", RULES)
async def test_a_rule_keeps_it_right_and_nothing_else(
    model: str, rule: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_right, owner, name, without = RULES[rule]
    if broken:
        monkeypatch.setattr(owner, name, without)
    assert await is_right(model) is not broken
