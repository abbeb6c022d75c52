"""What a cluster needs of a machine, and what a machine is seen to have."""

from __future__ import annotations

import importlib.util
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.config.extras import VLLM_VERSION
from corun.errors import UnavailableError
from corun.launch import preflight
from corun.launch.preflight import GIB, MIB, Finding, Machine, Weights, lacking_memory, look, weights

LAPTOP = Machine(
    engine="cpu", engine_version=VLLM_VERSION, memory=16 * GIB, shared_memory=GIB, cores=2, open_files=1 << 20
)
H200 = replace(LAPTOP, engine="gpu", gpus=(140 * GIB,), memory=256 * GIB, cores=16)
QWEN = Weights(size=16 * GIB, stored_as="bfloat16")
TINY = Weights(size=GIB // 16)


def spec(common: dict[str, Any] | None = None, **fields: Any) -> ClusterSpec:
    return ClusterSpec(pools=(PoolSpec(common={"model": "m", **(common or {})}, router={"port": 0}, **fields),))


def found(machine: Machine, size: Weights = TINY, wanted: ClusterSpec | None = None) -> dict[str, Finding]:
    return {one.what: one for one in look(wanted or spec(), machine, lambda model: size)}


def fails(machine: Machine, size: Weights = TINY, wanted: ClusterSpec | None = None) -> list[str]:
    return [what for what, one in found(machine, size, wanted).items() if one.state == "fails"]


def test_what_models_need() -> None:
    assert fails(LAPTOP) == []
    assert fails(H200, QWEN) == []
    assert fails(LAPTOP, QWEN) == ["memory"]
    assert found(LAPTOP, QWEN)["memory"] == Finding("memory", "about 37.0 GiB", "16.0 GiB free", "fails")
    twice = spec({"dtype": "float32"})  # Weights grow with their type.
    assert found(LAPTOP, QWEN, twice)["memory"].needs == "about 69.0 GiB"
    assert found(H200, QWEN, twice)["GPU memory of main"].needs == "about 34.0 GiB a node"


def test_more_nodes_need_more_memory() -> None:
    def lacking(free: int, **replicas: int) -> str:
        before = spec(replicas={"prefill": 1, "decode": 2})
        return lacking_memory(before, spec(replicas=replicas), free, lambda model: QWEN)

    assert lacking(0, prefill=1, decode=1) == "", "there are less"
    assert lacking(56 * GIB, prefill=2, decode=4) == ""  # 3 more, of 18.5 GiB each.
    told = "needs about 55.5 GiB of memory more, and this machine has 20.0 GiB free"
    assert lacking(20 * GIB, prefill=2, decode=4) == told


@pytest.mark.parametrize(
    ("change", "failing", "slow"),
    [
        ({"engine": "", "engine_version": ""}, ["engine"], []),
        ({"engine_version": "0.25.1"}, ["engine"], []),
        ({"missing": ("nixl", "ray")}, ["packages"], []),
        ({"memory": GIB}, ["memory"], []),
        ({"shared_memory": 64 * 2**20}, ["/dev/shm"], []),
        ({"engine": "gpu"}, ["GPUs"], []),
        ({"cores": 1, "open_files": 1024}, [], ["cores", "open files"]),
    ],
)
def test_what_is_not_there_is_named(change: dict[str, Any], failing: list[str], slow: list[str]) -> None:
    machine = replace(LAPTOP, **change)
    assert fails(machine) == failing
    assert [one.what for one in found(machine).values() if one.state == "slow"] == slow


def test_a_node_with_more_threads_than_cores_does_not_start() -> None:
    assert fails(LAPTOP, wanted=spec({"threads": 3})) == ["cores"]
    assert found(LAPTOP, wanted=spec({"threads": 2}))["cores"].state == "slow"
    assert found(LAPTOP, wanted=spec({"threads": 1}))["cores"].state == "ok"
    assert fails(H200, wanted=spec({"threads": 99})) == []


def test_gpus_are_shared_by_nodes_and_engines() -> None:
    assert found(H200, QWEN)["GPU memory of main"].has == "63.0 GiB a node"  # Half of 0.9 of it.
    assert fails(replace(H200, gpus=(24 * GIB,)), QWEN) == ["GPU memory of main"]
    assert fails(replace(H200, gpus=(24 * GIB,) * 2), QWEN) == []
    assert fails(H200, QWEN, spec({"tensor_parallel_size": 2})) == ["GPUs"]
    unused = found(replace(LAPTOP, gpus=(GIB,)))["GPUs"]
    assert (unused.state, "unused; on Linux, in the repository: make setup" in unused.has) == ("ok", True)


def test_a_pair_on_one_gpu_is_told_of_the_alternative() -> None:
    one, alone = found(H200, QWEN), found(H200, QWEN, spec(replicas={"colocated": 1}))
    assert one["GPU in turns"].state == "slow"
    assert "--colocated 1" in one["GPU in turns"].needs
    assert "GPU in turns" not in {**alone, **found(replace(H200, gpus=(140 * GIB,) * 2), QWEN)}
    assert alone["GPU memory of main"].has == "126.0 GiB a node"
    assert fails(H200, QWEN, spec(replicas={"colocated": 1})) == []
    assert fails(H200, QWEN, spec(replicas={"colocated": 2})) == ["GPUs"]


def test_a_model_that_cannot_be_had() -> None:
    def weigh(model: str) -> Weights:
        raise UnavailableError("the hub does not answer")

    (model,) = [one for one in look(spec(), LAPTOP, weigh) if one.state == "fails"]
    assert (model.what, model.has) == ("model of main", "the hub does not answer")
    assert fails(H200, Weights(size=16 * GIB, to_fetch=16 * GIB, room=GIB)) == ["model of main"]


def test_ports_that_are_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = spec(decode={"metrics_port": port})
        assert found(LAPTOP, wanted=wanted)["ports"].has == f"metrics_port {port} of decode-0 is taken"
        of_router = ClusterSpec(pools=(replace(wanted.pools[0], router={"port": port}, decode={}),))
        assert fails(LAPTOP, wanted=of_router) == ["ports"]


def test_this_machine_is_seen_without_importing_what_it_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else real(name))
    seen = preflight.here()
    assert "nixl" in seen.missing
    assert seen.cores > 0
    assert seen.memory > MIB
    assert seen.open_files > 100


