"""Writes checkpoints with random weights at real scale: `python -m tests.gpu.checkpoints NAME DIR [--device cpu]`.

Dummy weights of +-1e-3 give flat logits, with which every system looks deterministic. These are normal with standard
deviation 0.02 (more in the tiny ones, which are narrow), norms are 1, so that differences in the last bit move tokens
within a few steps. Names and shapes are those of the published checkpoints. The device draws and threads write: 16 GB
take seconds. A complete checkpoint of the same configuration is left as it is.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from corun.models import tiny

SEED = 7
WRITERS = 8
"""Threads that write; each has at most one shard in host memory."""
ROUTER_BIAS = "e_score_correction_bias"
ROUTER_BIAS_STD = 0.01
"""Small beside the scores, which are sigmoids: it decides between experts that are nearly level."""
INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 40960,
    "rope_theta": 10000,
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMOLLM2: dict[str, Any] = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.0417,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE_1B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
DENSE_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "vocab_size": 512,
    "initializer_range": 0.1,
}
MOE_TINY = TINY | {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64, "num_experts": 16}
MLA_TINY = TINY | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": SMOLLM2,
    "qwen3-1.7b": QWEN3 | DENSE_1B | {"tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | DENSE_8B,
    "qwen3-8b-4l": QWEN3 | DENSE_8B | {"num_hidden_layers": 4},
    "qwen3-4l-head-64": QWEN3 | DENSE_8B | {"num_hidden_layers": 4, "head_dim": 64},
    "qwen3-30b-a3b": QWEN3_MOE | {"num_hidden_layers": 48},
    "qwen3-30b-a3b-12l": QWEN3_MOE | {"num_hidden_layers": 12},
    "deepseek-v3-small": DEEPSEEK_V3,
    # Scores of experts in 32 bits, for which vLLM has router kernels for few rows (corun/node/vllm/gate.py).
    "deepseek-v3-small-fp32-router": DEEPSEEK_V3 | {"moe_router_dtype": "float32"},
    "moe-tiny": QWEN3_MOE | MOE_TINY | {"bos_token_id": 1, "eos_token_id": 2},
    "mla-tiny": DEEPSEEK_V3 | MLA_TINY,
}


def shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of all tensors of a checkpoint."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        norms: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        parts = {**norms, **_attention(config), **_mlp(config, layer)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found


def _attention(config: dict[str, Any]) -> Shapes:
    """[outputs, inputs] of DeepSeek-V3's latent attention (MLA), or of grouped attention, Qwen3's or Llama's."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        query_rank, rank = config["q_lora_rank"], config["kv_lora_rank"]
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        own: Shapes = {
            "q_a_layernorm": (query_rank,),
            "kv_a_layernorm": (rank,),
            "q_a_proj": (query_rank, hidden),
            "q_b_proj": (heads * (plain + rotated), query_rank),
            "kv_a_proj_with_mqa": (rank + rotated, hidden),
            "kv_b_proj": (heads * (plain + config["v_head_dim"]), rank),
            "o_proj": (hidden, heads * config["v_head_dim"]),
        }
    else:
        head = config["head_dim"]
        queries, keys = heads * head, config["num_key_value_heads"] * head
        norms: Shapes = {} if config["model_type"] == "llama" else {"q_norm": (head,), "k_norm": (head,)}
        own = norms | {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }
    return {f"self_attn.{name}.weight": shape for name, shape in own.items()}


def _mlp(config: dict[str, Any], layer: int) -> Shapes:
    experts = config.get("num_experts", config.get("n_routed_experts", 0))
    if not experts or layer < config.get("first_k_dense_replace", 0):
        return _gated("mlp", config, config["intermediate_size"])
    width = config["moe_intermediate_size"]
    found: Shapes = {"mlp.gate.weight": (experts, config["hidden_size"])}
    if config.get("topk_method") == "noaux_tc":
        found[f"mlp.gate.{ROUTER_BIAS}"] = (experts,)
    if shared := config.get("n_shared_experts", 0):
        found |= _gated("mlp.shared_experts", config, shared * width)
    for expert in range(experts):
        found |= _gated(f"mlp.experts.{expert}", config, width)
    return found


