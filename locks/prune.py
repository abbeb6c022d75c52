"""Print what a requirement does not need of an environment: `python locks/prune.py 'corun-llm[cpu]'`.

A lock file also holds everything for development. The script runs in the environment itself and prints, a line each,
the distributions that the requirement does not reach through the metadata of the installed distributions. It must not
know what is in the environment, nor how distributions are removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(root: str) -> set[str]:
    """Return the canonical names of the distributions that a requirement reaches, including its own."""
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(Requirement(root).name), extra) for extra in ("", *Requirement(root).extras)]
    while todo:
        name, extra = found = todo.pop()
        if found not in seen:
            seen.add(found)
            todo.extend(_requirements(name, extra))
    return {name for name, _ in seen}


def _requirements(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return  # It is for another platform, or left out of the lock on purpose.
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for further in ("", *requirement.extras):
                yield canonicalize_name(requirement.name), further


def main() -> None:
    installed = {canonicalize_name(found.name) for found in metadata.distributions()}
    for name in sorted(installed - needed(sys.argv[1])):
        print(name)


if __name__ == "__main__":
    main()
