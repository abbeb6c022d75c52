"""What is run, with which command lines."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from corun import tiny
from corun.config import DecodeConfig, PrefillConfig, RouterConfig, parse
from corun.errors import InvalidArgumentError
from corun.plan import Plan, Security, command, free_port, resolve_model, role_of, share_of_cores, share_of_gpu

PLAN = Plan(model="org/model", prefill=2, decode=1, slots=8, port=7001, threads=2, chunk_size=64, dtype="float32")


def flags(name: str, *, plan: Plan = PLAN, gpu_share: float = 0.0) -> list[str]:
    argv = command(plan, name, router="10.0.0.1:7001", host="10.0.0.2", gpu_share=gpu_share)
    assert argv[:2] == [sys.executable, "-m"]
    return argv[2:]


def test_names() -> None:
    assert PLAN.nodes == ("prefill-0", "prefill-1", "decode-0")
    assert [role_of(name) for name in ("router", *PLAN.nodes)] == ["router", "prefill", "prefill", "decode"]


def test_router_understands_its_command() -> None:
    module, *argv = flags("router")
    assert module == "router"
    assert parse(RouterConfig, argv) == RouterConfig(host="127.0.0.1", port=7001)


def test_audits_and_metrics_are_the_routers(tmp_path: Path) -> None:
    plan = Plan(model="org/model", audit_fraction=0.5, audit_dir=str(tmp_path), metrics_port=0)
    _, *argv = flags("router", plan=plan)
    assert parse(RouterConfig, argv) == RouterConfig(audit_fraction=0.5, audit_dir=str(tmp_path), metrics_port=0)
    with pytest.raises(InvalidArgumentError, match="audit_fraction"):
        Plan(model="org/model", audit_fraction=2.0)


def test_prefill_node_understands_its_command() -> None:
    module, *argv = flags("prefill-1")
    assert module == "prefill_node"
    assert parse(PrefillConfig, argv) == PrefillConfig(
        model="org/model",
        router=("10.0.0.1:7001",),
        node_id="prefill-1",
        host="10.0.0.2",
        nixl_host="10.0.0.2",
        dtype="float32",
        threads=2,
        chunk_size=64,
    )


def test_decode_node_understands_its_command() -> None:
    module, *argv = flags("decode-0", gpu_share=0.5)
    assert module == "decode_node"
    assert parse(DecodeConfig, argv) == DecodeConfig(
        model="org/model",
        router=("10.0.0.1:7001",),
        node_id="decode-0",
        host="10.0.0.2",
        nixl_host="10.0.0.2",
        dtype="float32",
        threads=2,
        slots=8,
        gpu_memory_utilization=0.45,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill", 0), ("decode", -1), ("slots", 0), ("port", 65536), ("chunk_size", 0), ("threads", -1), ("host", "")],
)
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{field} = {value!r}"):
        Plan(model="m", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "nodes", "share"), [(0, 2, 0.0), (1, 2, 0.5), (1, 3, 0.333), (2, 2, 1.0), (8, 2, 1.0)]
)
def test_share_of_gpu(gpus: float, nodes: int, share: float) -> None:
    assert share_of_gpu(gpus, nodes) == share


@pytest.mark.parametrize(
    ("cores", "nodes", "shares"),
    [
        (2, 2, [(0,), (1,)]),
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (5, 2, [(0, 1), (2, 3)]),
        (1, 2, [(0,), (0,)]),
        (2, 3, [(0,), (1,), (0,)]),
    ],
)
def test_cores_are_shared_equally(cores: int, nodes: int, shares: list[tuple[int, ...]]) -> None:
    names = [str(index) for index in range(nodes)]
    assert share_of_cores(range(cores), names) == dict(zip(names, shares, strict=True))


def test_router_that_listens_anywhere_is_reached_at_its_machine() -> None:
    for host, reached in (("0.0.0.0", "10.0.0.9:1"), ("10.0.0.3", "10.0.0.3:1")):
        plan = Plan(model="m", host=host, port=1, security=Security(insecure=True))
        assert plan.router_address("10.0.0.9") == reached


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    path = resolve_model("tiny")
    assert path == str(tiny.ensure())
    assert resolve_model(str(Path(path).relative_to(tmp_path))) == path


@pytest.mark.parametrize("model", ["/no/such", "./none", "~/none", "a/b/c", "empty"])
def test_model_that_is_nowhere(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="must be 'tiny', a directory"):
        resolve_model(model)


def test_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"port = {port}: cannot be listened on at 127.0.0.1"):
            free_port("127.0.0.1", port)
    assert free_port("127.0.0.1", 0) > 0
