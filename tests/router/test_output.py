from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from corun.errors import DataLossError, OverloadedError, UnavailableError
from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.types import FinishReason, ResumePoint
from router.output import Outbox, Piece, SampleOutput


class Letters:
    """Token i is the i-th letter; letters come one token late, as an unfinished character would."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        out, self.held = self.held, chr(ord("a") + token_id)
        return out

    def flush(self) -> str:
        return self.held


def make(received: ResumePoint | None = None, texts: bool = False, **params: object) -> tuple[SampleOutput, Outbox]:
    outbox, made = Outbox(), SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
    output = SampleOutput(
        sample_index=0,
        seed=7,
        params=made,
        detokenizer=Letters(),
        outbox=outbox,
        received=received,
        with_token_texts=texts,
    )
    return output, outbox


def fp32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def drain(outbox: Outbox) -> Piece:
    (piece,) = outbox.take()
    return piece


def test_a_repeated_run_delivers_only_what_is_new() -> None:
    output, outbox = make()
    for token in (3, 4):
        output.take(token, fp32(-0.1 * token))
    drain(outbox)
    output.restart()
    for token in (3, 4, 5):
        assert not output.take(token, fp32(-0.1 * token))
    assert drain(outbox).token_ids == [5]
    output.end(FinishReason.LENGTH)
    assert output.num_tokens == 3
    assert output.hexdigest() == output_digest([3, 4, 5], [fp32(-0.1 * t) for t in (3, 4, 5)])


@pytest.mark.parametrize("texts", [True, False])
def test_a_repeated_run_ends_at_the_stop_string_of_the_one_before(texts: bool) -> None:
    """As when the call that started the first run failed after the last row of it had come."""
    output, outbox = make(stop=("c",), texts=texts)
    assert [output.take(token, -1.0) for token in (1, 2, 3)] == [False, False, True]
    output.restart()
    assert [output.take(token, -1.0) for token in (1, 2, 3)] == [False, False, True]
    assert output.end(FinishReason.LENGTH) is FinishReason.STOP
    piece = drain(outbox)
    assert (piece.token_ids, piece.text, output.node_reason) == ([1, 2, 3], "b", None)


@pytest.mark.parametrize(
    ("first", "again", "says"),
    [
        ((3, -0.5), (4, -0.5), "differs at token 1"),
        ((3, -0.5), (3, -0.25), "differs at token 1"),
        ((3, -0.5), (3, fp32(-0.5000001)), "differs at token 1"),
        ((3, 0.0), (3, -0.0), "differs at token 1"),  # Bits are compared, not values.
        ((3, -0.5), None, "ended after 1 of 2"),
    ],
)
def test_one_other_bit_is_data_loss(first: tuple[int, float], again: tuple[int, float] | None, says: str) -> None:
    output, _ = make()
    for token in ((1, -1.0), first):
        output.take(*token)
    output.restart()
    assert not output.take(1, -1.0)
    assert again is None or output.take(*again), "it ends the run"
    with pytest.raises(DataLossError, match=says):
        output.end(FinishReason.STOP)


@pytest.mark.parametrize(
    ("params", "tokens", "ended", "reason", "text"),
    [
        ({"stop": ["cd"]}, range(5), True, FinishReason.STOP, "ab"),  # At the token that completes it.
        ({"stop": ["cd"], "max_tokens": 4}, range(4), False, FinishReason.STOP, "ab"),  # In the text held back.
        ({"stop": ["b"], "min_tokens": 3}, (0, 1, 2, 1, 0), True, FinishReason.STOP, "abc"),  # Not before min_tokens.
        ({"stop_token_ids": [9]}, (0, 9), False, FinishReason.LENGTH, "a"),  # A stop token has no text.
    ],
)
def test_where_text_stops(
    params: dict[str, object], tokens: Sequence[int], ended: bool, reason: FinishReason, text: str
) -> None:
    output, outbox = make(**params)
    assert [output.take(token, -1.0) for token in tokens] == [False] * (len(tokens) - 1) + [ended]
    assert output.end(FinishReason.LENGTH) is reason
    piece = drain(outbox)
    assert (piece.text, piece.token_ids) == (text, list(tokens))


def test_texts_of_tokens_are_kept_if_they_are_asked_for() -> None:
    """Each token has the text that it completes, whatever is held back for a stop string or cut off by one."""
    output, outbox = make(texts=True, stop=["cde"], stop_token_ids=[25])
    for token_id in (0, 1, 2, 3):
        assert not output.take(token_id, -1.0)
    piece = drain(outbox)
    assert (piece.text, piece.token_texts) == ("ab", ["", "a", "b", "c"])
    assert not output.take(4, -1.0)
    assert output.take(5, -1.0)
    piece = drain(outbox)
    assert (piece.text, piece.token_texts) == ("", ["d", "e"])
    other, outbox = make()
    other.take(0, -1.0)
    assert drain(outbox).token_texts is None


def test_a_failure_reaches_whoever_takes_and_the_first_counts() -> None:
    outbox = Outbox()
    outbox.piece(0, 1)
    outbox.fail(UnavailableError("first"))
    outbox.fail(UnavailableError("second"))
    with pytest.raises(UnavailableError, match="first"):
        outbox.take()


def test_an_outbox_is_bounded() -> None:
    outbox, told = Outbox(3), []
    outbox.overflowed = lambda: told.append(True)
    for number in range(3):
        outbox.add(number % 2, 7, number, -1.0)
    assert [(piece.sample_index, piece.token_ids) for piece in outbox.take()] == [(0, [0, 2]), (1, [1])]
    for number in range(9):
        outbox.add(0, 7, number, -1.0)
    assert told == [True]
    with pytest.raises(OverloadedError, match="3 tokens wait for the client, as many as may"):
        outbox.take()


def listen(outbox: Outbox) -> list[tuple[str, list[int]]]:
    heard: list[tuple[str, list[int]]] = []
    outbox.ready = lambda: heard.extend((piece.text, piece.token_ids) for piece in outbox.take())
    return heard


def test_who_listens_is_told_of_every_token_text_end_and_error() -> None:
    output, outbox = make()
    heard = listen(outbox)
    output.take(0, -1.0)
    output.take(1, -1.0)
    output.end(FinishReason.LENGTH)
    assert heard == [("", [0]), ("a", [1]), ("b", [])]
    assert outbox.take() == ()
    with pytest.raises(UnavailableError, match="late"):
        outbox.fail(UnavailableError("late"))


def test_after_a_resumption_a_token_and_its_text_come_together() -> None:
    digest = output_digest([0], [-1.0])
    output, outbox = make(ResumePoint(sample_index=0, seed=7, num_tokens=1, output_digest=digest, text_bytes=0))
    heard = listen(outbox)
    for token in (0, 1, 2):
        output.take(token, -1.0)
    assert heard == [("a", [1]), ("b", [2])]
