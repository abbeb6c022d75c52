"""What a model is called on a command line or in a cluster file, and the path that it stands for.

Must not know what a model is made of.
"""

from __future__ import annotations

from pathlib import Path

from corun.errors import InvalidArgumentError

TINY = "tiny"
"""The model name that stands for the built-in model."""


def resolve_model(model: str) -> str:
    """The path of a local model, made first if it is the built-in one; a hub id stays as it is."""
    if model == TINY:
        from corun import tiny  # Needs numpy and safetensors, which no other model does.  # noqa: PLC0415

        return str(tiny.ensure())
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InvalidArgumentError("model", model, "must be 'tiny', a directory with a config.json, or a hub id")
    return model
