"""Settings that can move a bit: one list, set once, refused if somebody else had another idea."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun.node.vllm import pin
from corun.types import NodeRole

NAMES = {"CORUN_TEST_A": "1", "CORUN_TEST_B": "x"}


@pytest.fixture(autouse=True)
def nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test pins is forgotten."""
    monkeypatch.setattr(pin, "_pinned", {})
    for name in NAMES:
        monkeypatch.setenv(name, "")  # So that it is restored, then:
        monkeypatch.delenv(name)


def test_unset_variables_are_set_for_children_too() -> None:
    for _ in range(2):  # The same value again is fine.
        pin.pin(NAMES)
    assert {name: os.environ[name] for name in NAMES} == NAMES
    script = "import os; print(os.environ['CORUN_TEST_A'], os.environ['CORUN_TEST_B'])"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.split() == ["1", "x"]


@pytest.mark.parametrize("value", ["0", "", "1 "])
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Never overwritten: whoever set it wants other bits than the contract gives."""
    monkeypatch.setenv("CORUN_TEST_A", value)
    with pytest.raises(InvalidArgumentError) as caught:
        pin.pin(NAMES)
    assert (caught.value.field, caught.value.value) == ("environment variable CORUN_TEST_A", value)
    assert caught.value.limit == "must be unset or '1'"
    assert os.environ["CORUN_TEST_A"] == value


def test_a_cpu_cuts_no_kv_by_the_batch() -> None:
    settings = pin.cpu_settings([0, 2])
    assert settings["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"
    assert (settings["VLLM_USE_V2_MODEL_RUNNER"], pin.gpu_settings()["VLLM_USE_V2_MODEL_RUNNER"]) == ("0", "1")


def test_cores_are_the_first_of_those_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 3, 5})
    assert [pin.cores(NodeRole.DECODE, threads) for threads in range(4)] == [[3, 5, 9], [3], [3, 5], [3, 5, 9]]
    assert [pin.cores(NodeRole.PREFILL, threads) for threads in range(4)] == [[9, 5, 3], [9], [9, 5], [9, 5, 3]]
    with pytest.raises(InvalidArgumentError, match="threads = 4: must be at most 3, the cores available here"):
        pin.cores(NodeRole.DECODE, 4)


def free(**variables: str) -> tuple[str, ...]:
    return pin.environment(variables)


def test_free_variables_enter_the_contract_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin, "_pinned", {"NCCL_PROTO": "Simple"})  # Pinned ones do not.
    variables = {"VLLM_MLA_DISABLE": "1", "NCCL_NTHREADS": "256", "MKL_NUM_THREADS": "", "CUTE_DSL_ARCH": "x"}
    compilers = dict.fromkeys(("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT"), "1")
    found = free(**variables, **compilers, HOME="/root", MY_NCCL_ALGO="x", NCCL_PROTO="Simple")
    assert found == tuple(f"{name}={value}" for name, value in sorted((variables | compilers).items()))


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_VERSION"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "OMP_NUM_THREADS", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "PROMETHEUS_MULTIPROC_DIR", "CUTE_DSL_CACHE_DIR"),
    ],
)
def test_harmless_variables_and_paths_of_caches_do_not(name: str) -> None:
    assert free(**{name: "/somewhere"}) == ()


@pytest.mark.parametrize("name", pin.MUST_BE_UNSET)
def test_some_variables_must_be_unset(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^environment variable {name} = '1': must be unset$"):
        free(**{name: "1"})


def test_a_file_is_named_by_its_content(tmp_path: Path) -> None:
    """The same files at other places are the same fact. Of what is loaded before all other libraries, vLLM itself adds
    two files of its environment."""
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "one").write_text("x")
        (tmp_path / directory / "two").write_text("y")
    x, y = (f"sha256:{hashlib.sha256(content).hexdigest()}" for content in (b"x", b"y"))
    assert {free(NCCL_TOPO_FILE=f"{tmp_path}/{name}/one") for name in "ab"} == {(f"NCCL_TOPO_FILE={x}",)}
    found = {free(LD_PRELOAD=f"{tmp_path}/{name}/one:{tmp_path}/{name}/two libm.so.6") for name in "ab"}
    assert found == {(f"LD_PRELOAD={x} {y} libm.so.6",)}
    with pytest.raises(InvalidArgumentError, match="must be unset, or name a file"):
        free(NCCL_CONF_DIR=str(tmp_path))


def test_one_ptxas_makes_all_kernels_and_is_no_fact_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch's version says which one it is. A node must not differ from its worker, which sets the variable."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # It is put back after this test, whoever sets it.
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    pin.use_ptxas_of_torch(tmp_path)
    assert "TRITON_PTXAS_PATH" not in os.environ  # This torch has none.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    pin.use_ptxas_of_torch(tmp_path)
    assert os.environ["TRITON_PTXAS_PATH"] == str(tmp_path / "bin" / "ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/chosen/ptxas")
    pin.use_ptxas_of_torch(tmp_path)
    assert os.environ["TRITON_PTXAS_PATH"] == "/chosen/ptxas"

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert free(TRITON_PTXAS_PATH=str(tmp_path)) == ()
    (tmp_path / "ptxas").write_text("x")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    assert free(**os.environ)[-1].startswith("TRITON_PTXAS_PATH=sha256:")


def test_every_pinned_variable_is_read_back() -> None:
    names = {*pin.gpu_settings(), *pin.cpu_settings([0]), *pin.PLUMBING, *pin.GPU_PLUMBING, *pin.MUST_BE_UNSET}
    assert pin.watched(dict.fromkeys(names, "x")).keys() == names


PLATFORMS = {"cpu": pin.cpu_settings([0, 1]), "cuda": pin.gpu_settings()}


def seen(platform: str) -> dict[str, Any]:
    """What a worker reports that was left as it was set."""
    settings = PLATFORMS[platform]
    return {
        "platform": platform,
        "variables": dict(settings),
        "vllm_envs": {name: value for name, value in settings.items() if name.startswith("VLLM_")},
        "switches": {name: str(value) for name, value in pin.SWITCHES[platform].items()},
        "threads": 2 if platform == "cpu" else 0,
    }


CHANGES = [
    (platform, kind, name, gone)
    for platform in PLATFORMS
    for kind in ("variables", "vllm_envs", "switches")
    for name in seen(platform)[kind]
    for gone in (False, True)
    if not (gone and kind == "vllm_envs")  # vLLM does not read all of them.
]


@pytest.mark.parametrize(("platform", "kind", "name", "gone"), CHANGES)
def test_whatever_changed_since_is_refused(
    monkeypatch: pytest.MonkeyPatch, platform: str, kind: str, name: str, gone: bool
) -> None:
    monkeypatch.setattr(pin, "_pinned", PLATFORMS[platform])
    report = seen(platform)
    pin.refuse_changed(report)
    expected = report[kind][name]
    if gone:
        del report[kind][name]
    else:
        report[kind][name] = "other"
    found = "(un" if gone else "other"
    with pytest.raises(UnavailableError, match=rf"{re.escape(name)} is '{re.escape(found)}.*{re.escape(expected)}"):
        pin.refuse_changed(report)


def test_another_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin, "_pinned", PLATFORMS["cpu"])
    with pytest.raises(UnavailableError, match=r"torch.get_num_threads\(\) is '1' in the engine, but was set to '2'"):
        pin.refuse_changed({**seen("cpu"), "threads": 1})


def test_the_blas_policy_says_what_was_read_back() -> None:
    assert pin.blas_policy(seen("cpu")) == "fp32 ieee, MKL_CBWR AUTO"
    report = seen("cuda")
    policy = "cublaslt, workspaces :16:8 and 1 KiB, fp32 ieee, 16-bit sums and split-K (False, False)"
    assert pin.blas_policy(report) == policy
    report["switches"]["cuda.matmul.fp32_precision"] = "tf32"
    assert "fp32 tf32" in pin.blas_policy(report)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1", "1,0,2,3"), ("2,3", "2,3,0,1"), ("0,1,2,3", "0,1,2,3"), ("GPU-8f2", "GPU-8f2"), ("1,GPU-8f2", "1,GPU-8f2")],
)
def test_a_node_sees_its_peers_gpus_after_its_own(visible: str, seen: str) -> None:
    assert pin.own_gpus_first(visible, 4) == seen


SCRIPT = """
import json, sys
import torch
from corun.node.vllm import pin

