"""Configs are checked when made, and command lines give them or a usage error."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("host", [""]),
        ("port", [-1, 65536, True, "80"]),
        ("router_id", ["a b", "é", "x" * 129]),
        ("seed_key", ["xyz", "abc", "00" * 65]),
        ("max_queued_samples", [0, -1, 1.5]),
        ("max_queued_tokens", [0]),
        ("max_queue_wait_s", [-1, float("inf"), True]),
        ("heartbeat_interval_ms", [0, 2501]),
        ("heartbeat_timeout_ms", [1999]),
        ("max_attempts", [0]),
        ("reserve_timeout_s", [0, -1, math.nan, math.inf, "5"]),
        ("prefill_timeout_s", [0]),
        ("step_timeout_s", [0]),
        ("node_wait_s", [-1, 1e9]),
        ("drain_grace_s", [-1]),
        ("max_message_bytes", [0, 1023, 2**29 + 1]),
        ("audit_fraction", [-0.1, 1.1, math.nan, True, "1"]),
    ],
)
def test_router_limits(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError, match=r"(must be|must not)"):
            RouterConfig(**{name: value})


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (NodeConfig, "model", [""]),
        (NodeConfig, "router", [(), ("host",), ("host:0",), ("host:99999",), (":50051",), ("host:x",)]),
        (NodeConfig, "port", [-1]),
        (NodeConfig, "advertise", ["host", "host:0"]),
        (NodeConfig, "node_id", ["a/b"]),
        (NodeConfig, "dtype", [""]),
        (NodeConfig, "max_model_len", [-1]),
        (NodeConfig, "threads", [-1]),
        (NodeConfig, "kv_cache_gib", [0]),
        (NodeConfig, "nixl_host", [""]),
        (NodeConfig, "nixl_port", [65536]),
        (NodeConfig, "tensor_parallel_size", [0]),
        (NodeConfig, "gpu_memory_utilization", [0, 1.1, math.nan]),
        (NodeConfig, "engine_timeout_s", [0]),
        (NodeConfig, "engine_restart_s", [0, 5.0]),
        (NodeConfig, "drain_grace_s", [-1]),
        (NodeConfig, "metrics_port", [-1, 65536]),
        (NodeConfig, "metrics_host", [""]),
        (PrefillConfig, "chunk_size", [0]),
        (PrefillConfig, "kv_check_fraction", [-0.1, 1.1, math.nan]),
        (PrefillConfig, "port", [-1]),
        (DecodeConfig, "slots", [-1, 4097]),
        (DecodeConfig, "lease_ttl_ms", [0]),
        (DecodeConfig, "port", [-1]),
    ],
)
def test_node_limits(cls: type[NodeConfig], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError) as caught:
            cls(**{"model": "m", name: value})
        assert caught.value.field == name


def test_defaults() -> None:
    assert RouterConfig().port == 50051
    assert RouterConfig().seed_key_bytes == b""
    assert RouterConfig().audit_fraction == 0.001
    assert RouterConfig().metrics_port is None
    assert RouterConfig(seed_key="00ff").seed_key_bytes == b"\x00\xff"
    assert NodeConfig(model="m", router=("[::1]:50051",)).router == ("[::1]:50051",)
    assert NodeConfig(model="m", advertise="proxy:1").advertise == "proxy:1"
    assert PrefillConfig(model="m").chunk_size == 2048
    assert DecodeConfig(model="m").slots == 0  # As suits the device of the node that starts.


def test_a_secret_stays_out_of_the_error() -> None:
    with pytest.raises(InvalidArgumentError, match="6 characters") as caught:
        RouterConfig(seed_key="secret")
    assert "secret" not in str(caught.value)


def test_nothing_changes_a_config() -> None:
    with pytest.raises(FrozenInstanceError):
        RouterConfig().port = 1  # type: ignore[misc]


def test_parse() -> None:
    config = parse(DecodeConfig, ["--model", "m", "--slots", "8", "--router", "a:1", "b:2"])
    assert config == DecodeConfig(model="m", slots=8, router=("a:1", "b:2"))
    assert parse(RouterConfig, []) == RouterConfig()
    assert parse(RouterConfig, ["--metrics-port", "9"]) == RouterConfig(metrics_port=9)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--model", "m", "--slots", "-1"], "node: slots = -1: must be an integer in [0, 4096]"),
        (["--model", "m", "--slots", "many"], "--slots"),
        (["--model", "m", "--bogus", "1"], "--bogus"),
        ([], "--model"),
    ],
)
def test_usage_errors(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(DecodeConfig, argv, prog="node")
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(PrefillConfig, ["--help"], prog="node")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "Prompt tokens of one step" in shown
    assert "Routers to join" in shown


def test_configs_import_no_parser() -> None:
    code = "import sys, corun.config.fields; sys.exit('tyro' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
