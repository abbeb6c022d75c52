"""The built-in tiny model: a real Qwen3 checkpoint of 4.2 million random weights, made on first use.

This module owns the recipe: configuration, byte-level tokenizer and weights, the same bytes on every machine. Weights
are sums of integers read from SHAKE-256, so neither a library's random stream nor a math library's rounding is part of
the recipe. This module must not know engines: they load what it writes like any other checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from corun.errors import InvalidArgumentError
from corun.models.files import byte_level_bpe, cache

_SEED = "corun-tiny-1"
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 4, 256, 8, 4, 64, 768

# The gain of one projection. Normal weights of std 0.02 give it at the width of an 8B model: 0.02 * sqrt(4096).
_PROJECTION_GAIN = 1.28
# The gain of lm_head, which is the standard deviation of the logits. It leaves a few likely tokens, as a trained model
# does. Flat logits would hide differences.
_HEAD_GAIN = 3.5
# The lm_head rows of tokens that do not start a word are scaled down, so that the output mostly reads as words. The row
# of the end-of-text token is scaled down a little, so that an output takes a few hundred tokens.
_RARE_ROW_SCALE = 0.125
_END_ROW_SCALE = 0.75

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The byte-pair merges in rank order, trained on a short story. _ stands for a leading space.
_MERGES = """
_+t h+e _t+he _+a _+w n+d _+s _a+nd _+o o+r _+c i+t m+e o+u i+n l+d _+b e+r _+m _+l a+n _+g _+he _+it _t+o _o+n a+c
r+e _+d ou+ld h+i v+er _+e _w+a in+g _b+e _m+an a+r a+me e+d e+n h+a i+d i+r l+e l+l l+o n+o o+me s+t _+f _the+y
_w+he _w+or _w+ould _s+t _c+lo _l+i _d+o _wa+s a+in c+k e+t g+h h+ing i+nd i+me o+k o+n w+n _+p _+u _+y _+in _+no
_t+ime he+r _w+it _w+er _w+ind or+y _c+ome _b+ac _on+e _whe+n _st+ory _clo+ck _no+t _wit+h _wer+e _bac+k a+y a+id
c+e e+s g+ain k+ed o+w s+e t+her u+t _+r _+hi _+ha _t+hing _the+m _the+re _a+n _a+s _a+t _a+gain _s+he _s+ame _s+aid
_o+ld _o+ver or+e _c+ame ou+n _b+y _l+o _g+o _g+ir _he+r _he+ar _to+wn _on+ce ac+h ver+y _e+ach _e+very ar+s ha+t
ll+s _f+or _wor+d gh+t _u+p _wind+ow _hi+lls _gir+l _hear+d '+s a+b a+d a+t a+u a+ll b+ou c+au e+l e+o e+ll e+ars
f+ore g+e g+an g+et h+o h+r h+ou h+an h+ould i+s i+v i+ver i+et i+ght j+u k+e k+no l+w l+ac m+all n+ing n+ed n+ight
o+d o+m o+ther p+en p+le q+u r+s r+ok r+ned r+om t+o t+er t+le u+n u+rned v+ed v+en _+I _+me _+hou _+is _+ju _+kno
_+night _+qu _t+re _t+hi _t+hat _t+ab _t+ell _t+hr _t+urned _the+n _the+ir _a+re _a+bou _a+lw _w+hi _w+hat _w+ho
nd+s nd+er _s+o _s+it _s+id _s+ome _s+hould _s+mall _s+un _o+f _o+ther _o+ut _o+pen or+ning _c+ould _c+hi _c+oun
_c+han it+tle ou+gh ld+re _b+rok _m+y _m+ore _m+ad _m+other _m+orning _l+et _l+on _l+ittle _g+re _g+on _g+iv _it+s
_to+ld _to+ok
"""


def ensure(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of the tiny model, and make it first if need be (under a second, 17 MB).

    path: where to make it; by default in the user's cache. Several processes may call this at once, since the
    directory appears whole or not at all. Raises InvalidArgumentError if the directory holds anything else.
    """
    target = Path(path) if path is not None else cache() / f"tiny-{version()}"
    if _is_ours(target):
        return target
    is_foreign = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_foreign and not _is_ours(target):  # Another process may have made it since the first look.
        raise InvalidArgumentError("path", str(target), "must be absent, an empty directory, or hold the tiny model")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        partial.chmod(0o755)
        for name, content in _json_files().items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (partial / name).write_text(text, encoding="utf-8")
        save_file(dict(_tensors()), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "VERSION").write_text(version(), encoding="utf-8")
        partial.rename(target)
    except OSError:
        if not _is_ours(target):  # If it is ours, another process was first, with the same bytes.
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def version() -> str:
    """Return the name of the recipe. Another recipe has another version, and so another directory."""
    recipe = json.dumps(
        [_SEED, _PROJECTION_GAIN, _HEAD_GAIN, _RARE_ROW_SCALE, _END_ROW_SCALE, _json_files()], sort_keys=True
    )
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _is_ours(target: Path) -> bool:
    marker = target / "VERSION"
    return marker.is_file() and marker.read_text(encoding="utf-8") == version()


