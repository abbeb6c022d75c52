"""Names of models on a command line or in a cluster file, and the paths that they stand for.

This package must not know what a model is made of.
"""

from __future__ import annotations

import re
from pathlib import Path

from corun.errors import InvalidArgumentError, UnavailableError
from corun.observe import stages

NOT_NEEDED = ["original/*", "*.gguf", "*.pth"]
"""The files of a hub repository that hold the same weights a second time."""
TINY = "tiny"
"""The model name that stands for the built-in model."""
_HUB_CACHE = re.compile(r"models--(.+)/snapshots/[0-9a-f]+$")
"""The path at which the hub's library keeps a model."""
_BUILT_IN = re.compile(rf"{TINY}-[0-9a-f]{{12}}$")
"""The name of the built-in model's directory (`corun.models.tiny.ensure`)."""


def resolve_model(model: str) -> str:
    """Return the path of a local model; a hub id stays as it is. The built-in model is made first if need be.

    Raises InvalidArgumentError for a path without a model.
    """
    if model == TINY:
        from corun.models import tiny  # Only this model needs numpy and safetensors here.  # noqa: PLC0415

        return str(tiny.ensure())
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InvalidArgumentError("model", model, "must be 'tiny', a directory with a config.json, or a hub id")
    return model


def downloaded(model: str) -> str:
    """Return the directory of a model. A model with a hub id is first fetched into the hub's cache, if need be.

    Raises:
        UnavailableError: the hub does not have it, or cannot be reached.
    """
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
    if _BUILT_IN.match(path.name):
        return TINY
    return path.name if path.is_absolute() and path.name else model
