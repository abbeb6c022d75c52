"""Check that this commit can be released: tag, version and CHANGELOG.md agree, and its distributions are what they say.

    make release-check                    all of it; leaves the two files that were checked in dist/
    make release-check ARGS=--no-install  without the last part, which needs a package index

The version stands in one place, `corun.__version__`. The distributions are built twice, the second time from the source
distribution in another directory, and must have the same bytes. The exit code is 1 if anything is not right.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0
IMAGES = re.compile(r"(?:newTag: |appVersion: |image\.version=|corun-(?:router|node):)\"?(\d+\.\d+\.\d+)")
"""Where an image or a chart says its version."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true", help="do not install the wheel into a new environment")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="directory of the built files")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import corun  # noqa: PLC0415
    from corun.contract import CONTRACT_VERSION  # noqa: PLC0415

    version = corun.__version__
    problems = [
        *tag_problems(version, _git("tag", "--points-at", "HEAD").split(), _git("tag", "--list").split()),
        *(f"is not committed: {line[3:]}" for line in _git("status", "--porcelain").splitlines()),
        *changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, CONTRACT_VERSION),
        *image_problems(version),
    ]
    with tempfile.TemporaryDirectory(prefix="corun-release-") as scratch:
        built = build(exported(Path(scratch)), Path(scratch))
        problems += [*built_problems(built)]
        if not options.no_install:
            problems += installed_problems(built, Path(scratch), f"corun {version} (contract {CONTRACT_VERSION})")
        options.dist.mkdir(parents=True, exist_ok=True)
        for path in built[:2]:
            shutil.copy(path, options.dist)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {options.dist / path.name}")
    for problem in problems:
        print(f"not right: {problem}", file=sys.stderr)
    if not problems:
        print(f"{version} can be released; its tag is v{version}")
    return 1 if problems else 0


def tag_problems(version: str, here: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the tags. A commit that is not tagged yet may be checked before it is."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", version):
        yield f"version {version}: must be MAJOR.MINOR.PATCH, with aN, bN or rcN for what comes before a release"
    wanted, here = f"v{version}", [tag for tag in here if tag.startswith("v")]
    for tag in here:
        if tag != wanted:
            yield f"tag {tag}: must be {wanted}, since corun.__version__ is {version}"
    if wanted in known and wanted not in here:
        yield f"tag {wanted}: is at another commit, so corun.__version__ must be raised"


def changelog_problems(text: str, version: str, contract: int) -> Iterator[str]:
    """Yield what CHANGELOG.md lacks: a dated section of the version above all others, and the contract's version."""
    sections = re.findall(r"^## \[([^\]]+)\](.*)$", text, flags=re.MULTILINE)
    names = [name for name, _ in sections]
    if names[:2] != ["Unreleased", version]:
        found = ", ".join(names[:2]) or "none"
        yield f"CHANGELOG.md: its first sections must be Unreleased and {version}; they are {found}"
    dates = {name: rest for name, rest in sections if name != "Unreleased"}
    for name, rest in dates.items():
        if not re.fullmatch(r" - \d{4}-\d\d-\d\d", rest):
            yield f"CHANGELOG.md: the heading of {name} must end with its date, as in [{name}] - 2026-11-25"
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## ")[0].strip()
    if unreleased:
        yield f"CHANGELOG.md: what stands under Unreleased must go under {version}"
    told = [int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)]
    if not told or max(told) != contract:
        yield f"CHANGELOG.md: its table of contract versions must end with {contract}, the code's"


def image_problems(version: str) -> Iterator[str]:
    """Yield each place of the images and of Kubernetes' files that has another version."""
    for path in [ROOT / "Dockerfile", *sorted((ROOT / "k8s").rglob("*"))]:
        if path.is_file() and path.suffix in ("", ".md", ".yaml"):
            for found in IMAGES.findall(path.read_text(encoding="utf-8")):
                if found != re.split("[abr]", version)[0]:
                    yield f"{path.relative_to(ROOT)}: says version {found}, and corun.__version__ is {version}"


def exported(scratch: Path) -> Path:
    """Return a directory with the files of this commit and no others."""
    archive = scratch / "commit.tar"
    _git("archive", "--output", str(archive), "HEAD")
    return _unpacked(archive, scratch / "first")


def build(source: Path, scratch: Path) -> list[Path]:
    """Return the source distribution and the wheel of a directory, and then both once more, made from the former."""
    first = _built(source, scratch / "dist-1", zone="UTC", mask=0o022)
    (top,) = _unpacked(first[0], scratch / "second").iterdir()
    return first + _built(top, scratch / "dist-2", zone="Asia/Kathmandu", mask=0o077)


def _built(source: Path, target: Path, *, zone: str, mask: int) -> list[Path]:
    # Without SOURCE_DATE_EPOCH every file in a distribution has one constant date.
    environment = {name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    _run(
        sys.executable, "-m", "hatchling", "build", "-d", target, cwd=source, env=environment | {"TZ": zone}, umask=mask
    )
    return sorted(target.iterdir(), key=lambda path: path.suffix)  # .gz before .whl


def _unpacked(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as file:
        # Pythons before 3.10.12 and 3.11.4, such as Debian 12's, have no filters. The archive is our own.
        file.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return target


def built_problems(built: list[Path]) -> Iterator[str]:
    """Yield what is wrong with distributions: bytes that are not the same again, and what their checkers find."""
    (first_source, first_wheel, second_source, second_wheel) = built
    for one, other in ((first_source, second_source), (first_wheel, second_wheel)):
        if one.name != other.name or not filecmp.cmp(one, other, shallow=False):
            yield f"{one.name}: built again from the source distribution, it has other bytes"
    checks = {"twine": ("check", "--strict", first_source, first_wheel), "check_wheel_contents": (first_wheel,)}
    for module, words in checks.items():
        done = _run(sys.executable, "-m", module, *words, cwd=ROOT, check=False)
        if done.returncode:
            yield f"{module}: {done.stdout.strip()} {done.stderr.strip()}"


def installed_problems(built: list[Path], scratch: Path, wanted: str) -> Iterator[str]:
    """Yield what is wrong with the wheel once it is installed, from the package index, into a new environment."""
    python = scratch / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, scratch / "venv", cwd=scratch)
    _run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, built[1], cwd=scratch)
    for words in (["--version"], ["--help"], ["generate", "--help"]):
        done = _run(python.with_name("corun"), *words, cwd=scratch, env=environment, check=False)
        if done.returncode or (words == ["--version"] and done.stdout.strip() != wanted):
            yield f"corun {' '.join(words)} of the wheel: exit code {done.returncode}: {done.stdout}{done.stderr}"


def _git(*words: str) -> str:
    return _run("git", *words, cwd=ROOT).stdout


def _run(*words: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
