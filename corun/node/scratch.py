"""The folder of one user's nodes on one machine: the locks of GPUs, and a folder for each engine's sockets.

vLLM's processes are killed when a node ends, so the sockets between them stay behind as files. Therefore each node
gives them a folder of its own and removes it at its end. Who starts removes those of nodes that were killed. Must not
know: vLLM.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LONGEST = 70
"""The longest path of a folder of sockets, in bytes. Linux allows 107 for a socket. A slash and vLLM's name take 37."""
_PREFIX = "engine-"
_mine: list[Path] = []
log = logging.getLogger(__name__)


def own_folder(base: Path | None = None) -> Path:
    """Return the folder in the directory of temporary files (or `base`), and make it if it is not there.

    Raises OSError if it cannot be made, or belongs to another user.
    """
    found = (base or Path(tempfile.gettempdir())) / f"corun-{os.getuid()}"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if found.stat(follow_symlinks=False).st_uid != os.getuid():
        raise PermissionError(f"{found} is another user's")
    return found


def socket_folder(base: Path | None = None) -> Path | None:
    """Make a folder for the sockets of this process's engine. Remove those of processes that have ended.

    Return None if it cannot be made: then vLLM's sockets are made among all temporary files, and stay there.
    """
    try:
        parent = own_folder(base)
        if len(bytes(parent)) + len(f"/{_PREFIX}12345678") > LONGEST:
            parent = own_folder(Path("/tmp"))
        _remove_abandoned(parent)
        folder = _locked_folder(parent)
    except OSError as error:
        log.warning("the sockets of this node's engine will stay behind: %s", error)
        return None
    _mine.append(folder)
    atexit.register(leave)
    return folder


def leave() -> None:
    """Remove this process's folders, once its engine has ended."""
    while _mine:
        shutil.rmtree(_mine.pop(), ignore_errors=True)


def _locked_folder(parent: Path) -> Path:
    """Make a folder whose lock this process holds as long as it lives. Others look at it once it has its name."""
    fresh = Path(tempfile.mkdtemp(prefix="fresh-", dir=parent))
    descriptor = os.open(fresh, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # The file system has no such locks.
        os.close(descriptor)
        fresh.rmdir()
        raise
    return fresh.rename(parent / fresh.name.replace("fresh-", _PREFIX))


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # Its node lives, or another one is removing it.
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
