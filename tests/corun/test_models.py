"""A model's name and the directory that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.errors import UnavailableError
from corun.models import downloaded, served_name

REVISION = "0" * 40


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


def test_a_directory_stays_as_it_is(tmp_path: Path) -> None:
    assert downloaded(str(tmp_path)) == str(tmp_path)


def test_a_hub_id_becomes_the_directory_in_the_cache(cache: Path) -> None:
    found = Path(downloaded("maker/model"))
    assert found.is_relative_to(cache)
    assert (found / "tokenizer.json").is_file()  # The router reads it there.


def test_what_cannot_be_fetched_is_named(cache: Path) -> None:
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
