from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from corun.errors import InvalidArgumentError, UnavailableError
from router import text as module
from router.text import ByteLevelDetokenizer, StopMatcher, Tokenizer, WindowDetokenizer

BOS = 259
"""The special token that the byte-level post-processor adds."""


def byte_level(**parts: object) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "th", "the", "ĠĠ"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    made.add_tokens([AddedToken("two wörds"), AddedToken("naïve"), AddedToken("é")])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2: words with a leading ▁, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "▁", "▁a", "b", "▁cd", "e", "好", "�", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    return made


def letters() -> tokenizers.Tokenizer:
    """Tokens of one byte, and a token of one byte for every character that has none."""
    made = tokenizers.Tokenizer(models.BPE(vocab={"?": 0, "a": 1, "e": 2, "K": 3}, merges=[], unk_token="?"))
    made.normalizer = normalizers.NFKC()
    return made


MADE = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "byte level in a sequence": byte_level(decoder=decoders.Sequence([decoders.ByteLevel()])),
    "sentencepiece": sentencepiece(),
    "letters": letters(),
}
TOKENIZERS = {name: Tokenizer(made.to_str().encode()) for name, made in MADE.items()}
SHRINKING = "\u212a\uff21\U0001d400\u1112\u1161\u11ab\u03b1\u0313\u0301\u0345"
"""A Kelvin sign, a wide and a bold A, a Hangul syllable and a Greek letter in parts."""
TEXTS = st.text(st.one_of(st.sampled_from("the  two wörds<bos>ab好" + SHRINKING), st.characters(codec="utf-8")))


@pytest.mark.parametrize("name", MADE)
@given(TEXTS, st.sampled_from((3, 10**6)))
def test_ids_are_those_of_encode(name: str, prompt: str, piece: int) -> None:
    """With the special tokens, and also where the text was counted in pieces before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        ids = MADE[name].encode(prompt).ids
        assert TOKENIZERS[name].encode(prompt, 10**6) == tuple(ids)


@pytest.mark.parametrize("name", MADE)
@given(TEXTS)
def test_no_token_stands_for_more_than_the_longest(name: str, prompt: str) -> None:
    """Else a prompt that fits the model would be refused for its bytes."""
    ids = MADE[name].encode(prompt, add_special_tokens=False).ids
    assert len(prompt.encode()) <= len(ids) * TOKENIZERS[name].max_token_bytes


def test_how_much_too_long_a_text_is_is_said_unless_it_is_far_too_long() -> None:
    tokenizer = TOKENIZERS["byte level"]
    limit = "must be at most 9 tokens, the model's length 10 less one for output"
    with pytest.raises(InvalidArgumentError) as caught:
        tokenizer.encode("x" * 9, 9)
    assert str(caught.value) == f"prompt.text = 10 tokens: {limit}"
    with pytest.raises(InvalidArgumentError) as caught:
        tokenizer.encode("x" * 2 * module.PIECE, 9)
    assert str(caught.value) == f"prompt.text = more than 18 tokens: {limit}"


BYTE_LEVEL, SENTENCEPIECE = TOKENIZERS["byte level"], TOKENIZERS["sentencepiece"]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 265), max_size=40))
def test_byte_level_pieces_are_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


WINDOWED = "sentencepiece", "byte level in a sequence"
BROKEN = 8, *range(9 + 0xF0, 9 + 0xF5)
"""In both of these, tokens of which no text may be made, or only part of a character."""


@pytest.mark.parametrize("name", WINDOWED)
@given(st.lists(st.one_of(st.integers(0, 266), st.sampled_from(BROKEN)), max_size=40))
def test_window_pieces_are_the_decoded_whole(name: str, ids: list[int]) -> None:
    assert "".join(pieces(TOKENIZERS[name], ids)) == TOKENIZERS[name].decode(ids)


@pytest.mark.parametrize(("name", "token"), [("sentencepiece", "�"), ("byte level in a sequence", "ÿ")])
def test_text_that_never_becomes_a_character_does_not_make_the_next_token_slower(name: str, token: str) -> None:
    """A client can have such tokens drawn by a bias, and a router reads all streams in one thread."""
    detokenizer, longest = TOKENIZERS[name].detokenizer(), 0
    assert isinstance(detokenizer, WindowDetokenizer)
    token_id = MADE[name].token_to_id(token)
    for _ in range(50):
        detokenizer.push(token_id)
        longest = max(longest, len(detokenizer._window))
    assert longest < 10


def test_half_a_character_is_held_back() -> None:
    assert isinstance(BYTE_LEVEL.detokenizer(), ByteLevelDetokenizer)
    assert isinstance(SENTENCEPIECE.detokenizer(), WindowDetokenizer)
    bos, *emoji = BYTE_LEVEL.encode("😀")
    assert bos == BOS  # The post-processor's own special token.
    assert pieces(BYTE_LEVEL, emoji) == ["", "", "", "😀", ""]
    assert pieces(BYTE_LEVEL, emoji[:2]) == ["", "", "�"], "the end shows what is unfinished"
    assert pieces(BYTE_LEVEL, [BOS, BOS + 1, 9999]) == ["", "", "", ""], "special and unknown tokens have no text"
    assert pieces(SENTENCEPIECE, [9 + byte for byte in "好".encode()] + [4]) == ["", "", "", "好b", ""]


def test_a_tokenizer_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="No such file"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnavailableError, match="cannot be used"):
        Tokenizer.load(str(tmp_path))


def run(stops: list[str], texts: list[str], *, armed_from: int = 0) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = []
    for number, text in enumerate(texts):
        shown.append(matcher.push(text, armed=number >= armed_from))
        if matcher.matched:
            return shown, True
    return [*shown, matcher.flush()], False


@pytest.mark.parametrize(
    ("stops", "texts", "armed_from", "shown", "matched"),
    [
        ([], ["a", "b"], 0, ["a", "b", ""], False),
        (["END"], ["xE", "N", "q"], 0, ["x", "", "ENq", ""], False),  # What may be a stop is held back.
        (["END"], ["xE", "N", "Dq"], 0, ["x", "", ""], True),
        (["END"], ["xEN"], 0, ["x", "EN"], False),
        (["cd", "bc"], ["abcde"], 0, ["a"], True),  # The earliest match cuts.
        (["aab"], ["aa", "aab"], 0, ["", "aa"], True),
        (["ab"], ["ab", "x", "ab"], 1, ["ab", "x", ""], True),  # It may not end before it is armed.
        (["ab"], ["a", "b", "c"], 1, ["", ""], True),
        (["ab"], ["ab", "", ""], 1, ["ab", "", "", ""], False),
    ],
)
def test_what_stop_strings_leave(
    stops: list[str], texts: list[str], armed_from: int, shown: list[str], matched: bool
) -> None:
    assert run(stops, texts, armed_from=armed_from) == (shown, matched)


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.lists(st.text("ab", max_size=3)))
def test_shown_text_is_the_text_before_the_first_stop(stops: list[str], texts: list[str]) -> None:
    shown, matched = run(stops, texts)
    whole, so_far = "".join(texts), ""
    for text in texts:  # Token by token, as the text comes.
        so_far += text
        starts = [start for stop in stops if (start := so_far.find(stop)) >= 0]
        if starts:
            assert ("".join(shown), matched) == (whole[: min(starts)], True)
            return
    assert ("".join(shown), matched) == (whole, False)
