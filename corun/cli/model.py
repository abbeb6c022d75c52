"""`corun model`: make the built-in tiny model as a directory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import tyro

from corun.cli.options import OptionalPath
from corun.config.extras import needs_extra


@dataclass(frozen=True, kw_only=True)
class Model:
    """Make the built-in tiny model and print its directory.

    examples:
      corun model                     in the user's cache
      corun model ./tiny              anywhere else
    """

    path: tyro.conf.Positional[OptionalPath] = None
    """Directory to make; by default in the user's cache, and only if it is not there yet."""

    def run(self) -> int:
        with needs_extra("corun model", "cpu"):
            tiny = importlib.import_module("corun.models.tiny")
        print(tiny.ensure(self.path))
        return 0