@pytest.mark.parametrize(
    ("limit", "used", "stat", "prefix"),
    [
        ("memory.max", "memory.current", "memory.stat", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ],
)
def test_files_that_were_read_take_no_memory(
    limit: str, used: str, stat: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's use counts them, such as the weights of a model; the kernel gives them back."""
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    lines = f"anon {3 * MIB}\n{prefix}inactive_file {2 * MIB}\n{prefix}active_file {MIB}\n"
    for name, text in ((limit, f"{10 * MIB}\n"), (used, f"{7 * MIB}\n"), (stat, lines)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert preflight.here().memory == 6 * MIB


def test_gpus_are_those_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a, 100'; echo '1, GPU-b, 200'\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for visible, memory in ((None, [100, 200]), ("1", [200]), ("GPU-a", [100]), ("", [])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu // MIB for gpu in preflight.here().gpus] == memory


def test_a_gpu_without_memory_of_its_own_has_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi tells none of a GPU that shares the machine's, as a GB10 does."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a, [N/A]'\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "_free_memory", lambda: 7 * MIB)
    assert preflight.here().gpus == (7 * MIB,)


def test_a_directory_is_weighed(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no weights"):
        weights(str(tmp_path))
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert weights(str(tmp_path)) == Weights(size=2000, stored_as="bfloat16")
    for config in ("[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(config)
        assert weights(str(tmp_path)) == Weights(size=2000)


def test_a_model_of_the_hub_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import HfApi, constants

    def absent(*_: object, **options: object) -> str:
        assert options["local_files_only"]
        raise OSError("not in the cache")

    def info(*_: object, **options: object) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(HfApi, "model_info", info)
    with pytest.raises(UnavailableError, match="the hub does not answer: no network"):
        weights("org/model")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 30)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **options: str(tmp_path))
    assert weights("org/model").size == 30
