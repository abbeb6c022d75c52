"""A GGUF file becomes the model that it was made of: weights, rotation, tokenizer, special tokens, template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from corun.errors import InvalidArgumentError

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

from gguf.quants import dequantize, quantize  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from corun.models.convert import bfloat16, convert, unrotated  # noqa: E402
from tests.corun.synthetic_gguf import (  # noqa: E402
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SPECIAL,
    TEMPLATE,
    Synthetic,
    rotated,
    vocabulary,
)


@pytest.fixture(scope="module")
def source() -> Synthetic:
    return Synthetic()


@pytest.fixture(scope="module")
def model(source: Synthetic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    (target := directory / "model").mkdir()
    convert(source.write(directory / "small.gguf"), target)
    return target


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_every_weight_is_the_one_that_was_stored(source: Synthetic, model: Path) -> None:
    """Quantising works on rows, so it gives the same before and after the rows were moved and moved back."""
    found = load_file(model / "model.safetensors")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(LAYERS) for ours, theirs in parts.items()}
    assert found.keys() == {f"{name}.weight" for name in names}
    for ours, theirs in names.items():
        weight = source.weights[f"{theirs}.weight"]
        if weight.ndim == 2:
            weight = dequantize(quantize(weight, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1)
        assert torch.equal(found[f"{ours}.weight"], torch.tensor(weight).to(torch.bfloat16)), ours


def turned(vector: Any, position: int, *, pairs: str) -> Any:
    """Return a head's vector turned by its position. pairs: which rows turn together, neighbours or halves."""
    angles = position * 100000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
    first, second = (vector[0::2], vector[1::2]) if pairs == "neighbours" else np.split(vector, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([first * cos - second * sin, first * sin + second * cos])


@pytest.mark.parametrize("position", [0, 1, 7, 100])
def test_attention_scores_are_those_of_the_file(position: int) -> None:
    """llama.cpp turns neighbouring rows, and engines turn halves. Only rows in the right order score the same."""
    draw = np.random.default_rng(position)
    x, y = draw.standard_normal((2, HIDDEN)).astype(np.float32)
    q = rotated(draw.standard_normal((HEADS * HEAD, HIDDEN)).astype(np.float32), HEADS)
    k = rotated(draw.standard_normal((KV_HEADS * HEAD, HIDDEN)).astype(np.float32), KV_HEADS)

    def scores(q: Any, k: Any, pairs: str) -> Any:
        queries, keys = (q @ x).reshape(HEADS, HEAD), (k @ y).reshape(KV_HEADS, HEAD)
        return [
            np.sum(turned(queries[i], position, pairs=pairs) * turned(keys[i // 2], 3, pairs=pairs))
            for i in range(HEADS)
        ]

    expected = scores(q, k, "neighbours")
    np.testing.assert_allclose(scores(unrotated(q, HEADS), unrotated(k, KV_HEADS), "halves"), expected, rtol=1e-3)
    if position != 3:
        for wrong in ((q, k), (unrotated(q, HEADS), k), (q, unrotated(k, KV_HEADS))):
            assert not np.allclose(scores(*wrong, "halves"), expected, rtol=1e-2)
        other = unrotated(q, 2 * HEADS)  # Heads of another size.
        assert not np.allclose(scores(other, unrotated(k, KV_HEADS), "halves"), expected, rtol=1e-2)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    found = torch.tensor(bfloat16(np.array(values, np.float32)).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found, torch.tensor(values, dtype=torch.float32).to(torch.bfloat16))


def test_bfloat16_halves_go_to_the_even_neighbour() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], np.uint32)
    assert bfloat16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_configuration_says_what_the_file_says(model: Path) -> None:
    config = read(model / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(vocabulary()),
    }
    assert {name: config[name] for name in expected} == expected
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert read(model / "generation_config.json") == ends
    assert {name: config[name] for name in ends} == ends
    named = read(model / "tokenizer_config.json")
    assert (named["bos_token"], named["eos_token"], named["pad_token"]) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert (named["chat_template"], named["model_max_length"]) == (TEMPLATE, 128)


def test_transformers_reads_what_was_written(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(model))
    messages = [{"role": "user", "content": "the man"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<|im_start|>the man<|im_end|>"
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert transformers.AutoConfig.from_pretrained(str(model)).rope_parameters["rope_theta"] == 100000.0


@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    encodable = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(encodable).ids, skip_special_tokens=False) == encodable


def test_special_tokens_are_found_in_text_and_nothing_is_added(tokenizer: Tokenizer) -> None:
    found = tokenizer.encode("<|im_start|>the man<|im_end|>")
    assert (found.ids[0], found.ids[-1], len(found.ids)) == (1, 2, 5)
    assert tokenizer.decode(found.ids) == "the man"
    assert tokenizer.encode("the man").ids == found.ids[1:-1]


def test_digits_are_tokens_of_their_own_and_spaces_are_kept(tokenizer: Tokenizer) -> None:
    digits = tokenizer.encode("1234 it 56").tokens
    assert digits[:4] == ["1", "2", "3", "4"]
    assert digits[-3:] == ["Ġ", "5", "6"]
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    assert tokenizer.encode("   the").tokens == ["Ġ", "Ġ", "Ġthe"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Synthetic(facts={"tokenizer.ggml.model": "llama"}), r"tokenizer.ggml.model = 'llama': must be 'gpt2'"),
        (Synthetic(facts={"tokenizer.ggml.pre": "qwen2"}), r"tokenizer.ggml.pre = 'qwen2': must be 'smollm'"),
        (Synthetic(facts={"tokenizer.ggml.token_type": {7: 6}}), r"token_type = \[6\]: must be of \[1, 3\]"),
        (Synthetic(left_out="blk.1.attn_q.weight"), "layers.1.self_attn.q_proj.weight.*must be those of as many"),
        (Synthetic(facts={"general.architecture": "qwen2"}), "general.architecture = 'qwen2': must be 'llama'"),
    ],
)
def test_what_is_another_kind_of_model_is_refused(changed: Synthetic, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        convert(changed.write(tmp_path / "other.gguf"), tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    stray = Synthetic()
    stray.weights["blk.0.attn_q_norm.weight"] = np.ones(HIDDEN, np.float32)
    with pytest.raises(InvalidArgumentError, match=r"tensor = 'blk.0.attn_q_norm.weight': must be one that a Llama"):
        convert(stray.write(tmp_path / "stray.gguf"), tmp_path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"no model at all, but more than a few bytes long" * 10)
    with pytest.raises(InvalidArgumentError, match="must be a GGUF file"):
        convert(tmp_path / "notes", tmp_path)
