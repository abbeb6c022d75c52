"""Assaults and their judgement without engines: each is answered with a typed error, and what hurts others is found."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE
from corun_bench.children import Processes
from tests.clusters import cluster
from tests.fuzz import assaults
from tests.fuzz.assaults import ASSAULTS, draw, victim
from tests.fuzz.beside import SLOWER_S, Report, Siege
from tests.fuzz.target import PATIENT
from tests.gateway.serving import serving
from tests.nodes import Nodes, Topology

CALM: dict[str, Any] = {
    "way": "grpc",
    "at": 0.0,
    "first_s": 0.1,
    "longest_pause_s": 0.05,
    "before_message": 2,
    "paused_until": 10.0,
    "seconds": 1.0,
    "equal": True,
    "error": "",
}
ENDED = time.strftime("%X", time.localtime(CALM["at"]))
PAUSED = f"paused for up to 0.3 s, more than 0.150 s: before message 2, ended at {ENDED}"
FINE = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "left"}
FINE |= {"HTTP 200", "HTTP 400", "HTTP 401", "HTTP 408", "HTTP 413", "HTTP 429", "HTTP ClientOSError"}
"""A server that closes a connection in the middle of a large body is a ClientOSError for whoever still sends it."""


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_every_assault_is_answered_with_a_typed_error(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assaults, "_SIZES", (1000, 200_000))
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN}
    answers: dict[str, str] = {}
    async with cluster(model, **PATIENT) as fake, serving(fake) as http:
        async with victim(fake.address, http.gateway.url, **sizes) as target:
            for number in range(100):
                kind, rng = draw(1, number)
                answers[f"{kind} {number}"] = await ASSAULTS[kind][1](target, rng)
        await fake.idle()
    assert {kind.rpartition(" ")[0] for kind in answers} >= set(ASSAULTS) - {"http slow", "slow reader", "flood"}
    assert {kind: answer for kind, answer in answers.items() if answer not in FINE} == {}


def test_an_assault_is_drawn_from_its_number() -> None:
    def drawn(number: int) -> tuple[str, float]:
        kind, rng = draw(3, number)
        return kind, rng.random()

    assert [drawn(number) for number in range(500)] == [drawn(number) for number in range(500)]
    assert {drawn(number)[0] for number in range(500)} == set(ASSAULTS)


@pytest.mark.parametrize(
    ("told", "line", "found"),
    [
        ({}, "12:00 INFO fine", ""),
        ({"longest_pause_s": CALM["longest_pause_s"] + SLOWER_S / 2}, "", ""),
        (
            {"longest_pause_s": 0.3},
            "",
            f"1 streams over grpc {PAUSED}; beside the longest: flood 2, text 3",
        ),
        ({"equal": False}, "", "a stream over grpc has other bits"),
        ({"equal": False, "error": "UnavailableError: x"}, "", "a stream over grpc UnavailableError: x"),
        (None, "", "2 streams in calm and 0 beside the assaults: nothing was compared"),
        *(
            ({}, line, f"in the log of router: {line}")
            for line in (
                "12:00 WARNING router.nodes.registry: node d0@1 is lost: no heartbeat for 5 s",
                "12:00 WARNING router.sample: an attempt of sample 0 of request 'x' failed: d0: ...",
                "12:00 ERROR corun.rpc.interceptor: internal error 1234 in Generate",
            )
        ),
    ],
)
def test_what_became_of_others_is_judged(tmp_path: Path, told: dict[str, Any] | None, line: str, found: str) -> None:
    """What the log said before the siege began is no finding."""
    log = tmp_path / "router.log"
    log.write_text("Traceback (most recent call last):\n")
    nothing: Any = None
    nodes = Nodes(Topology(model="tiny"), Processes(tmp_path, running={"router": nothing}))
    siege = Siege(nodes, nothing, nothing, Report(seed=1, minutes=0.0))
    with log.open("a") as more:
        more.write(f"{line}\n")
    siege._assaulted = [(5.0, 8.0, "wide 1"), (6.0, 8.9, "flood 2"), (9.9, 30.0, "text 3"), (10.1, 11.0, "ids 4")]
    siege._judge([CALM, CALM], [] if told is None else [CALM, CALM | told])
    assert siege.report.findings == ([found] if found else [])
