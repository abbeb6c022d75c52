"""A small Llama model in a GGUF file, written as llama.cpp's converter writes them, and the weights it was made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

from corun.models import tiny

F32 = npt.NDArray[np.float32]
LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 2, 64, 4, 2, 96
HEAD = HIDDEN // HEADS
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
_KINDS = {"F32": gguf.GGMLQuantizationType.F32, "Q4_1": gguf.GGMLQuantizationType.Q4_1}


def rotated(weight: F32, heads: int) -> F32:
    """Return rows as llama.cpp's converter stores them: row i of the first half of a head, row i of the second half."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def vocabulary() -> list[str]:
    """The special tokens, which come first as in SmolLM2's file, then bytes and merged tokens."""
    return [*SPECIAL, *tiny._byte_symbols(), *("".join(pair) for pair in tiny._merges())]


@dataclass
class Synthetic:
    """What goes into the file. A test changes it before it is written."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that differ from the usual ones."""
    left_out: str = ""
    """A tensor that is not written."""
    weights: dict[str, F32] = field(default_factory=dict)
    """The weights by their names in the file, before they are rotated and quantised."""

    def __post_init__(self) -> None:
        draw = np.random.default_rng(1)
        shapes = {"token_embd": (len(vocabulary()), HIDDEN), "output_norm": (HIDDEN,)}
        for layer in range(LAYERS):
            shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
            shapes |= {f"blk.{layer}.{name}": (MLP, HIDDEN) for name in ("ffn_gate", "ffn_up")}
            shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
            shapes |= {f"blk.{layer}.{name}": (KV_HEADS * HEAD, HIDDEN) for name in ("attn_k", "attn_v")}
            shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, MLP)
        self.weights = {
            f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, str(self.facts.get("general.architecture", "llama")))
        usual = {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": HIDDEN,
            "feed_forward_length": MLP,
            "head_count": HEADS,
            "head_count_kv": KV_HEADS,
            "rope_freq_base": 100000.0,
            "layer_norm_rms_eps": 1e-5,
        }
        for name, value in usual.items():
            getattr(writer, f"add_{name}")(value)
        tokens = vocabulary()
        writer.add_tokenizer_model(self.facts.get("tokenizer.ggml.model", "gpt2"))
        writer.add_tokenizer_pre(self.facts.get("tokenizer.ggml.pre", "smollm"))
        writer.add_token_list(tokens)
        kinds = self.facts.get("tokenizer.ggml.token_type", {})
        writer.add_token_types([kinds.get(i, 3 if i < len(SPECIAL) else 1) for i in range(len(tokens))])
        writer.add_token_merges([" ".join(pair) for pair in tiny._merges()])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
        for name, weight in self.weights.items():
            if name != self.left_out:
                stored, kind = self._stored(name, weight)
                writer.add_tensor(name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _stored(self, name: str, weight: F32) -> tuple[Any, gguf.GGMLQuantizationType]:
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        weight = weight if heads is None else rotated(weight, heads)
        kind = _KINDS["F32" if weight.ndim == 1 else "Q4_1"]
        return quantize(weight, kind), kind
