"""A release: what is told of it in several places must agree, and what is built must be what is told."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import corun
from corun.contract import CONTRACT_VERSION

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
assert SPEC is not None
assert SPEC.loader is not None
release: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

GOOD = "## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- a\n\n## [1.1.0] - 2025-12-31\n\n| 1 | x |\n| 2 | y |\n"


@pytest.mark.parametrize(
    ("version", "here", "known", "wrong"),
    [
        ("1.2.0", ["v1.2.0"], ["v1.1.0", "v1.2.0"], []),
        ("1.2.0", [], ["v1.1.0"], []),  # Before it is tagged.
        ("1.2.0rc1", ["v1.2.0rc1", "nightly"], ["v1.2.0rc1", "nightly"], []),
        ("1.2.0", ["v1.3.0"], ["v1.3.0"], ["tag v1.3.0: must be v1.2.0"]),
        ("1.2.0", [], ["v1.2.0"], ["tag v1.2.0: is at another commit"]),
        ("1.2", [], [], ["version 1.2: must be MAJOR.MINOR.PATCH"]),
    ],
)
def test_the_tag_is_that_of_the_version(version: str, here: list[str], known: list[str], wrong: list[str]) -> None:
    found = list(release.tag_problems(version, here, known))
    assert len(found) == len(wrong)
    assert all(one.startswith(other) for one, other in zip(found, wrong, strict=True))


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("", "", []),
        ("[1.2.0]", "[1.2.1]", ["its first sections must be Unreleased and 1.2.0; they are Unreleased, 1.2.1"]),
        ("## [Unreleased]", "", ["they are 1.2.0, 1.1.0"]),
        (" - 2026-01-31", "", ["the heading of 1.2.0 must end with its date"]),
        (" - 2025-12-31", " - yesterday", ["the heading of 1.1.0 must end with its date"]),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- b\n", ["what stands under Unreleased must go under 1.2.0"]),
        ("| 2 | y |\n", "", ["its table of contract versions must end with 2"]),
        ("| 2 | y |", "| 2 | y |\n| 3 | z |", ["its table of contract versions must end with 2"]),
    ],
)
def test_the_changelog_is_that_of_the_version(old: str, new: str, wrong: list[str]) -> None:
    found = list(release.changelog_problems(GOOD.replace(old, new, 1), "1.2.0", 2))
    assert len(found) == len(wrong), found
    assert all(other in one for one, other in zip(found, wrong, strict=True)), found


def test_this_changelog_tells_the_contract_and_dates_every_release() -> None:
    """It need not be ready for a release, so what is not released may stand in it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.sub(r"(?s)(## \[Unreleased\]\n).*?(?=\n## )", r"\1", text)
    versions = re.findall(r"^## \[(\d[^\]]*)\]", text, flags=re.MULTILINE)
    assert list(release.changelog_problems(released, versions[0], CONTRACT_VERSION)) == []
    parts = [Version(one) for one in versions]
    assert parts == sorted(set(parts), reverse=True)
    assert parts[0] <= Version(corun.__version__)


def test_images_and_manifests_have_the_version() -> None:
    assert list(release.image_problems(corun.__version__)) == []
    assert list(release.image_problems(f"{corun.__version__}rc1")) == []
    wrong = list(release.image_problems("9.9.9"))
    assert any(one.startswith("Dockerfile: ") for one in wrong)
    assert any(one.startswith("k8s/") for one in wrong)


@pytest.mark.slow
def test_the_distributions_have_the_same_bytes_again_and_their_checkers_accept_them(tmp_path: Path) -> None:
    """The files of this directory are built, whether they are committed or not."""
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "dist", ".*_cache", ".hypothesis", "node_modules")
    shutil.copytree(ROOT, source, ignore=ignored)
    built = release.build(source, tmp_path)
    assert [path.name.removeprefix(f"corun_llm-{corun.__version__}") for path in built] == [
        ".tar.gz",
        "-py3-none-any.whl",
    ] * 2
    assert list(release.built_problems(built)) == []
    built[3].write_bytes(b"")
    (wrong,) = release.built_problems(built)
    assert wrong.endswith("it has other bytes")
