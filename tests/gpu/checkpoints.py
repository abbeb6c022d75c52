"""Writes checkpoints with random weights at real scale: `python -m tests.gpu.checkpoints NAME DIR`.

Dummy weights of +-1e-3 give flat logits, with which every system looks deterministic. These are normal with standard
deviation 0.02, norms are 1, so that differences in the last bit move tokens within a few steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-8b-4l": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "num_attention_heads": 32},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a dense Qwen3 checkpoint."""
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_norm.weight": (head,),
            f"{prefix}self_attn.k_norm.weight": (head,),
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
        }
    return found


def write(name: str, directory: Path) -> None:
    """Writes config, weights in shards of one layer, and a byte-level tokenizer of the right size."""
    config = QWEN3 | {"num_key_value_heads": 8} | CONFIGS[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    _write_tokenizer(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(7)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, shape in shapes(config).items():
        parts = tensor_name.split(".")
        shard = f"layer-{int(parts[2]):03d}" if parts[1] == "layers" else tensor_name.replace(".", "-")
        weight = torch.ones(shape, device=device, dtype=torch.bfloat16)
        if len(shape) == 2:
            weight.normal_(0, 1.0 if "embed" in tensor_name else 0.02, generator=generator)
        shards.setdefault(shard, {})[tensor_name] = weight.cpu()
    index = {}
    for shard, tensors in shards.items():
        save_file(tensors, directory / f"{shard}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{shard}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_tokenizer(directory: Path) -> None:
    """The tiny model's tokenizer: text is not what these models are for."""
    from corun import tiny

    source = tiny.ensure()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
