"""Keeps what a node found in the test of its freedoms, in the user's cache, for its next start.

The test takes 17 to 23 s of a pair's start on a GPU. What it finds is decided by the contract, the engine's settings,
the GPUs, and the code of the test itself. All of that is in the name of the file, so that a node that differs in any of
it tests itself again.

Owns: the files, and what is in their names. Must not know: what is tested, and how.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import corun
from corun.models.files import cache

CODE = ("corun", "prefill_node", "decode_node", "colocated_node")
"""The packages whose code decides what is tested and how."""
log = logging.getLogger(__name__)


def folder() -> Path:
    """Return the directory of the kept results, which may not be there yet."""
    return cache() / "certificates"


def code_digest(root: Path | None = None) -> str:
    """Return SHA-256 over this project's code that nodes run, as 64 hex digits. root: where its packages are."""
    root = root or Path(corun.__file__).parents[1]
    total = hashlib.sha256()
    for file in sorted(file for package in CODE for file in (root / package).rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def path(decided_by: Mapping[str, Any]) -> Path:
    """Return the file of a result. decided_by: all that decides it, the code included, as JSON values."""
    text = json.dumps(decided_by, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def parts(decided_by: Mapping[str, Any]) -> str:
    """Return a short digest of each thing that decides a result. Two starts' lines show which of them differs."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in decided_by.items()}
    return ", ".join(f"{name} {hashlib.sha256(text.encode()).hexdigest()[:8]}" for name, text in texts.items())


def load(file: Path) -> list[dict[str, Any]] | None:
    """Return what each rank found; None if nothing was kept, or if the file does not have the digest of its content.

    The digest shows damage. It is no protection against somebody who may write to the user's cache, where compiled code
    lies beside it.
    """
    try:
        content = json.loads(file.read_text())
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(file.stat().st_mtime))
        found: list[dict[str, Any]] = content["found"]
        if content["sha256"] != _digest(file, found):
            raise ValueError("it is damaged")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("the kept certificate %s is not used: %s", file, error)
        return None
    log.info("the certificate of %s is used again (%s)", made, file)
    return found


def save(file: Path, found: list[dict[str, Any]]) -> None:
    """Keep what each rank found. A node that cannot write to the user's cache tests itself at each start."""
    own = None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as opened:  # Only its owner can read it.
            own = Path(opened.name)
            json.dump({"found": found, "sha256": _digest(file, found)}, opened)
        own.replace(file)
    except OSError as error:
        log.warning("the certificate is not kept: %s", error)
        if own is not None:
            with suppress(OSError):
                own.unlink()


def forget() -> None:
    """Delete all kept results, since one of this user's nodes was seen to give wrong bits.

    They are few, and which of them are to blame is not known. All nodes test themselves again at their next start.
    """
    for file in folder().glob("*.json"):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.error("delete %s, or the next start may use it: %s", file, error)


def _digest(file: Path, found: list[dict[str, Any]]) -> str:
    """Return SHA-256 over a result and the name of its file, as 64 hex digits."""
    return hashlib.sha256(f"{file.name} {json.dumps(found, sort_keys=True)}".encode()).hexdigest()
