"""What is run, with which command lines."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from corun import cli
from corun.config.cluster_file import ClusterSpec, PoolSpec, Security, toml
from corun.config.fields import ColocatedConfig, DecodeConfig, HttpConfig, PrefillConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError
from corun.gateway.config import GatewayConfig
from corun.launch.members import (
    command,
    free_ports,
    gateway_command,
    gateway_url,
    members,
    router_address,
    with_free_ports,
)
from corun.models import resolve_model, tiny
from tests.secrets import Secrets

POOL = PoolSpec(
    common={"model": "org/model", "dtype": "float32", "threads": 2},
    router={"port": 7001},
    prefill={"chunk_size": 64},
    decode={"slots": 8, "smaller_steps": False},
    colocated={"slots": 8, "chunk_size": 64, "nixl_port": 7200, "mixed_steps": False},
    replicas={"prefill": 2, "decode": 1, "colocated": 2},
)
ROUTER = {"port": 7001, "audit_fraction": 0.5, "audit_dir": "/", "metrics_port": 9100}
TWO_ROUTERS = PoolSpec(common={"model": "m"}, router=ROUTER, replicas={"router": 2})
OF_NODES: dict[str, Any] = {
    "model": "org/model",
    "router": ("10.0.0.1:7001", "10.0.0.3:7002"),
    "host": "10.0.0.2",
    "nixl_host": "10.0.0.2",
    "dtype": "float32",
    "threads": 2,
}


def names(*pools: PoolSpec) -> list[str]:
    return [member.name for member in members(ClusterSpec(pools=pools))]


def test_names() -> None:
    assert names(POOL) == ["router", "prefill-0", "prefill-1", "decode-0", "colocated-0", "colocated-1"]
    assert names(TWO_ROUTERS) == ["router-0", "router-1", "prefill-0", "decode-0"]
    two = [PoolSpec(name=name, common={"model": "m"}) for name in "ab"]
    assert names(*two) == ["a.router", "a.prefill-0", "a.decode-0", "b.router", "b.prefill-0", "b.decode-0"]


@pytest.mark.parametrize(
    ("pool", "name", "module", "config"),
    [
        (POOL, "router", "router", RouterConfig(host="127.0.0.1", port=7001)),
        (TWO_ROUTERS, "router-1", "router", RouterConfig(**{**ROUTER, "port": 7002, "metrics_port": 9101})),
        (POOL, "prefill-1", "prefill_node", PrefillConfig(**OF_NODES, node_id="prefill-1", chunk_size=64)),
        (
            POOL,
            "decode-0",
            "decode_node",
            DecodeConfig(**OF_NODES, node_id="decode-0", slots=8, smaller_steps=False, gpu_memory_utilization=0.45),
        ),
        (
            POOL,
            "colocated-1",
            "colocated_node",
            ColocatedConfig(
                **OF_NODES, node_id="colocated-1", slots=8, chunk_size=64, nixl_port=7201, mixed_steps=False
            ),
        ),
    ],
)
def test_a_process_understands_its_command(pool: PoolSpec, name: str, module: str, config: Any, tmp_path: Path) -> None:
    member = next(member for member in members(ClusterSpec(pools=(pool,))) if member.name == name)
    file = tmp_path / "cluster.toml"
    file.write_text(toml(pool))
    routers = () if member.is_router else OF_NODES["router"]
    share = {"gpu_share": 0.5} if member.role == "decode" else {}
    argv = command(pool, member, file=file, routers=routers, host="10.0.0.2", **share)
    assert argv[:3] == [sys.executable, "-m", module]
    assert parse(type(config), argv[3:]) == config
    other = command(pool, member, file=file, host="10.0.0.2", modules={member.role: "tests.other"})
    assert other[2] == "tests.other"


def test_a_gateway_understands_its_command(tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    files = {name: secrets.path(kind) for name, kind in (("tls_ca", "ca.pem"), ("tls_cert", "member.pem"))}
    security = Security(
        **files, tls_key=secrets.path("member.key"), tls_clients=True, cluster_token_file=secrets.path("cluster.token")
    )
    pool = PoolSpec(common={"model": "m"}, gateway={"port": 7000}, security=security)
    http = pool.http()
    assert http is not None
    argv = gateway_command(pool, http, ("a:1", "b:2"))
    assert argv[:3] == [sys.executable, "-m", "corun"]
    found = cli.parse(argv[3:])
    assert isinstance(found, GatewayConfig)
    found.check_files()
    assert (found.port, found.router, found.insecure) == (7000, "a:1,b:2", False)
    assert (found.tls_ca, found.tls_cert) == (files["tls_ca"], files["tls_cert"])
    assert found.own_token() == secrets.token("cluster")
    plain = PoolSpec(common={"model": "m"}, gateway={"host": "::", "port": 1}, security=Security(insecure=True))
    assert "--insecure" in gateway_command(plain, HttpConfig(host="::", port=1), ("a:1",))
    assert gateway_url(HttpConfig(host="::1", port=1, https_cert="x")) == "https://[::1]:1"
    assert gateway_url(HttpConfig(host="0.0.0.0", port=1)) == "http://127.0.0.1:1"
    assert gateway_url(HttpConfig(host="::", port=1)) == "http://[::1]:1"


def test_a_gateway_that_may_have_nodes_killed_knows_whom_to_ask() -> None:
    settings = {"allow_kills": True, "foreign_origins": "http://vllm:8001,https://[::1]"}
    pool = PoolSpec(common={"model": "m"}, gateway={"port": 7000, **settings})
    http = pool.http()
    assert http is not None
    found = cli.parse(gateway_command(pool, http, ("a:1",), Path("/tmp/kills/socket"))[3:])
    assert isinstance(found, GatewayConfig)
    assert (found.allow_kills, found.supervisor, found.foreign_origins) == (
        True,
        "/tmp/kills/socket",
        settings["foreign_origins"],
    )


@pytest.mark.parametrize(
    "origin", ["vllm:8001", "http://vllm/v1", "http://*", "http://a; script-src *", "ftp://a", "http://a b"]
)
def test_a_foreign_origin_is_nothing_but_one(origin: str) -> None:
    with pytest.raises(InvalidArgumentError, match="foreign_origins"):
        HttpConfig(foreign_origins=f"http://a,{origin}")


def test_a_gateway_gets_a_free_port() -> None:
    pool = PoolSpec(common={"model": "m"}, router={"port": 0}, gateway={"port": 0})
    found = with_free_ports(ClusterSpec(pools=(pool,))).pool().http()
    assert found is not None
    assert found.port > 0


def test_routers_know_a_colocated_process_as_two_nodes() -> None:
    nodes = {member.name: member.node_ids for member in members(ClusterSpec(pools=(POOL,)))}
    assert nodes["colocated-1"] == ("colocated-1-prefill", "colocated-1-decode")
    assert (nodes["decode-0"], nodes["router"]) == (("decode-0",), ())


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
    with pytest.raises(InvalidArgumentError, match="must be 'tiny', 'smollm2', a directory"):
        resolve_model(model)


def test_taken_ports_are_refused_and_free_ones_found_for_every_router() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for first, count in ((port, 1), (port - 1, 2)):
            with pytest.raises(InvalidArgumentError, match=f"port = {first}: cannot be .*; choose another one"):
                free_ports("127.0.0.1", first, count)
    with pytest.raises(InvalidArgumentError, match=r"port = 0: cannot be listened on at ä\.\.b: "):
        free_ports("ä..b", 0)
    pool = PoolSpec(common={"model": "m"}, router={"port": 0}, replicas={"router": 3})
    found = with_free_ports(ClusterSpec(pools=(pool,))).pool()
    first = found.config("router").port
    assert first > 0
    assert [found.ports("router", index)["port"] for index in range(3)] == [first, first + 1, first + 2]
