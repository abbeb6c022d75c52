"""What of a model's files and of the engine's settings is in a node's contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun import tiny
from corun.config import DecodeConfig
from corun.contract import Contract, diff
from corun.node import engine as base
from tests.loading import load
from tests.node.test_pin import seen as settings_seen

SEEN: dict[str, Any] = {
    **settings_seen("cpu"),
    "weights_digest": "w" * 64,
    "torch": "2.11.0",
    "device": "a CPU",
    "driver": "",
    "cuda": "",
    "machine": "x86_64",
    "cpu_isa": "AVX2",
    "attention_backend": "CPU_ATTN",
    "attention_split_kv": "off",
    "runner": "v1 CPUModelRunner",
    "sampler": "test 1",
    "slots": 4,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny.ensure(), tmp_path / "model"))


def contract_of(directory: Path, **seen: Any) -> Contract:
    """A decode node's contract, from vLLM's own reading of the model's files."""
    model = load("vllm.config").ModelConfig(model=str(directory), skip_tokenizer_init=True)
    cache = SimpleNamespace(num_gpu_blocks=9, block_size=16, cache_dtype="auto")
    llm = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model, cache_config=cache))
    found = SEEN | seen
    shared = base.model_contract(llm, DecodeConfig(model=str(directory)), found)
    return base.decode_contract(shared, found, base.facts(llm, finding=""))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_ends_an_output_is_in_the_contract(directory: Path, tmp_path: Path) -> None:
    """Two directories that differ in generation_config.json alone end outputs at different tokens."""
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    equal = Path(shutil.copytree(directory, tmp_path / "equal"))
    change(other / "generation_config.json", eos_token_id=[509, 7, 7])
    first, second = contract_of(directory), contract_of(other)
    assert contract_of(equal).fingerprint() == first.fingerprint()
    assert diff(first, second) == {"decode.eos_token_ids": ("[509]", "[7, 509]")}


def test_without_that_file_the_models_config_says_what_ends_an_output(directory: Path) -> None:
    change(directory / "config.json", eos_token_id=[3, 1])
    assert contract_of(directory).decode.eos_token_ids == (509,)  # type: ignore[union-attr]
    (directory / "generation_config.json").unlink()
    assert contract_of(directory).decode.eos_token_ids == (1, 3)  # type: ignore[union-attr]