found = {}
torch.set_float32_matmul_precision("highest")  # as vLLM's worker does before
for platform, change in zip(sys.argv[1::2], sys.argv[2::2]):
    before = pin.read_switches(torch.backends, platform)
    pin.set_switches(torch.backends, platform)
    after = pin.read_switches(torch.backends, platform)
    exec(change, {"torch": torch})
    found[platform] = before, after, pin.read_switches(torch.backends, platform)
print(json.dumps(found))
"""
CHANGED = {
    "cpu": "torch.set_float32_matmul_precision('medium')",
    # One statement a switch, written as a user would.
    "cuda": """
torch.backends.cuda.preferred_blas_library("cublas")
torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
torch.backends.cudnn.rnn.fp32_precision = "tf32"
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, True)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
torch.backends.cuda.matmul.allow_fp16_accumulation = True
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.deterministic = False
""",
}


def test_every_switch_is_set_and_read_where_torch_holds_it() -> None:
    """In a fresh process; no GPU is needed to hold them. A CPU's come last, because a change to them moves others."""
    command = [sys.executable, "-c", SCRIPT, "cuda", CHANGED["cuda"], "cpu", CHANGED["cpu"]]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(child.stdout)
    for platform, (before, after, _) in found.items():
        assert before.keys() == after.keys()
        assert after == {name: str(value) for name, value in pin.SWITCHES[platform].items()}
    before, after, changed = found["cuda"]
    assert before["cudnn.conv.fp32_precision"] == "tf32"
    assert {name for name in after if after[name] != changed[name]} == pin.GPU_SWITCHES.keys()
    assert changed["cuda.matmul.allow_bf16_reduced_precision_reduction"] == "(False, True)"
    before, after, changed = found["cpu"]
    assert before["mkldnn.conv.fp32_precision"] == "none"
    assert changed == {**after, "mkldnn.matmul.fp32_precision": "bf16"}