def _json_files() -> dict[str, dict[str, Any]]:
    vocab = _vocabulary()
    end = vocab[_SPECIAL_TOKENS[0]]
    return {
        "config.json": _config(len(vocab), end),
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "do_sample": True},
        "tokenizer.json": _tokenizer(vocab),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL_TOKENS[0],
            "pad_token": _SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
        },
    }


def _config(vocab_size: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": _MLP,
        "max_position_embeddings": 8192,
        "max_window_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte (GPT-2's byte-level alphabet), indexed by the byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges() -> list[list[str]]:
    space = _byte_symbols()[ord(" ")]
    return [pair.replace("_", space).split("+") for pair in _MERGES.split()]


def _vocabulary() -> dict[str, int]:
    """Return the ids of the tokens: the 256 bytes, then the merges in rank order, then the special tokens."""
    tokens = [*_byte_symbols(), *("".join(pair) for pair in _merges()), *_SPECIAL_TOKENS]
    return {token: index for index, token in enumerate(tokens)}


def _tokenizer(vocab: dict[str, int]) -> dict[str, Any]:
    words = {token: index for token, index in vocab.items() if token not in _SPECIAL_TOKENS}
    special = [(vocab[token], token) for token in _SPECIAL_TOKENS]
    return byte_level_bpe(words, _merges(), special, trim_offsets=False)


def _tensors() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    vocab = _vocabulary()
    yield "model.embed_tokens.weight", _random("model.embed_tokens.weight", (len(vocab), _HIDDEN), 1.0)
    for layer in range(_LAYERS):
        yield from _layer(f"model.layers.{layer}")
    yield "model.norm.weight", np.ones(_HIDDEN, np.float32)
    head = _random("lm_head.weight", (len(vocab), _HIDDEN), _HEAD_GAIN / math.sqrt(_HIDDEN))
    space = _byte_symbols()[ord(" ")]
    starts_word = [token in (",", ".") or (token.startswith(space) and len(token) > 2) for token in vocab]
    scales = np.where(starts_word, 1.0, _RARE_ROW_SCALE).astype(np.float32)
    scales[vocab[_SPECIAL_TOKENS[0]]] = _END_ROW_SCALE
    yield "lm_head.weight", head * scales[:, None]


def _layer(prefix: str) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    query, key = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    projections = {  # Maps a name to its numbers of outputs and inputs.
        "self_attn.q_proj": (query, _HIDDEN),
        "self_attn.k_proj": (key, _HIDDEN),
        "self_attn.v_proj": (key, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, query),
        "mlp.gate_proj": (_MLP, _HIDDEN),
        "mlp.up_proj": (_MLP, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _MLP),
    }
    for name, shape in projections.items():
        tensor = f"{prefix}.{name}.weight"
        yield tensor, _random(tensor, shape, _PROJECTION_GAIN / math.sqrt(shape[1]))
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        yield f"{prefix}.{name}.weight", np.ones(_HEAD_DIM, np.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", np.ones(_HIDDEN, np.float32)


def _random(name: str, shape: tuple[int, int], std: float) -> npt.NDArray[np.float32]:
    """Return nearly normal weights: each is the centred sum of four uniform 16-bit integers, rounded once."""
    count = shape[0] * shape[1]
    raw = np.frombuffer(hashlib.shake_256(f"{_SEED}/{name}".encode()).digest(8 * count), "<u2")
    centred = raw.reshape(count, 4).sum(axis=1, dtype=np.int64) - 2 * 0xFFFF
    unit = math.sqrt(4 * (65536**2 - 1) / 12)
    weights: npt.NDArray[np.float32] = centred.astype(np.float32) * np.float32(std / unit)
    return weights.reshape(shape)
