"""Configs are checked when made, and command lines give them or a usage error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from corun.config.fields import DecodeConfig, MemberConfig, NodeConfig, PrefillConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (RouterConfig, "host", [""]),
        (RouterConfig, "port", [-1, 65536, True, "80"]),
        (RouterConfig, "router_id", ["a b", "é", "x" * 129]),
        (RouterConfig, "seed_key", ["xyz", "abc", "00" * 65]),
        (RouterConfig, "max_queued_samples", [0, -1, 1.5]),
        (RouterConfig, "max_queue_wait_s", [-1, float("inf"), True]),
        (RouterConfig, "heartbeat_interval_ms", [0]),
        (RouterConfig, "heartbeat_timeout_ms", [1999]),
        (RouterConfig, "reserve_timeout_s", [0, -1, math.nan, math.inf, "5"]),
        (RouterConfig, "node_wait_s", [-1, 1e9]),
        (RouterConfig, "max_message_bytes", [0, 1023, 2**29 + 1]),
        (RouterConfig, "audit_fraction", [-0.1, 1.1, math.nan, True, "1"]),
        (NodeConfig, "model", [""]),
        (NodeConfig, "router", [(), ("host",), ("host:0",), ("host:99999",), (":50051",), ("host:x",)]),
        (NodeConfig, "advertise", ["host", "host:0"]),
        (NodeConfig, "node_id", ["a/b"]),
        (NodeConfig, "gpu_memory_utilization", [0, 1.1, math.nan]),
        (NodeConfig, "engine_restart_s", [0, 5.0]),
        (NodeConfig, "metrics_port", [-1, 65536]),
        (PrefillConfig, "chunk_size", [0]),
        (DecodeConfig, "slots", [-1, 4097]),
    ],
)
def test_limits(cls: type[MemberConfig], name: str, values: list[Any]) -> None:
    """One setting of each kind, and those with limits of their own; `test_spec` looks that each setting has a check."""
    model = {} if cls is RouterConfig else {"model": "m"}
    for value in values:
        with pytest.raises(InvalidArgumentError, match=r"must be|must not") as caught:
            cls(**{**model, name: value})
        assert caught.value.field == name


def test_what_is_valid() -> None:
    assert RouterConfig(seed_key="00ff").seed_key_bytes == b"\x00\xff"
    assert NodeConfig(model="m", router=("[::1]:50051",)).router == ("[::1]:50051",)
    assert NodeConfig(model="m", advertise="proxy:1").advertise == "proxy:1"


def test_a_secret_stays_out_of_the_error() -> None:
    with pytest.raises(InvalidArgumentError, match="6 characters") as caught:
        RouterConfig(seed_key="secret")
    assert "secret" not in str(caught.value)


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
