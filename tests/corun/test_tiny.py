"""The tiny model is the same bytes everywhere and reads back any text."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from corun.errors import InvalidArgumentError
from corun.models import tiny

DIGEST = "a908db0a57dd16b68ab965a668eb07947710a86813838337410c949adafa72ae"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.ensure(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def test_bytes_are_pinned(model: Path) -> None:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    assert digest.hexdigest() == DIGEST


def test_weights_have_real_scale(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == 4_197_120
    assert tensors["model.embed_tokens.weight"].std() == pytest.approx(1.0, rel=0.01)
    projection = tensors["model.layers.3.mlp.down_proj.weight"]
    assert projection.std() * np.sqrt(projection.shape[1]) == pytest.approx(1.28, rel=0.01)
    assert (tensors["model.layers.0.self_attn.q_norm.weight"] == 1).all()
    assert not np.array_equal(
        tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    )


def test_vocabulary_fills_the_embedding(model: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 512
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|endoftext|>"


@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    encodable = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(encodable).ids, skip_special_tokens=False) == encodable


def test_common_words_are_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" the old clock").tokens == ["Ġthe", "Ġold", "Ġclock"]


def test_second_use_writes_nothing(model: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    assert tiny.ensure(model) == model
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before


def test_default_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny.ensure() == tmp_path / "corun" / f"tiny-{tiny.version()}"


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="must be absent, an empty directory"):
        tiny.ensure(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_another_maker_may_be_done_between_two_looks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, is_ours = tmp_path / "tiny", tiny._is_ours

    def look(at: Path) -> bool:
        found = is_ours(at)
        if not target.exists():
            shutil.copytree(model, target)
        return found

    monkeypatch.setattr(tiny, "_is_ours", look)
    assert tiny.ensure(target) == target
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_several_makers_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: tiny.ensure(tmp_path / "tiny"), range(4)))
    assert paths == {tmp_path / "tiny"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]
