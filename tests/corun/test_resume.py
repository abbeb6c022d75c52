"""What a client takes for the continuation of a request, and what it asks for next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from corun.client.request import PreparedRequest, Resumption, prepare
from corun.client.routers import Deadline
from corun.completion import Chunk
from corun.errors import ContractMismatchError, DataLossError, UnavailableError
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.rpc import codec
from corun.types import Alternatives, FinishReason, ResumePoint
from tests.corun.fake_router import FailedCall, make_receipt

PARAMS = SamplingParams(max_tokens=9, n=2)
LOST = UnavailableError("router a:1: Socket closed")


def resumption(prepared: PreparedRequest | None = None) -> Resumption:
    return Resumption(prepared or prepare("x", PARAMS, None, "r"), Deadline(60), 1)


def chunk(*ids: int, **changes: Any) -> Chunk:
    plain = Chunk(
        request_id="r", sample_index=0, seed=7, text="é" * len(ids), token_ids=ids, logprobs=(-1.0,) * len(ids)
    )
    return replace(plain, **changes)


def last(*ids: int, tokens: list[tuple[int, float]], prompt: tuple[int, ...] = (), **changes: Any) -> Chunk:
    """The end of a sample whose receipt says these tokens, and what else is changed in the receipt."""
    receipt = make_receipt("r", 0, prompt=(120,), seed=7, params=PARAMS, tokens=tokens)
    end: dict[str, Any] = {"finish_reason": FinishReason.LENGTH, "prompt_token_ids": prompt}
    return chunk(*ids, **end, receipt=replace(receipt, **changes))


def test_it_asks_for_what_is_missing() -> None:
    rest = resumption()
    assert not rest.request().resume
    first = rest.take(chunk(1, 2, fingerprint="f" * 64, prompt_token_ids=(120,)))
    assert (first.fingerprint, first.prompt_token_ids, first.logprobs) == ("f" * 64, (120,), ())
    again = rest.take(chunk(3, fingerprint="f" * 64, prompt_token_ids=(120,)))
    assert (again.fingerprint, again.prompt_token_ids) == ("", ()), "what was told once is not told again"
    request = rest.request()
    assert (request.request_id, request.fingerprint, request.text) == ("r", "f" * 64, "x")
    digest = output_digest([1, 2, 3], [-1.0] * 3)
    point = ResumePoint(sample_index=0, seed=7, num_tokens=3, output_digest=digest, text_bytes=6)
    assert list(map(codec.resume_point_from_proto, request.resume)) == [point]
    rest.take(last(tokens=[(1, -1.0), (2, -1.0), (3, -1.0)]))
    assert codec.resume_point_from_proto(rest.request().resume[0]) == replace(point, done=True)
    assert not rest.is_whole


def test_requests_are_drawn_an_id_and_ask_for_what_checks_them() -> None:
    one, two = prepare("x", None, None, None), prepare("x", None, None, None)
    assert len({one.request.request_id, two.request.request_id, ""}) == 3
    assert one.request.sampling_params.logprobs
    assert not one.params.logprobs


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (last(2, tokens=[(1, -1.0), (2, -1.0)], tokens_digest="0" * 64), DataLossError, "its tokens digest is"),
        (chunk(2, seed=8), DataLossError, "began with seed 7 and went on with 8"),
        (chunk(2, logprobs=()), DataLossError, "0 log probabilities for 1 tokens"),
        (chunk(2, sample_index=2), DataLossError, "sample 2 of 2"),
        (chunk(2, prompt_token_ids=(121,)), DataLossError, "from another prompt"),
        (chunk(2, fingerprint="g"), ContractMismatchError, "under another contract"),
        (last(tokens=[(2, -1.0)]), DataLossError, "its output digest is"),
        (last(tokens=[(1, -1.0)], prompt_digest="0" * 64), DataLossError, "another prompt than the one sent"),
        (last(2, tokens=[(1, -1.0)]), DataLossError, "its number of tokens is 2"),
    ],
)
def test_what_does_not_continue_is_refused(wrong: Chunk, error: type[Exception], message: str) -> None:
    rest = resumption()
    rest.take(chunk(1, fingerprint="f", prompt_token_ids=(120,)))
    with pytest.raises(error, match=message):
        rest.take(wrong)


def test_nothing_follows_a_receipt() -> None:
    rest = resumption()
    rest.take(last(1, tokens=[(1, -1.0)], prompt=(120,)))
    with pytest.raises(DataLossError, match="went on after its end"):
        rest.take(chunk(2))
    with pytest.raises(DataLossError, match="before sample 1 did"):
        rest.finish()


def test_delays_grow_until_output_comes() -> None:
    rest, broken = resumption(), FailedCall(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    delays = [rest.retry_s(broken, LOST) for _ in range(4)]
    assert 0 < delays[0] <= 0.05
    assert delays[3] > delays[0]
    rest.take(chunk(1))
    assert rest.retry_s(broken, LOST) <= 0.05


def test_time_at_a_router_is_not_time_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may wait at a router for a minute, without output, after an earlier connection broke."""
    now = 100.0
    monkeypatch.setattr("corun.client.request.time.monotonic", lambda: now)
    rest, broken = resumption(), FailedCall(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # It may take 1 s.
    rest.request()
    rest.retry_s(broken, LOST)
    rest.request()
    now += 55
    assert rest.retry_s(broken, LOST) > 0
    rest.request()
    now += 0.4
    rest.retry_s(broken, LOST)
    rest.request()
    now += 0.7
    with pytest.raises(UnavailableError):
        rest.retry_s(broken, LOST)


@pytest.mark.parametrize(
    ("tops", "says"),
    [
        ((), "0 times top_logprobs for 1 tokens"),  # A router of an older version sends none.
        ((Alternatives(),), "0 top_logprobs of 2"),
        ((Alternatives((1, 2, 3), (-1.0, -2.0, -3.0), ("a", "b", "c")),), "3 top_logprobs of 2"),
        ((Alternatives((1, 2), (-1.0,), ("a", "b")),), "2 top_logprobs of 2"),
        ((Alternatives((2, 1), (-0.5, -1.5), ("a", "b")),), "two log probabilities of token 1"),
    ],
)
def test_alternatives_that_are_not_those_of_the_tokens_are_data_loss(tops: tuple[Alternatives, ...], says: str) -> None:
    params = SamplingParams(logprobs=True, top_logprobs=2)
    good = (Alternatives((2, 1), (-0.5, -1.0), ("a", "b")), Alternatives((9,), (-0.5,), ("a",)))
    rest = resumption(prepare("x", params, None, "r"))
    taken = rest.take(chunk(1, 1, token_texts=("", ""), fingerprint="f" * 64, top_logprobs=good))
    assert taken.top_logprobs == good
    with pytest.raises(DataLossError, match=says):
        rest.take(chunk(1, token_texts=("",), top_logprobs=tops))
