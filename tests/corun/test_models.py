"""A model's name and the directory that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.errors import UnavailableError
from corun.models import downloaded

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
