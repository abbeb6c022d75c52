"""The model that fake engines claim to run: a tokenizer with a token per byte, and a contract that names no hardware.

Routers load the tokenizer like any other model's. This module must not know engines or nodes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.testing.engines import BLOCK_SIZE, MAX_MODEL_LEN
from corun.types import NodeRole
from router.text import VERSION, Tokenizer


def write_tokenizer(directory: Path) -> str:
    """Write a model's tokenizer.json with one token per byte; return the directory."""
    # In byte-level BPE, printable characters stand for themselves, and others from 256 on for all other bytes.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    vocab = {chr(code): i for i, code in enumerate([*printable, *range(256, 512 - len(printable))])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))  # Readers expect these keys.
    parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    content = {"version": "1.0", "added_tokens": [], **absent, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return str(directory)


def contract(role: NodeRole, model: str, *, slots: int = 8, **changes: Any) -> Contract:
    """Return the contract of a node with a fake engine. changes: other values for fields of its model part."""
    part = replace(_model_contract(model), **changes)
    if role is NodeRole.PREFILL:
        prefill = PrefillContract(
            attention_backend="none",
            runner="fake",
            chunk_size=64,
            buckets=(),
            split_policy="split-kv on",
            multiprocessors=0,
        )
        return Contract(role=role, model=part, prefill=prefill)
    decode = DecodeContract(
        attention_backend="none",
        runner="fake",
        sampler="hash 1",
        slots=slots,
        split_policy="off",
        graph="none",
        multiprocessors=0,
        eos_token_ids=(),
    )
    return Contract(role=role, model=part, decode=decode)


def _model_contract(model: str) -> ModelContract:
    return ModelContract(
        weights_digest="w" * 64,
        tokenizer_digest=Tokenizer.load(model).digest,
        config_digest="c" * 64,
        dtype="float32",
        quantization="none",
        kv_cache_dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=1,
        engine="fake 1",
        tokenizers=VERSION,
        torch="none",
        kernels=(),
        plugins=(),
        device="none",
        driver="",
        cuda="",
        cpu_isa="none",
        cpu_features=(),
        cpu_caches=(),
        threads=1,
        blas_policy="default",
        environment=(),
    )
