"""The model that fake engines claim to run: a tokenizer with a token per byte, and a contract that names no hardware.

Routers load the tokenizer like any other model's. This module must not know engines or nodes.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.testing.engines import BLOCK_SIZE, MAX_MODEL_LEN
from corun.types import NodeRole
from router.text import BYTE_ALPHABET, VERSION, Tokenizer


def write_tokenizer(directory: Path) -> str:
    """Write a model's tokenizer.json with one token per byte; return the directory."""
    vocab = {char: i for i, char in enumerate(BYTE_ALPHABET)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))  # Readers expect these keys.
    parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    content = {"version": "1.0", "added_tokens": [], **absent, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return str(directory)


def contract(role: NodeRole, model: str, *, slots: int = 8, **changes: Any) -> Contract:
    """Return the contract of a node with a fake engine. changes: other values for fields of its model part."""
    facts: dict[str, Any] = {
        "weights_digest": "w" * 64,
        "tokenizer_digest": Tokenizer.load(model).digest,
        "tokenizers": VERSION,
        "dtype": "float32",
        "driver": "",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        **changes,
    }
    return filled_contract(role, slots, **facts)


def filled_contract(role: NodeRole, slots: int, **model: Any) -> Contract:
    """Return a contract in which all but the slots and these fields of the model part is "none", 1 or empty."""
    parts: dict[str, Any] = {"model": _filled(ModelContract, model)}
    if role is NodeRole.PREFILL:
        parts["prefill"] = _filled(PrefillContract, {})
    else:
        parts["decode"] = _filled(DecodeContract, {"slots": slots})
    return Contract(role=role, **parts)


def _filled(part: type[Any], values: dict[str, Any]) -> Any:
    plain = {"str": "none", "int": 1}
    return part(**{field.name: plain.get(str(field.type), ()) for field in fields(part)} | values)
