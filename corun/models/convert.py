"""Turn a Llama model in a GGUF file into a folder that engines load: weights, configuration, tokenizer, chat template.

This module owns what llama.cpp's file format does to such a model, and undoes it. It must not know where files come
from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from corun.errors import InvalidArgumentError
from corun.models.files import byte_level_bpe

ARCHITECTURE, ALPHABET, PRE_TOKENIZER = "llama", "gpt2", "smollm"
"""The only architecture, alphabet of tokens and way to cut a text into words that `convert` takes."""
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

F32 = npt.NDArray[np.float32]
BF16 = npt.NDArray[np.uint16]
"""The bits of bfloat16, which numpy has no type for."""


def convert(source: Path, target: Path) -> None:
    """Write the model in a GGUF file into the directory `target`, with weights rounded to bfloat16.

    Raises InvalidArgumentError if the file is no such model. It names what the file says, and what it must say.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise InvalidArgumentError("gguf", str(source), f"must be a GGUF file: {error}") from error
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _check(facts, "general.architecture", ARCHITECTURE)
    _check(facts, "tokenizer.ggml.model", ALPHABET)
    _check(facts, "tokenizer.ggml.pre", PRE_TOKENIZER)
    config = _config(facts, is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = dict(_weights(reader, config))
    _check_names(weights, config)
    _save(weights, target / "model.safetensors")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": _tokenizer(facts),
        "tokenizer_config.json": _tokenizer_config(facts, config),
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(facts: Mapping[str, Any], name: str, expected: str) -> None:
    if facts.get(name) != expected:
        raise InvalidArgumentError(name, facts.get(name), f"must be {expected!r} in a GGUF file that is converted here")


def _fact(facts: Mapping[str, Any], name: str) -> Any:
    if name not in facts:
        raise InvalidArgumentError(name, None, "must be given in a GGUF file that is converted here")
    return facts[name]


def _config(facts: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    def fact(name: str) -> Any:
        return _fact(facts, f"{ARCHITECTURE}.{name}")

    heads, hidden = fact("attention.head_count"), fact("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _fact(facts, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _fact(facts, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _fact(facts, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fact("feed_forward_length"),
        "max_position_embeddings": fact("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fact("block_count"),
        "num_key_value_heads": fact("attention.head_count_kv"),
        "rms_norm_eps": _shortest(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fact("rope.freq_base")),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(_fact(facts, "tokenizer.ggml.tokens")),
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal number that is the same float32, such as 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _weights(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, BF16]]:
    """Yield each tensor with the name that it has in Hugging Face's library."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight: F32 = dequantize(tensor.data, tensor.tensor_type)
        name = _WHOLE.get(tensor.name, "")
        if found := _LAYER_NAME.fullmatch(tensor.name):
            layer, part = found.groups()
            name = f"model.layers.{layer}.{_LAYER[part]}.weight" if part in _LAYER else ""
            weight = unrotated(weight, heads[part]) if part in heads else weight
        if not name:
            raise InvalidArgumentError("tensor", tensor.name, "must be one that a Llama model has")
        yield name, bfloat16(weight)


def unrotated(weight: F32, heads: int) -> F32:
    """Return the rows of a Q or K projection in the order that Hugging Face's rotary embedding wants.

    llama.cpp rotates neighbouring rows of a head with each other, Hugging Face rows that are half a head apart. So the
    file has rows 0, d/2, 1, d/2 + 1, … of each head of d rows.
    """
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def bfloat16(values: F32) -> BF16:
    """Return the bits of finite values as bfloat16, rounded to the nearest, and to the even one of two."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _save(weights: Mapping[str, BF16], path: Path) -> None:
    """Write tensors as a safetensors file. Its library writes no bfloat16 that comes from numpy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The tensors begin at a multiple of 8 bytes.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights.values():
            file.write(weight.tobytes())


def _check_names(weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    expected = {name for name in _WHOLE.values() if name != "lm_head.weight" or not config["tie_word_embeddings"]}
    layers = range(config["num_hidden_layers"])
    expected |= {f"model.layers.{layer}.{part}.weight" for layer in layers for part in _LAYER.values()}
    if different := sorted(expected ^ weights.keys()):
        raise InvalidArgumentError("tensors", different[:3], "must be those of as many layers as the file names")


def _tokenizer(facts: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _fact(facts, "tokenizer.ggml.tokens")
    return byte_level_bpe(
        {token: index for index, token in enumerate(tokens)},
        [merge.split(" ") for merge in _fact(facts, "tokenizer.ggml.merges")],
        [(index, tokens[index]) for index in _special(facts)],
        trim_offsets=True,
        single_digits=True,
    )


def _special(facts: Mapping[str, Any]) -> list[int]:
    """Return the ids of control tokens. Raises InvalidArgumentError if there are tokens of any other unusual kind."""
    kinds = _fact(facts, "tokenizer.ggml.token_type")
    known = {int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)}
    if others := set(kinds) - known:
        raise InvalidArgumentError("tokenizer.ggml.token_type", sorted(others), f"must be of {sorted(known)}")
    return [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]


def _tokenizer_config(facts: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _fact(facts, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "chat_template": _fact(facts, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