def _gated(prefix: str, config: dict[str, Any], width: int) -> Shapes:
    hidden = config["hidden_size"]
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard; `start` and `end` are bytes within the shard's data."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.name.endswith(ROUTER_BIAS) else torch.bfloat16

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * int(self.dtype.itemsize)


def shards(found: Shapes) -> dict[str, list[Tensor]]:
    """Tensors by file: a file per layer and one for each of the others. Wide types come first and stay aligned."""
    files: dict[str, list[Tensor]] = {}
    for name in sorted(found, key=lambda name: not name.endswith(ROUTER_BIAS)):
        parts = name.split(".")
        file = f"layer-{int(parts[2]):03d}" if parts[1] == "layers" else "-".join(parts)
        placed = files.setdefault(f"{file}.safetensors", [])
        placed.append(Tensor(name, found[name], placed[-1].end if placed else 0))
    return files


def draw(tensors: list[Tensor], std: float, embedding_std: float, seed: int, device: str) -> torch.Tensor:
    """The data of one shard, as bytes in host memory."""
    generator = torch.Generator(device=device).manual_seed(seed)
    data = torch.empty(tensors[-1].end, dtype=torch.uint8, device=device)
    for tensor in tensors:
        values = data[tensor.start : tensor.end].view(tensor.dtype)
        if tensor.name.endswith(ROUTER_BIAS):
            values.normal_(0, ROUTER_BIAS_STD, generator=generator)
        elif len(tensor.shape) == 1:
            values.fill_(1.0)
        else:
            values.normal_(0, embedding_std if "embed" in tensor.name else std, generator=generator)
    if device == "cpu":
        return data
    host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(data)
    return host


def header(tensors: list[Tensor]) -> bytes:
    """The head of a safetensors file: its length, then JSON."""
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        place = [tensor.start, tensor.end]
        entries[tensor.name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(name: str, directory: Path, device: str) -> int:
    """Writes config, tokenizer and weights, the index last; returns the bytes of weights written."""
    source = tiny.ensure()  # The tiny model's tokenizer: text is not what these models are for.
    end = json.loads((source / "config.json").read_text())["eos_token_id"]
    config = CONFIGS[name] | {"eos_token_id": end}  # One that the tokenizer has, so that outputs can be constrained.
    files = shards(shapes(config))
    text = json.dumps(config, indent=1)
    if (directory / INDEX).is_file() and (directory / "config.json").read_text() == text:
        return 0
    total = sum(tensors[-1].end for tensors in files.values())
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free) < total:
        raise OSError(f"{directory} has {free / 1e9:.1f} GB left, and the weights need {total / 1e9:.1f} GB")
    (directory / "config.json").write_text(text)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    for tokenizer in ("tokenizer.json", "tokenizer_config.json"):
        (directory / tokenizer).write_bytes((source / tokenizer).read_bytes())

    std = config["initializer_range"]
    embedding_std = std if config["tie_word_embeddings"] else 1.0  # If tied, it is the last product's weights, too.

    def write_shard(number: int, file: str) -> None:
        data = draw(files[file], std, embedding_std, SEED * 1000 + number, device)
        with (directory / file).open("wb") as sink:
            sink.write(header(files[file]))
            sink.write(memoryview(data.numpy()))

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(write_shard, *item) for item in enumerate(files)]:
            done.result()
    index = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def main(
    name: Annotated[Literal[tuple(CONFIGS)], tyro.conf.Positional],  # type: ignore[valid-type]
    directory: tyro.conf.Positional[Path],
    device: Literal["auto", "cuda", "cpu"] = "auto",
) -> int:
    """Writes a checkpoint with random weights at real scale."""
    began = time.monotonic()
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    size = write(name, directory, chosen)
    print(json.dumps({"checkpoint": name, "gb": round(size / 1e9, 2), "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
