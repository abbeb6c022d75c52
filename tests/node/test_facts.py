"""The parts of a model's files and of the engine's settings that are in a node's contract."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.fields import DecodeConfig
from corun.contract import Contract, diff
from corun.models import tiny
from corun.node.vllm import facts
from corun.node.vllm.start import facts as engine_facts
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
    "cpu_features": ["avx2", "fma"],  # Lists, because tuples do not survive the way from the worker.
    "cpu_caches": [32768, 1048576, 0],
    "kernel_packages": [],
    "multiprocessors": 0,
    "traced_tokens": 0,
    "attention_backend": "CPU_ATTN",
    "split_policy": "split-kv off",
    "runner": "v1 CPUModelRunner",
    "sampler": "test 1",
    "slots": 4,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny.ensure(), tmp_path / "model"))


def contract_of(directory: Path, **seen: Any) -> Contract:
    """Return a decode node's contract, from vLLM's own reading of the model's files."""
    model = load("vllm.config").ModelConfig(model=str(directory), skip_tokenizer_init=True)
    cache = SimpleNamespace(num_gpu_blocks=9, block_size=16, cache_dtype="auto")
    steps = SimpleNamespace(max_num_scheduled_tokens=None, max_num_batched_tokens=64)
    config = SimpleNamespace(model_config=model, cache_config=cache, scheduler_config=steps)
    llm = SimpleNamespace(vllm_config=config)
    found = SEEN | seen
    shared = facts.model_contract(llm, DecodeConfig(model=str(directory)), found)
    return facts.decode_contract(shared, found, engine_facts(llm, finding=""))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_ends_an_output_is_in_the_contract(directory: Path, tmp_path: Path) -> None:
    """Models that differ only in generation_config.json end outputs at different tokens."""
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    equal = Path(shutil.copytree(directory, tmp_path / "equal"))
    change(other / "generation_config.json", eos_token_id=[509, 7, 7])
    first, second = contract_of(directory), contract_of(other)
    assert contract_of(equal).fingerprint() == first.fingerprint()
    assert diff(first, second) == {"decode.eos_token_ids": ("[509]", "[7, 509]")}


def test_the_end_tokens_are_those_of_generation_config_and_else_of_config(directory: Path) -> None:
    """A token that the model does not have can never be drawn. Held back by `min_tokens`, it would end the engine on a
    CPU; on a GPU it would be written into another request's logits (v1/worker/gpu/sample/logit_bias.py)."""
    change(directory / "config.json", eos_token_id=[3, 1])
    change(directory / "generation_config.json", eos_token_id=[-1, 509, 512])
    assert contract_of(directory).decode.eos_token_ids == (509,)  # type: ignore[union-attr]
    (directory / "generation_config.json").unlink()
    assert contract_of(directory).decode.eos_token_ids == (1, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fact", "value", "field", "text"),
    [
        ("cpu_features", ["amx_tile", "avx2", "fma"], "model.cpu_features", '["amx_tile", "avx2", "fma"]'),
        ("cpu_caches", [32768, 2097152, 0], "model.cpu_caches", "[32768, 2097152, 0]"),
        ("multiprocessors", 66, "decode.multiprocessors", "66"),
        ("traced_tokens", 4096, "decode.traced_tokens", "4096"),
        ("split_policy", "own-length 2048 max 16", "decode.split_policy", "own-length 2048 max 16"),
    ],
)
def test_what_decides_bits_is_in_the_contract(directory: Path, fact: str, value: Any, field: str, text: str) -> None:
    differences = diff(contract_of(directory), contract_of(directory, **{fact: value}))
    assert {name: pair[1] for name, pair in differences.items()} == {field: text}


def test_files_that_vllm_reads_beside_config_json_are_in_its_digest_and_no_others(directory: Path) -> None:
    digests = {facts.config_digest(directory)}
    for name in ("params.json", "hf_quant_config.json", "my_quantize_config.json"):
        for text in ('{"quantized": true}', '{"quantized": false}'):
            (directory / name).write_text(text)
            digests.add(facts.config_digest(directory))
    assert len(digests) == 7
    last = facts.config_digest(directory)
    for name in ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json", "README.md"):
        (directory / name).write_text("{}")
        assert facts.config_digest(directory) == last


def test_libraries_that_read_a_models_files_are_in_the_contract(directory: Path) -> None:
    model = contract_of(directory).model
    versions = {"torch", "transformers", "compressed-tensors", "tokenizers"}
    found = {name: metadata.version(name) for name in versions}
    assert {f"{name} {found[name]}" for name in ("transformers", "compressed-tensors")} <= set(model.kernels)
    assert model.tokenizers == found["tokenizers"]


def test_how_the_compiler_makes_kernels_is_in_a_gpus_contract(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Combined kernels have other bits than single ones, so nodes that make others refuse each other."""
    on_cpu = contract_of(directory).model.kernels
    on_gpu = contract_of(directory, **settings_seen("cuda")).model.kernels
    told = "inductor benchmark_combo_kernel False", "inductor combo_kernels True", "inductor deterministic True"
    assert on_gpu == (*on_cpu, *told)
    monkeypatch.setitem(facts.pin.GPU_INDUCTOR, "combo_kernels", False)
    assert contract_of(directory, **settings_seen("cuda")).model.kernels != on_gpu


def install(where: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata of an installed distribution."""
    info = where / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_installed_plugins_of_vllm_are_in_the_contract(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugins of vLLM itself are not in the contract, because they come with its version."""
    assert contract_of(directory).model.plugins == ()
    entry_points = (
        "[vllm.logits_processors]\nbias = own:Bias\n[vllm.general_plugins]\nops = own:patch\n[other]\na = b:c\n"
    )
    install(tmp_path, "own-plugins", "1.5", entry_points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert contract_of(directory).model.plugins == (
        "vllm.general_plugins ops own:patch own-plugins 1.5",
        "vllm.logits_processors bias own:Bias own-plugins 1.5",
    )


@pytest.mark.parametrize("usable", [False, True])
def test_kernels_that_vllm_cannot_use_are_not_in_the_contract(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    """FlashInfer needs nvcc or ready-made kernels. Without them vLLM uses others, with the same packages installed."""
    install(tmp_path, "flashinfer-python", "0.6.14")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = contract_of(directory, kernel_packages=["flashinfer"] if usable else []).model.kernels
    assert "flashinfer-python 0.6.14" in found
    assert ("flashinfer is used" in found) is usable
