"""What a model is called on a command line or in a cluster file, and the path that it stands for.

Must not know what a model is made of.
"""

from __future__ import annotations

import re
from pathlib import Path

from corun.errors import InvalidArgumentError, UnavailableError
from corun.observe import stages

NOT_NEEDED = ["original/*", "*.gguf", "*.pth"]
"""Files of a hub's repository that hold the weights once more."""
TINY = "tiny"
"""The model name that stands for the built-in model."""
_HUB_CACHE = re.compile(r"models--(.+)/snapshots/[0-9a-f]+$")
"""Where the hub's library keeps a model."""
_BUILT_IN = re.compile(rf"{TINY}-[0-9a-f]{{12}}$")
"""The directory of the built-in model (`corun.models.tiny.ensure`)."""


def resolve_model(model: str) -> str:
    """The path of a local model, made first if it is the built-in one; a hub id stays as it is."""
    if model == TINY:
        from corun.models import tiny  # Needs numpy and safetensors, which no other model does.  # noqa: PLC0415

        return str(tiny.ensure())
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InvalidArgumentError("model", model, "must be 'tiny', a directory with a config.json, or a hub id")
    return model


def downloaded(model: str) -> str:
    """The directory of a model. Of a hub id, all of it is fetched into the hub's cache, if it is not there yet.

    Raises:
        UnavailableError: the hub does not have it, or cannot be reached.
    """
    if Path(model).is_dir():
        return model
    # Comes with the engine, which no client has.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    stages.enter(f"fetching {model} from the hub")
    try:
        return str(snapshot_download(model, ignore_patterns=NOT_NEEDED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UnavailableError(f"model {model} could not be fetched from the hub: {error}") from error


def served_name(model: str) -> str:
    """What clients call the model of a directory, or of a hub id: its id on the hub, else the directory's own name."""
    path = Path(model)
    if cached := _HUB_CACHE.search(path.as_posix()):
        return cached[1].replace("--", "/", 1)
    if _BUILT_IN.match(path.name):
        return TINY
    return path.name if path.is_absolute() and path.name else model
