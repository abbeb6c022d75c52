"""What the user is told while a cluster starts, and once it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.cli import parse
from corun.config.cluster_file import PoolSpec, Security
from corun.launch.progress import Progress
from corun.launch.starting import QUIET_S, Starting, next_steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def test_each_stage_is_told_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    starting = Starting(Progress())
    for stage in ("", "importing vLLM", "importing vLLM", "loading the weights"):
        starting.tell({"decode-0": stage, "prefill-0": ""})
    assert told(capsys) == ["decode-0: importing vLLM", "decode-0: loading the weights"]


def test_a_long_stage_is_not_silent(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    starting = Starting(Progress())
    doing = {"decode-0": "loading the weights", "prefill-0": ""}
    for clock[0] in (0.0, QUIET_S, QUIET_S + 1, 2 * QUIET_S, 3 * QUIET_S):
        starting.tell(doing)
    assert told(capsys) == [
        "decode-0: loading the weights",
        "waiting for decode-0 (loading the weights, 11 s), prefill-0",
        "waiting for decode-0 (loading the weights, 30 s), prefill-0",
    ]
    clock[0] = 100.0
    starting.tell({})
    assert told(capsys) == []


def test_the_next_steps_are_commands_that_reach_the_cluster(tmp_path: Path) -> None:
    pool = PoolSpec(common={"model": "tiny"})
    assert next_steps(pool, "127.0.0.1:50051")[0] == "corun generate 'Once upon a time' --seed 42"
    assert next_steps(pool, "127.0.0.1:7001")[1] == "corun status --router 127.0.0.1:7001"
    (tmp_path / "client.token").write_text("x")
    security = Security(
        tls_ca=str(tmp_path / "ca.pem"),
        tls_name="corun",
        tls_clients=True,
        client_tokens_file=str(tmp_path / "clients.tokens"),
    )
    for command in next_steps(PoolSpec(common={"model": "tiny"}, security=security), "10.0.0.7:50051"):
        assert command.endswith(
            f" --router 10.0.0.7:50051 --tls-ca {tmp_path}/ca.pem --tls-name corun --tls-cert YOUR-client.pem"
            f" --tls-key YOUR-client.key --token-file {tmp_path}/client.token"
        )
        parse(command.replace("'Once upon a time'", "Once").split()[1:])
