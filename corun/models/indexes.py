"""The package indexes that uv and pip use for this user: their environment variables, then their configuration files.

This module must not know what is fetched from an index.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PUBLIC = "https://pypi.org/simple"
"""The index for users who have set none."""
_MAIN = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_EXTRA = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL")


def indexes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses of the indexes to ask, in order: the main one, then extra ones.

    A variable counts for more than a file, and what is set for uv for more than what is set for pip.
    """
    uv_main, uv_extra = _of_uv(environ)
    pip_main, pip_extra = _of_pip(environ)
    main = [*_words(environ, _MAIN), *uv_main, *pip_main, PUBLIC]
    found = [main[0], *_words(environ, _EXTRA), *uv_extra, *pip_extra]
    return list(dict.fromkeys(url.rstrip("/") for url in found))


def _words(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    """Return the addresses in variables. uv's may have a name before the address, as in mine=https://…"""
    return [_without_name(word) for name in names for word in environ.get(name, "").split()]


def _without_name(word: str) -> str:
    name, is_named, url = word.partition("=")
    return url if is_named and "/" not in name else word


def _of_uv(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    files = [_config(environ) / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]
    for path in [Path(environ["UV_CONFIG_FILE"])] if environ.get("UV_CONFIG_FILE") else files:
        try:
            found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
            tables = found.get("index", [])
            main = [table["url"] for table in tables if table.get("default")]
            extra = [table["url"] for table in tables if not table.get("default") and not table.get("explicit")]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            continue  # A file that uv cannot use either is uv's to complain of.
        return [*main, *filter(None, [found.get("index-url")])], [*extra, *found.get("extra-index-url", [])]
    return [], []


def _of_pip(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(_pip_files(environ), encoding="utf-8")  # A later file counts for more.
    except (configparser.Error, ValueError):
        return [], []
    main, extra = (parser.get("global", name, fallback="").split() for name in ("index-url", "extra-index-url"))
    return main, extra


def _pip_files(environ: Mapping[str, str]) -> Iterator[Path]:
    system = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    yield from (Path(directory) / "pip" / "pip.conf" for directory in reversed(system))
    yield Path("/etc/pip.conf")
    yield _home(environ) / ".pip" / "pip.conf"
    yield _config(environ) / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if environ.get("PIP_CONFIG_FILE"):
        yield Path(environ["PIP_CONFIG_FILE"])


def _config(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's configurations."""
    return Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config")


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or os.path.expanduser("~"))  # `Path.home` raises RuntimeError where there is none.
