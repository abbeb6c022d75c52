"""Matchers and their limits; masks of rows; constraints that are tried in a process of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corun.errors import InvalidArgumentError, OverloadedError
from corun.models import tiny
from tests.loading import load

pytest.importorskip("llguidance")
torch = pytest.importorskip("torch")

from decode_node import grammar  # noqa: E402

VOCAB, END = 512, 509


@pytest.fixture(scope="module")
def path() -> Path:
    return tiny.ensure() / "tokenizer.json"


@pytest.fixture(scope="module")
def tokens(path: Path) -> Any:
    return grammar.tokenizer(path, VOCAB, [END])


def allowed(matcher: grammar.Matcher) -> set[int]:
    masks = np.zeros((2, VOCAB // 32), dtype=np.int32)
    matcher.fill(masks, 1)
    assert not masks[0].any()  # It writes to its own row only.
    return set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist())


def written(tokens: Any, matcher: grammar.Matcher) -> str:
    """Draw the lowest token each time that leads on, until only the end is left."""
    text: list[int] = []
    while (found := allowed(matcher)) != {END}:
        token = min(found - {END})
        assert matcher.accept(token)
        text.append(token)
    return str(tokens.decode_str(text))


def test_a_matcher_leads_to_an_output_of_its_kind_and_to_the_end_token_only_then(tokens: Any) -> None:
    assert written(tokens, grammar.Matcher(tokens, "regex", "[b-f]{3}")) == "bbb"
    texts = ['a"\n', "é b", "zz"]
    assert written(tokens, grammar.Matcher(tokens, "choice", json.dumps(texts))) in texts
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}
    assert written(tokens, grammar.Matcher(tokens, "grammar", 'root ::= "(" b ")"\nb ::= "x"')) == "(x)"
    matcher = grammar.Matcher(tokens, "json", json.dumps(schema))
    assert END not in allowed(matcher)
    assert not matcher.accept(END)


def test_what_is_too_ambiguous_ends_with_a_finding_and_not_with_the_end_token(tokens: Any) -> None:
    text = 'start: a\na: a a a | b a c | "x" | "xx" | ""\nb: a a | "y"\nc: a b | c c | "x"'
    matcher = grammar.Matcher(tokens, "grammar", text)
    for _ in range(400):
        found = allowed(matcher)
        if matcher.finding:
            break
        if not matcher.accept(min(found - {END})):
            allowed(matcher)
            break
    assert "cannot be followed" in matcher.finding or "processor time" in matcher.finding
    assert len(allowed(matcher)) == VOCAB  # The token that is drawn is thrown away.
    assert not matcher.accept(5)


REFUSED = (
    ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("regex", "((", "regex"),
    ("regex", r"[^\s\S]", "cannot be followed"),
    ("grammar", "root :==", "grammar"),
    (
        "json",
        json.dumps({"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 9967, 9949, 9941)]}),
        grammar.TOO_MUCH,
    ),
)


def test_trials_refuse_what_cannot_be_read_and_go_on(path: Path) -> None:
    async def main() -> None:
        trials = grammar.Trials(path, VOCAB, [END])
        try:
            for kind, text, words in REFUSED:
                with pytest.raises(InvalidArgumentError) as caught:
                    await trials.check(kind, text)
                assert words in caught.value.limit
                await trials.check("regex", f"a+{len(text)}")
        finally:
            await trials.close()

    asyncio.run(main())


def test_waiting_for_other_trials_is_no_fault_of_the_node(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An UnavailableError would take the node from everybody until its next heartbeat."""
    monkeypatch.setattr(grammar, "ANSWER_S", 0.01)

    async def main() -> None:
        trials = grammar.Trials(path, VOCAB, [END])
        async with trials._turn:
            with pytest.raises(OverloadedError, match="others came first"):
                await trials.check("regex", "a")
        await trials.close()

    asyncio.run(main())


def test_without_end_tokens_or_a_tokenizer_nothing_is_tried(path: Path) -> None:
    for trials in (grammar.Trials(path, VOCAB, []), grammar.Trials(path / "none", VOCAB, [END])):
        with pytest.raises(InvalidArgumentError, match="end token"):
            asyncio.run(trials.check("regex", "a"))


@pytest.fixture
def masks() -> Any:
    return load("decode_node.masks")


def test_a_mask_changes_its_own_row_only(masks: Any) -> None:
    """The control is the mask under another row's name."""
    logits = torch.zeros(4, 70)
    words = np.array([[5, 0, 1 << 3]], dtype=np.int32)
    output = SimpleNamespace(structured_output_request_ids=["b"], grammar_bitmask=words)
    masked, control = logits.clone(), logits.clone()
    masks.mask_rows(masked, ["a", "b"], output)
    masks.mask_rows(control, ["b", "a"], output)
    assert masked[1].isfinite().nonzero().flatten().tolist() == [0, 2, 67]
    assert torch.equal(masked[[0, 2, 3]], logits[[0, 2, 3]])
    assert not torch.equal(control[[0, 2, 3]], logits[[0, 2, 3]])


def test_a_sample_that_takes_long_for_each_token_ends(tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are within all limits on work, but the step of everybody waits for them."""
    clock = iter(range(1000))
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock) * 0.01)
    matcher = grammar.Matcher(tokens, "regex", "a*")
    drawn = 0
    while END in allowed(matcher) and not matcher.finding:
        assert matcher.accept(tokens.tokenize_str("a")[0])
        drawn += 1
    assert 1 < drawn < 20
    assert "0.005 s of processor time" in matcher.finding
