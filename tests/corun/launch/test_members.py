"""What is run, with which command lines."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from corun.config.cluster_file import ClusterSpec, PoolSpec, toml
from corun.config.fields import DecodeConfig, PrefillConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError
from corun.launch.members import command, free_ports, members, router_address, with_free_ports
from corun.models import resolve_model, tiny

POOL = PoolSpec(
    common={"model": "org/model", "dtype": "float32", "threads": 2},
    router={"port": 7001},
    prefill={"chunk_size": 64},
    decode={"slots": 8, "smaller_steps": False},
    replicas={"prefill": 2},
)
SPEC = ClusterSpec(pools=(POOL,))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


def flags(file: Path, name: str, spec: ClusterSpec = SPEC, **options: Any) -> list[str]:
    """Return the module and the flags of a process, whose file is there."""
    member = next(member for member in members(spec) if member.name == name)
    routers = () if member.is_router else ("10.0.0.1:7001", "10.0.0.3:7002")
    pool = spec.pool(member.pool)
    file.write_text(toml(pool))
    argv = command(pool, member, file=file, routers=routers, host="10.0.0.2", **options)
    assert argv[:2] == [sys.executable, "-m"]
    return argv[2:]


def names(**changes: Any) -> list[str]:
    pools = changes.pop("pools", ("main",))
    found = (PoolSpec(name=name, common={"model": "m"}, **changes) for name in pools)
    return [member.name for member in members(ClusterSpec(pools=tuple(found)))]


def test_names() -> None:
    assert [member.name for member in members(SPEC)] == ["router", "prefill-0", "prefill-1", "decode-0"]
    assert [member.role for member in members(SPEC)] == ["router", "prefill", "prefill", "decode"]
    assert names(replicas={"router": 2}) == ["router-0", "router-1", "prefill-0", "decode-0"]
    of_two = ["a.router", "a.prefill-0", "a.decode-0", "b.router", "b.prefill-0", "b.decode-0"]
    assert names(pools=("a", "b")) == of_two


def test_router_understands_its_command(file: Path) -> None:
    module, *argv = flags(file, "router")
    assert module == "router"
    assert parse(RouterConfig, argv) == RouterConfig(host="127.0.0.1", port=7001)


def test_routers_of_one_pool_count_their_ports_up(tmp_path: Path, file: Path) -> None:
    router = {"port": 7001, "audit_fraction": 0.5, "audit_dir": str(tmp_path), "metrics_port": 9100}
    spec = ClusterSpec(pools=(PoolSpec(common={"model": "m"}, router=router, replicas={"router": 2}),))
    _, *argv = flags(file, "router-1", spec)
    assert parse(RouterConfig, argv) == RouterConfig(**{**router, "port": 7002, "metrics_port": 9101})


def test_prefill_node_understands_its_command(file: Path) -> None:
    module, *argv = flags(file, "prefill-1")
    assert module == "prefill_node"
    assert parse(PrefillConfig, argv) == PrefillConfig(
        model="org/model",
        router=("10.0.0.1:7001", "10.0.0.3:7002"),
        node_id="prefill-1",
        host="10.0.0.2",
        nixl_host="10.0.0.2",
        dtype="float32",
        threads=2,
        chunk_size=64,
    )


def test_decode_node_understands_its_command(file: Path) -> None:
    module, *argv = flags(file, "decode-0", gpu_share=0.5)
    assert module == "decode_node"
    assert parse(DecodeConfig, argv) == DecodeConfig(
        model="org/model",
        router=("10.0.0.1:7001", "10.0.0.3:7002"),
        node_id="decode-0",
        host="10.0.0.2",
        nixl_host="10.0.0.2",
        dtype="float32",
        threads=2,
        slots=8,
        smaller_steps=False,
        gpu_memory_utilization=0.45,
    )


def test_another_module_may_stand_in_for_a_role(file: Path) -> None:
    assert flags(file, "decode-0", modules={"decode": "tests.other"})[0] == "tests.other"


def test_router_that_listens_anywhere_is_reached_at_its_machine() -> None:
    for host, reached in (("0.0.0.0", "10.0.0.9:2"), ("10.0.0.3", "10.0.0.3:2"), ("::1", "[::1]:2")):
        pool = PoolSpec(common={"model": "m"}, router={"host": host, "port": 1})
        assert router_address(pool, 1, "10.0.0.9") == reached


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
            free_ports("127.0.0.1", port)
        with pytest.raises(InvalidArgumentError, match=f"port = {port - 1}: cannot be listened on at 127.0.0.1"):
            free_ports("127.0.0.1", port - 1, 2)
    assert free_ports("127.0.0.1", 0) > 0


def test_a_free_port_is_found_for_every_router() -> None:
    pool = PoolSpec(common={"model": "m"}, router={"port": 0}, replicas={"router": 3})
    found = with_free_ports(ClusterSpec(pools=(pool,))).pool()
    first = found.config("router").port
    assert [found.ports("router", index)["port"] for index in range(3)] == [first, first + 1, first + 2]
