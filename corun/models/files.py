"""Where models are kept that this project makes, and how their bytes are compared.

This module must not know which models there are.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_PIECE = 2**20


def cache() -> Path:
    """Return the directory in the user's cache that models are kept in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corun"


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
