"""A model's name and the directory that it stands for; the tiny model is the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import downloaded, served_name, tiny

REVISION = "0" * 40
TINY_DIGEST = "a908db0a57dd16b68ab965a668eb07947710a86813838337410c949adafa72ae"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with one model, on a machine that reaches no hub."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--maker--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_hub_id_becomes_the_directory_in_the_cache(cache: Path) -> None:
    assert downloaded(str(cache)) == str(cache)
    found = Path(downloaded("maker/model"))
    assert found.is_relative_to(cache)
    assert (found / "tokenizer.json").is_file()  # The router reads it there.
    with pytest.raises(UnavailableError, match="model maker/other could not be fetched from the hub"):
        downloaded("maker/other")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (f"/cache/models--Qwen--Qwen3-8B/snapshots/{REVISION}", "Qwen/Qwen3-8B"),
        (f"/cache/models--gpt2/snapshots/{REVISION}", "gpt2"),
        ("/home/me/.cache/corun/tiny-0123456789ab", "tiny"),
        ("/models/tiny-llama", "tiny-llama"),
        ("/models/snapshots/mine", "mine"),
        ("/", "/"),
    ],
)
def test_a_model_is_served_under_a_name_and_not_a_path(model: str, name: str) -> None:
    assert served_name(model) == name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.ensure(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def test_the_bytes_of_the_tiny_model_are_pinned(model: Path) -> None:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    assert digest.hexdigest() == TINY_DIGEST


def test_vocabulary_fills_the_embedding(model: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 512
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|endoftext|>"


@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    encodable = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(encodable).ids, skip_special_tokens=False) == encodable


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


def test_several_makers_agree_and_a_second_use_writes_nothing(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: tiny.ensure(model), range(4))) == {model}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    assert tiny.ensure(model) == model
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before
