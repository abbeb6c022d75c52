"""Matchers and their limits; masks of rows; constraints that are tried in a process of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
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
    assert "cannot be followed" in matcher.finding
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


@pytest.fixture
async def trials(path: Path, request: pytest.FixtureRequest) -> AsyncIterator[grammar.Trials]:
    """Trials for the tiny model, or for one with another number of tokens and another end."""
    vocab_size, end = getattr(request, "param", (VOCAB, END))
    made = grammar.Trials(path, vocab_size, [end])
    yield made
    await made.close()


async def test_trials_refuse_what_cannot_be_read_and_go_on(trials: grammar.Trials) -> None:
    for kind, text, words in REFUSED:
        with pytest.raises(InvalidArgumentError) as caught:
            await trials.check(kind, text)
        assert words in caught.value.limit
        await trials.check("regex", f"a+{len(text)}")


async def test_samples_that_come_together_have_one_trial(
    trials: grammar.Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def count(_: object, kind: str, text: str) -> str:
        tried.append((kind, text))
        await asyncio.sleep(0)
        return ""

    monkeypatch.setattr(grammar._Child, "tried", count)
    await asyncio.gather(*(trials.check("regex", "a") for _ in range(20)))
    assert tried == [("regex", "a")]


async def test_waiting_for_other_trials_is_no_fault_of_the_node(
    trials: grammar.Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An UnavailableError would take the node from everybody until its next heartbeat."""
    monkeypatch.setattr(grammar, "ANSWER_S", 0.01)
    for _ in range(grammar.PROCESSES):
        await trials._turns.acquire()
    with pytest.raises(OverloadedError, match="others came first"):
        await trials.check("regex", "a")


async def test_one_that_takes_long_holds_up_no_other_alone(
    trials: grammar.Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that leaves ends no trial that another waits for, and gives a process back when its own has ended."""
    long, used = asyncio.Event(), list[object]()

    async def tried(child: object, kind: str, text: str) -> str:
        used.append(child)
        if text == "long":
            await long.wait()
        return ""

    monkeypatch.setattr(grammar._Child, "tried", tried)
    waiting = [asyncio.ensure_future(trials.check("regex", "long")) for _ in range(2)]
    await asyncio.sleep(0)
    for number in range(3):
        await trials.check("regex", f"short {number}")
    waiting[0].cancel()
    await asyncio.sleep(0)
    long.set()
    await waiting[1]
    await trials.check("regex", "last")
    assert len(used) == 5
    assert used[0] not in used[1:4]
    assert len(trials._idle) == grammar.PROCESSES


async def test_without_end_tokens_or_a_tokenizer_nothing_is_tried(path: Path) -> None:
    for trials in (grammar.Trials(path, VOCAB, []), grammar.Trials(path / "none", VOCAB, [END])):
        with pytest.raises(InvalidArgumentError, match="end token"):
            await trials.check("regex", "a")


@pytest.fixture
def masks() -> Any:
    return load("decode_node.masks")


@pytest.mark.parametrize("trials", [(151936, 151645)], indirect=True)
async def test_a_tokenizer_without_the_models_end_token_ends_no_node_and_refuses_constraints(
    path: Path, trials: grammar.Trials, masks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs.regex.*tokenizer.json does not serve"):
        await trials.check("regex", "a")
    model = SimpleNamespace(model=path.parent, get_vocab_size=lambda: 151936)
    monkeypatch.setattr(masks, "eos_token_ids", lambda _: (151645,))
    assert masks.MaskBackend(SimpleNamespace(model_config=model)).tokenizer is None


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


@pytest.mark.parametrize("text", [f"start: <[{END}]>", f'start: "a" <[{END}]> "b"'])
def test_an_end_token_of_a_grammars_own_is_never_allowed(tokens: Any, text: str) -> None:
    """It would end the sample before its output is complete."""
    matcher = grammar.Matcher(tokens, "grammar", text)
    while not matcher.finding:
        found = allowed(matcher)
        assert matcher.finding or END not in found
        assert matcher.finding or matcher.accept(min(found))
    assert "too early" in matcher.finding


def test_what_is_complete_ends_with_the_end_token(tokens: Any) -> None:
    matcher = grammar.Matcher(tokens, "regex", "a")
    (token,) = tokens.tokenize_str("a")
    assert END not in allowed(matcher)
    assert matcher.accept(token)
    assert allowed(matcher) == {END}
    assert matcher.accept(END)


def test_words_of_an_error_are_few(tokens: Any) -> None:
    for schema in ({"type": "é" * 30_000}, {"$ref": "é" * 30_000}):
        assert len(grammar.trial(tokens, "json", json.dumps(schema, ensure_ascii=False))) < 400


def test_a_token_that_leads_beyond_the_limits_ends_the_sample_with_a_finding(tokens: Any, masks: Any) -> None:
    """The mask allows a digit; behind it, the matcher would have too many ways to go on."""
    findings: dict[str, str] = {}
    many = "start: " + " | ".join(f'"{k}"' for k in range(3000))
    row = masks.RowGrammar(grammar.Matcher(tokens, "grammar", many), findings, 0.0)
    (digit,) = tokens.tokenize_str("3")
    assert digit in allowed(row._matcher)
    assert not row.accept_tokens("a", [digit])
    assert findings["a"].startswith("cannot be followed: ")


@pytest.mark.parametrize("text", ["(a|b|ab)*" * 100 + "c", "[b-f]{3}"])
def test_a_copy_reaches_its_limits_where_a_new_matcher_does(tokens: Any, text: str) -> None:
    masks = np.zeros((2, VOCAB // 32), dtype=np.int32)
    copy, new = grammar.Matcher(tokens, "regex", text).copy(), grammar.Matcher(tokens, "regex", text)
    for _ in range(8):
        copy.fill(masks, 0)
        new.fill(masks, 1)
        assert copy.finding == new.finding
        assert (masks[0] == masks[1]).all()
        token = int(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))[0])
        assert copy.accept(token) == new.accept(token)


def test_copies_of_a_matcher_go_their_own_ways(tokens: Any) -> None:
    first = grammar.Matcher(tokens, "regex", "[b-f]{3}")
    allowed(first)
    second = first.copy()
    (b,) = tokens.tokenize_str("b")
    assert first.accept(b)
    assert written(tokens, second) == "bbb"
    assert written(tokens, first) == "bb"


def test_a_constraint_is_read_once_for_its_samples(path: Path, masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read, the engine takes in no other request."""
    model = SimpleNamespace(model=path.parent, get_vocab_size=lambda: VOCAB)
    monkeypatch.setattr(masks, "eos_token_ids", lambda _: (END,))
    backend = masks.MaskBackend(SimpleNamespace(model_config=model))
    read = []
    monkeypatch.setattr(masks, "Matcher", lambda *args: read.append(args[1:]) or grammar.Matcher(*args))
    kinds = load("vllm.v1.structured_output.backend_types").StructuredOutputOptions
    rows = [backend.compile_grammar(kinds.REGEX, "[b-f]{3}") for _ in range(64)]
    assert read == [("regex", "[b-f]{3}")]
    assert len({id(row._matcher) for row in rows}) == 64
    for letter in "ghijk":
        backend.compile_grammar(kinds.REGEX, letter)
    backend.compile_grammar(kinds.REGEX, "[b-f]{3}")
    assert len(read) == 7, "only the last constraints are kept"
