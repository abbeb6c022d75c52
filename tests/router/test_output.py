from __future__ import annotations

import asyncio
import struct

import pytest

from corun.errors import DataLossError, UnavailableError
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.types import FinishReason, ResumePoint
from router.output import Outbox, Piece, SampleOutput

WAIT_S = 30.0


class Letters:
    """Token i is the i-th letter; letters come one token late, as an unfinished character would."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        out, self.held = self.held, chr(ord("a") + token_id)
        return out

    def flush(self) -> str:
        return self.held


def make(params: SamplingParams | None = None) -> tuple[SampleOutput, Outbox]:
    outbox = Outbox()
    params = params or SamplingParams(max_tokens=100)
    return SampleOutput(sample_index=0, seed=7, params=params, detokenizer=Letters(), outbox=outbox), outbox


def fp32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


async def drain(outbox: Outbox) -> Piece:
    (piece,) = await asyncio.wait_for(outbox.take(), WAIT_S)
    return piece


async def test_tokens_merge_until_they_are_taken() -> None:
    output, outbox = make()
    assert not output.take(0, -0.5)
    assert not output.take(1, -1.5)
    piece = await drain(outbox)
    assert (piece.text, piece.token_ids, piece.logprobs, piece.seed) == ("a", [0, 1], [-0.5, -1.5], 7)
    output.take(2, -2.5)
    assert (await drain(outbox)).token_ids == [2]
    assert output.end(FinishReason.LENGTH) is FinishReason.LENGTH
    assert (await drain(outbox)).text == "c"
    assert output.hexdigest() == output_digest([0, 1, 2], [-0.5, -1.5, -2.5])


async def test_a_repeated_run_delivers_only_what_is_new() -> None:
    output, outbox = make()
    for token in (3, 4):
        output.take(token, fp32(-0.1 * token))
    await drain(outbox)
    output.restart()
    for token in (3, 4, 5):
        assert not output.take(token, fp32(-0.1 * token))
    assert (await drain(outbox)).token_ids == [5]
    output.end(FinishReason.LENGTH)
    assert output.num_tokens == 3
    assert output.hexdigest() == output_digest([3, 4, 5], [fp32(-0.1 * t) for t in (3, 4, 5)])


@pytest.mark.parametrize(("token", "logprob"), [(4, -0.5), (3, -0.25), (3, -0.5000001)])
def test_one_other_bit_is_data_loss(token: int, logprob: float) -> None:
    output, _ = make()
    output.take(1, -1.0)
    output.take(3, -0.5)
    output.restart()
    assert not output.take(1, -1.0)
    assert output.take(token, fp32(logprob))  # Ends the run.
    with pytest.raises(DataLossError, match="differs at token 1"):
        output.end(FinishReason.STOP)


def test_bits_are_compared_not_values() -> None:
    output, _ = make()
    output.take(1, 0.0)
    output.restart()
    assert output.take(1, -0.0)


def test_a_repeated_run_that_ends_early_is_data_loss() -> None:
    output, _ = make()
    output.take(1, -1.0)
    output.take(2, -1.0)
    output.restart()
    output.take(1, -1.0)
    with pytest.raises(DataLossError, match="ended after 1 of 2"):
        output.end(FinishReason.LENGTH)


async def test_a_stop_string_ends_the_sample_at_the_token_that_completes_it() -> None:
    output, outbox = make(SamplingParams(stop=["cd"], max_tokens=100))
    assert [output.take(token, -1.0) for token in range(5)] == [False, False, False, False, True]
    assert output.end(FinishReason.STOP) is FinishReason.STOP
    piece = await drain(outbox)
    assert (piece.text, piece.token_ids) == ("ab", [0, 1, 2, 3, 4])


async def test_a_stop_string_in_the_last_text_still_cuts() -> None:
    output, outbox = make(SamplingParams(stop=["cd"], max_tokens=4))
    assert not any(output.take(token, -1.0) for token in range(4))
    assert output.end(FinishReason.LENGTH) is FinishReason.STOP
    assert (await drain(outbox)).text == "ab"


async def test_no_stop_string_before_min_tokens() -> None:
    output, outbox = make(SamplingParams(stop=["b"], min_tokens=3, max_tokens=100))
    assert not any(output.take(token, -1.0) for token in (0, 1, 2))
    assert [output.take(token, -1.0) for token in (1, 0)] == [False, True]
    output.end(FinishReason.STOP)
    assert (await drain(outbox)).text == "abc"


async def test_stop_tokens_have_no_text() -> None:
    output, outbox = make(SamplingParams(stop_token_ids=[9], max_tokens=100))
    output.take(0, -1.0)
    output.take(9, -1.0)
    output.end(FinishReason.STOP)
    piece = await drain(outbox)
    assert (piece.text, piece.token_ids) == ("a", [0, 9])


async def test_texts_of_tokens_are_kept_if_they_are_asked_for() -> None:
    """Each token has the text that it completes, whatever is held back for a stop string or cut off by one."""
    outbox, params = Outbox(), SamplingParams(max_tokens=100, stop=["cde"], stop_token_ids=[25])
    output = SampleOutput(
        sample_index=0, seed=7, params=params, detokenizer=Letters(), outbox=outbox, with_token_texts=True
    )
    for token_id in (0, 1, 2, 3):
        assert not output.take(token_id, -1.0)
    piece = await drain(outbox)
    assert (piece.text, piece.token_texts) == ("ab", ["", "a", "b", "c"])
    assert not output.take(4, -1.0)
    assert output.take(5, -1.0)
    piece = await drain(outbox)
    assert (piece.text, piece.token_texts) == ("", ["d", "e"])
    other, outbox = make()
    other.take(0, -1.0)
    assert (await drain(outbox)).token_texts is None


async def test_a_failure_reaches_whoever_takes_and_the_first_counts() -> None:
    outbox = Outbox()
    outbox.piece(0, 1)
    outbox.fail(UnavailableError("first"))
    outbox.fail(UnavailableError("second"))
    with pytest.raises(UnavailableError, match="first"):
        await outbox.take()


async def test_samples_of_a_request_have_their_own_pieces() -> None:
    outbox = Outbox()
    for index in (2, 0, 2):
        outbox.piece(index, index).token_ids.append(index)
    assert [(p.sample_index, p.token_ids) for p in await outbox.take()] == [(2, [2, 2]), (0, [0])]


async def test_who_listens_is_told_of_every_token_text_end_and_error() -> None:
    output, outbox = make()
    heard: list[tuple[str, list[int]]] = []

    def listen() -> None:
        heard.extend((piece.text, piece.token_ids) for piece in outbox.take_now())

    outbox.ready = listen
    output.take(0, -1.0)
    output.take(1, -1.0)
    output.end(FinishReason.LENGTH)
    assert heard == [("", [0]), ("a", [1]), ("b", [])]
    assert outbox.take_now() == ()
    outbox.ready = None
    outbox.fail(UnavailableError("late"))
    with pytest.raises(UnavailableError, match="late"):
        outbox.take_now()


async def test_a_take_that_is_cancelled_leaves_the_output_to_the_next() -> None:
    output, outbox = make()
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    output.take(3, -1.0)
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert (await drain(outbox)).token_ids == [3]


def test_after_a_resumption_a_token_and_its_text_come_together() -> None:
    outbox, heard = Outbox(), []
    received = ResumePoint(
        sample_index=0, seed=7, num_tokens=1, output_digest=output_digest([0], [-1.0]), text_bytes=0, done=False
    )
    params = SamplingParams(max_tokens=100)
    output = SampleOutput(
        sample_index=0, seed=7, params=params, detokenizer=Letters(), outbox=outbox, received=received
    )
    outbox.ready = lambda: heard.extend((piece.text, piece.token_ids) for piece in outbox.take_now())
    for token in (0, 1, 2):
        output.take(token, -1.0)
    assert heard == [("a", [1]), ("b", [2])]
