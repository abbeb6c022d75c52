"""`corun up`: what its flags and its file say of a cluster, and what --check says of this machine."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.cli import main, up
from corun.cli.up import Up
from corun.config.cluster_file import CONFIGS, Security, read
from corun.errors import InvalidArgumentError
from corun.launch import preflight
from corun.launch.preflight import Finding


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each launch; none is made."""
    calls: list[Any] = []
    launch = SimpleNamespace(run=lambda spec, **options: calls.append((spec, options)) or 7, check=lambda spec: None)
    monkeypatch.setitem(sys.modules, "corun.launch", launch)  # type: ignore[arg-type]
    return calls


def test_options_are_passed_on(runs: list[Any]) -> None:
    flags = ["--decode", "2", "--slots", "8", "--port", "0", "--tls-clients", "--audit-dir", "x", "--log-dir", "y"]
    assert main(["up", *flags]) == 7
    ((spec, options),) = runs
    assert options == {"ray_address": None, "log_dir": "y"}
    pool = spec.pool()
    assert (pool.model, pool.count("prefill"), pool.count("decode")) == ("tiny", 1, 2)
    assert pool.settings("router") == {"port": 0, "tls_clients": True, "audit_dir": str(Path("x").resolve())}
    assert pool.settings("decode") == {"model": "tiny", "slots": 8}


def test_every_flag_reaches_a_process() -> None:
    for part, names in up.SETTINGS.items():
        for name in names:
            value: Any = "/x" if name in {"model", "audit_dir"} else object()
            pool = Up(**{name: value}).spec().pool()
            assert getattr(pool, part) == ({} if part != "common" else {"model": "tiny"}) | {name: value}
    assert Up(http=0).spec().pool().gateway == {"port": 0, "allow_kills": False}
    assert Up(http=0, allow_kills=True).spec().pool().gateway == {"port": 0, "allow_kills": True}
    with pytest.raises(InvalidArgumentError, match="allow_kills = True: needs http"):
        Up(allow_kills=True).spec()
    assert Up().spec().pool().gateway is None
    assert Up(prefill=2, decode=3).spec().pool().replicas == {"prefill": 2, "decode": 3}
    assert Up(slots=8).spec().pool().colocated == {"slots": 8}, "for a later `corun scale colocated=1`"
    one = Up(colocated=1).spec().pool()
    assert [one.count(role) for role in CONFIGS] == [1, 0, 0, 1]
    values: dict[str, Any] = {known.name: True if known.type == "bool" else "/x" for known in fields(Security)}
    security = Security(**values)
    assert Up(security=security).spec().security == security


def test_help_has_meaning_and_default_of_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = " ".join(re.sub(r"[\u2500-\u257f]", "", capsys.readouterr().out).split())
    assert "--chunk-size INT Most tokens of one prompt in a step; part of the contract. (default: 2048)" in shown
    assert "--tls-key STR PEM file of its private key." in shown


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[pools.a]\nmodel = "org/model"\ntensor_parallel_size = 2\n[pools.a.router]\nreplicas = 2\nport = 7001\n'
        '[pools.b]\nmodel = "tiny"\nnodes_per_gpu = 4\n[pools.b.decode]\nslots = 9\nreplicas = 3\nport = 7101\n'
        "[pools.b.gateway]\n"
    )
    return path


def test_check_says_what_would_run(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "look", lambda spec: [Finding("memory", "1 GiB", "2 GiB free", "ok")])
    monkeypatch.setattr(up, "default_slots", lambda: 256)
    assert main(["up", "--check", str(file)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["pool", "role", "replicas", "model", "slots", "TP", "nodes/GPU", "ports"],
        ["a", "router", "2", "7001-7002"],
        ["a", "prefill", "1", "org/model", "2", "any"],
        ["a", "decode", "1", "org/model", "256", "2", "any"],
        ["b", "router", "1", "50051"],
        ["b", "prefill", "1", "tiny", "1", "4", "any"],
        ["b", "decode", "3", "tiny", "9", "1", "4", "7101-7103"],
        ["b", "gateway", "1", "8000"],
        [],
        ["needs", "has"],
        ["memory", "1", "GiB", "2", "GiB", "free", "ok"],
    ]


def test_check_fails_where_it_would_not_start(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("memory", "2 GiB", "1 GiB free", "fails"), Finding("cores", "2", "1", "slow")]
    monkeypatch.setattr(preflight, "look", lambda spec: found)
    assert main(["up", "--check", str(file)]) == 1
    assert capsys.readouterr().out.endswith("it would not start here: memory\n")
    assert main(["up", "--check", "--ray-address", "auto", str(file)]) == 0
    assert "not looked at: the machines of the Ray cluster at auto" in capsys.readouterr().out


def test_check_says_what_is_wrong(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("slots", "slot"))
    assert main(["up", "--check", str(file)]) == 2
    assert f"{file}: [pools.b.decode] slot = 9: is not a key here; the nearest is slots" in capsys.readouterr().err
    file.write_text('[pools.a]\nmodel = "./none"')
    assert main(["up", "--check", str(file)]) == 2
    assert f"{file}: [pools.a] model = " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--slots", "256"], ["--port", "0"], ["--insecure"], ["--model", "tiny"]])
def test_a_file_and_its_flags_do_not_mix(flags: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(file), *flags]) == 2
    assert f"must be left out beside {file}, where it belongs" in capsys.readouterr().err


def test_a_model_is_fetched_before_the_cluster_starts_and_elsewhere_by_its_nodes(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "fetched", lambda: runs.append("fetched"))
    assert main(["up", "--model", "smollm2"]) == 7
    assert (runs[0], runs[1][0].pools[0].model) == ("fetched", "smollm2")
    runs.clear()
    assert main(["up", "--model", "smollm2", "--ray-address", "auto"]) == 7
    assert main(["up", "--model", "tiny"]) == 7
    assert "fetched" not in runs


def test_the_spec_of_the_file_is_run(file: Path, runs: list[Any]) -> None:
    assert main(["up", str(file), "--ray-address", "auto"]) == 7
    assert runs == [(read(file), {"ray_address": "auto", "log_dir": None})]
