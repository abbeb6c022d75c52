"""Where models are kept that this project makes, how their bytes are compared, and the form of their tokenizers.

This module must not know which models there are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_PIECE = 2**20


def cache() -> Path:
    """Return the directory in the user's cache that models are kept in."""
    # A user without a home gets a directory named ~, as from vLLM (envs.py); `Path.home` raises RuntimeError.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "corun"


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Iterable[list[str]],
    special: Iterable[tuple[int, str]],
    *,
    trim_offsets: bool,
    single_digits: bool = False,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json: byte-pair encoding of bytes, as of GPT-2.

    special: ids and texts of the special tokens. single_digits: each digit is a word of its own.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim_offsets, "use_regex": True}
    words = [{"type": "Digits", "individual_digits": True}, byte_level]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words} if single_digits else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }
