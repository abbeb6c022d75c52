"""Names of models on a command line or in a cluster file, and the paths that they stand for.

This package must not know what a model is made of.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from corun.errors import InvalidArgumentError, UnavailableError
from corun.observe import stages

NOT_NEEDED = ["original/*", "*.gguf", "*.pth"]
"""The files of a hub repository that hold the same weights a second time."""
TINY = "tiny"
"""The model name that stands for the built-in model of random weights, which is made where it is needed."""
SMOLLM2 = "smollm2"
"""The model name that stands for a small model that talks, which is fetched once (`corun.models.smollm2`)."""
NAMED = (TINY, SMOLLM2)
_STAGE_BYTES = 10_000_000
"""The bytes of a fetched model between two lines in the log."""
_HUB_CACHE = re.compile(r"models--(.+)/snapshots/[0-9a-f]+$")
"""The path at which the hub's library keeps a model."""
_CACHED = re.compile(rf"({'|'.join(NAMED)})-[0-9a-f]{{12}}$")
"""The name of the directory of a model of `NAMED` in the user's cache."""


def resolve_model(model: str) -> str:
    """Return the path of a local model; a hub id stays as it is. A model of `NAMED` is made first if need be.

    Raises:
        InvalidArgumentError: a path without a model.
        UnavailableError: smollm2 is not here, and cannot be fetched.
    """
    return made(model) if model in NAMED else checked(model)


def made(model: str) -> str:
    """Return the directory of a model of `NAMED`. It is made first if need be, and the log says how far that is."""
    # Only who makes a model needs numpy and safetensors.
    if model == TINY:
        from corun.models import tiny  # noqa: PLC0415

        return str(tiny.ensure())
    from corun.models import smollm2  # noqa: PLC0415

    said: tuple[str, int] | None = None

    def tell(doing: str, fetched: int) -> None:
        nonlocal said
        if (now := (doing, fetched // _STAGE_BYTES)) != said:
            said = now
            stages.enter(f"{doing}, {fetched // 10**6} of {smollm2.SIZE // 10**6} MB")

    return str(smollm2.ensure(tell=tell))


def checked(model: str) -> str:
    """Return the absolute path of a local model. A hub id and a name of `NAMED` stay as they are; nothing is made.

    Raises InvalidArgumentError for a path without a model.
    """
    if model in NAMED:
        return model
    path = Path(os.path.expanduser(model))  # `Path.expanduser` raises RuntimeError for the home of nobody.
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        named = ", ".join(map(repr, NAMED))
        raise InvalidArgumentError("model", model, f"must be {named}, a directory with a config.json, or a hub id")
    return model


def downloaded(model: str) -> str:
    """Return the directory of a model. It is first fetched or made, if need be.

    Raises:
        UnavailableError: the hub, or the package index, does not have it or cannot be reached.
    """
    if model in NAMED:
        return made(model)
    if Path(model).is_dir():
        return model
    # This package comes with the engine, which clients do not have.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    stages.enter(f"fetching {model} from the hub")
    try:
        return str(snapshot_download(model, ignore_patterns=NOT_NEEDED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UnavailableError(f"model {model} could not be fetched from the hub: {error}") from error


def served_name(model: str) -> str:
    """Return the name by which clients call a model: its id on the hub, else the name of its directory."""
    path = Path(model)
    if cached := _HUB_CACHE.search(path.as_posix()):
        return cached[1].replace("--", "/", 1)
    if named := _CACHED.match(path.name):
        return named[1]
    return path.name if path.is_absolute() and path.name else model
