"""Text prompts: bounded by the model, tokenized beside the event loop, few at a time, to the same ids as ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from corun.errors import InvalidArgumentError, OverloadedError
from corun.params import SamplingParams
from corun.testing.cluster import WAIT_S
from router import prompts, text
from router.prompts import Model, PromptEncoder
from router.text import Tokenizer
from tests.clusters import cluster, generate

HAN = "\u9fa5"
MIB = 2**20
FAR_S = 60.0


def byte_level(**parts: object) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "th", "the", "ĠĠ"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>"])
    made.add_tokens([AddedToken("two wörds")])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 259)])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2: a leading ▁, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁cd", "好", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def letters() -> tokenizers.Tokenizer:
    """Tokens of one byte, and a token of one byte for every character that has none."""
    made = tokenizers.Tokenizer(models.BPE(vocab={"?": 0, "a": 1, "e": 2, "K": 3}, merges=[], unk_token="?"))
    made.normalizer = normalizers.NFKC()
    return made


MADE = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
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
        patch.setattr(text, "PIECE", piece)
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
        tokenizer.encode("x" * 2 * text.PIECE, 9)
    assert str(caught.value) == f"prompt.text = more than 18 tokens: {limit}"


def model_of(max_model_len: int, tokenizer: Tokenizer = TOKENIZERS["byte level"]) -> Model:
    return Model(tokenizer=tokenizer, vocab_size=1000, max_model_len=max_model_len, name="m")


def test_the_longest_text_follows_from_the_model() -> None:
    longest = TOKENIZERS["byte level"].max_token_bytes
    assert model_of(100).max_prompt_bytes == 100 * longest
    assert model_of(512 * 1024).max_prompt_bytes == 4 * MIB
    assert model_of(MIB).max_prompt_bytes == 8 * MIB


@contextlib.asynccontextmanager
async def ticking(clock: Callable[[], float]) -> AsyncIterator[list[float]]:
    """The gaps between ticks of the event loop, in seconds of a clock."""
    times = [clock()]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.005)
            times.append(clock())

    ticker, gaps = asyncio.ensure_future(tick()), list[float]()
    try:
        yield gaps
        await asyncio.sleep(0.02)  # For the gap that lasted to the end.
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    finally:
        ticker.cancel()


@pytest.mark.parametrize("prompt", [HAN * (5 * MIB), HAN * (MIB // 4)])
async def test_a_text_beyond_the_model_is_refused_before_anything_is_done(model: str, prompt: str) -> None:
    async with cluster(model) as fake, ticking(time.process_time) as gaps:  # Other processes do not count.
        with pytest.raises(InvalidArgumentError, match=r"(prompt\.text|message) = \d+ bytes: must be at most"):
            await generate(fake, prompt, timeout_s=FAR_S)
    assert max(gaps) < 0.5


async def test_the_loop_runs_while_a_long_text_is_tokenized() -> None:
    prompt = HAN * (MIB // 6)
    began = time.perf_counter()
    async with ticking(time.perf_counter) as gaps:
        ids = await PromptEncoder().encode(prompt, model_of(MIB), asyncio.get_running_loop().time() + FAR_S)
    assert len(ids) == 1 + len(prompt.encode())
    assert max(gaps) < (time.perf_counter() - began) / 3


LONG, OTHER = prompts.LONG + 1, prompts.SHORT + 1


class Gate(Tokenizer):
    """Tokenizes when it is told to."""

    def __init__(self) -> None:
        super().__init__(MADE["byte level"].to_str().encode())
        self.opened = {True: threading.Event(), False: threading.Event()}
        """For long texts, and for others."""
        self.begun: list[int] = []
        self.both = threading.Event()
        """Set when two texts are being tokenized."""

    def open(self) -> None:
        for opened in self.opened.values():
            opened.set()

    def encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        self.begun.append(len(text))
        if len(self.begun) == 2:
            self.both.set()
        assert self.opened[len(text) > prompts.LONG].wait(WAIT_S)
        return super().encode(text, max_tokens)


@contextlib.asynccontextmanager
async def encoding(
    tokenizer: Gate, sizes: Sequence[int], clients: str = ""
) -> AsyncIterator[list[asyncio.Future[tuple[int, ...]]]]:
    """Texts of these sizes on their way, as many under way as may be. clients: a letter for the client of each."""
    encoder, model = PromptEncoder(), model_of(MIB, tokenizer)
    far = asyncio.get_running_loop().time() + FAR_S
    calls = [
        asyncio.ensure_future(encoder.encode("x" * size, model, far, client))
        for size, client in zip(sizes, clients or "a" * len(sizes), strict=True)
    ]
    try:
        await asyncio.to_thread(tokenizer.both.wait, WAIT_S)
        yield calls
    finally:
        tokenizer.open()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        encoder.close()


async def test_one_long_text_at_a_time_and_one_other() -> None:
    tokenizer = Gate()
    async with encoding(tokenizer, [LONG, OTHER, LONG + 1, LONG + 2, OTHER + 1]) as calls:
        assert sorted(tokenizer.begun) == [OTHER, LONG]
        calls[0].cancel()  # It is being tokenized, and goes on; one that waits is gone at once.
        calls[2].cancel()
        tokenizer.opened[False].set()
        assert [len(await calls[i]) for i in (1, 4)] == [OTHER + 1, OTHER + 2]
        assert tokenizer.begun[2:] == [OTHER + 1]
        tokenizer.opened[True].set()
        assert len(await calls[3]) == LONG + 3
        assert tokenizer.begun[3:] == [LONG + 2]


async def test_a_wait_ends_at_the_deadline() -> None:
    tokenizer, encoder = Gate(), PromptEncoder()
    now = asyncio.get_running_loop().time()
    calls = [encoder.encode("x" * OTHER, model_of(MIB, tokenizer), now + 0.05) for _ in range(2)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in found] == ["the prompt was not tokenized before the deadline"] * 2
    assert tokenizer.begun == [OTHER]
    tokenizer.open()
    encoder.close()


@pytest.mark.parametrize(
    ("bound", "most", "clients"),
    [("MAX_WAITING", 3 * prompts.LONG, "aaaaa"), ("MAX_WAITING_OF_CLIENT", 2 * LONG, "aaaba")],
)
async def test_texts_that_wait_are_bounded_in_each_lane_and_of_each_client(
    bound: str, most: int, clients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, bound, most)
    tokenizer = Gate()
    async with encoding(tokenizer, [LONG, LONG, LONG, OTHER if clients == "aaaaa" else LONG, OTHER], clients) as calls:
        says = rf"{2 * LONG} bytes of text wait to be tokenized, of at most {most}"
        with pytest.raises(OverloadedError, match=says):
            await calls[2]
        tokenizer.open()
        assert all([await calls[i] for i in (0, 1, 3, 4)])


async def test_clients_take_turns_however_many_texts_each_has() -> None:
    tokenizer = Gate()
    sizes = [OTHER, LONG, OTHER + 1, OTHER + 2, OTHER + 3, OTHER + 4]
    async with encoding(tokenizer, sizes, "aaaabb") as calls:
        tokenizer.open()
        await asyncio.gather(*calls)
    assert tokenizer.begun[2:] == [OTHER + 3, OTHER + 1, OTHER + 4, OTHER + 2]


async def test_short_texts_need_no_thread() -> None:
    encoder = PromptEncoder()
    encoder.close()
    assert len(await encoder.encode("the", model_of(10), 0.0)) == 2
    tokenizer = Tokenizer(byte_level(normalizer=normalizers.Strip(), post_processor=None).to_str().encode())
    with pytest.raises(InvalidArgumentError, match=r"prompt\.text = 3 bytes: must have at least one token"):
        await encoder.encode("   ", model_of(10, tokenizer), 0.0)


async def test_a_text_that_fits_runs(model: str) -> None:
    async with cluster(model) as fake:
        (output,) = await generate(fake, "x" * 500, SamplingParams(max_tokens=12))
        assert output.receipt.num_prompt_tokens == 500
        with pytest.raises(InvalidArgumentError, match=r"prompt\.text = 513 tokens: must be at most 511 tokens"):
            await generate(fake, "x" * 513, SamplingParams(max_tokens=1))
