"""What a cluster does so that the processes that run become those that are wanted, and what its user is told."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun import launch
from corun.cli import parse
from corun.config.cluster_file import ClusterSpec, PoolSpec, Security
from corun.errors import (
    CancelledByPeerError,
    CorunError,
    InternalError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from corun.launch.cluster import Cluster, _ask, _Pool, failure, unsettled
from corun.launch.members import ProcessSpec, members
from corun.launch.placement import on_joined
from corun.launch.progress import PASSED, QUIET_S, Progress, next_steps, passed
from corun.launch.supervisor import ProcessState, ProcessStatus

ROOT = Path(__file__).parents[3]


def spec(prefill: int = 1, decode: int = 1, **pool: Any) -> ClusterSpec:
    counts = {"prefill": prefill, "decode": decode}
    return ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas=counts, **pool),))


def wanted(prefill: int = 1, decode: int = 1, colocated: int = 0) -> tuple[ProcessSpec, ...]:
    counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
    return members(ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas=counts),)))


class Recorder:
    """A fleet that only notes what it is told."""

    def __init__(self, running: Sequence[ProcessSpec] = (), stopping: Sequence[ProcessSpec] = ()) -> None:
        self.running, self.stopping = list(running), list(stopping)
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.killed: list[str] = []

    def forget_ended(self) -> list[ProcessSpec]:
        return []

    def start(self, orders: Any, hosts: Any) -> None:
        self.started += [order.member.name for order in orders]

    def kill(self, member: ProcessSpec) -> None:
        self.killed.append(member.name)

    def stop(self, ending: Sequence[ProcessSpec]) -> None:
        self.stopped += [member.name for member in ending]


def cluster(of: ClusterSpec, fleet: Any = None, *in_use: set[str]) -> Cluster:
    made = Cluster(of, Path("logs"), Progress())
    made._pools = {"main": _Pool(of.pool(), ("a:1",), ("a",), in_use=in_use)}
    made._shares = on_joined(of.pools, has_gpus=True, cores=())
    made._fleet = fleet or Recorder()
    return made


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the messages, without their times."""
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(
    ("want", "run", "stopping", "started", "stopped"),
    [
        ((1, 1), (), "", ["router", "prefill-0", "decode-0"], []),
        ((2, 3), (2, 3), "", [], []),
        ((3, 1), (1, 3), "", ["prefill-1", "prefill-2"], ["decode-2", "decode-1"]),
        ((1, 1), (1, 2), "decode-1", [], []),  # It is not asked again,
        ((1, 2), (1, 2), "decode-1", [], []),  # and starts again only once it has ended.
        ((1, 2), (1, 1), "", ["decode-1"], []),
    ],
)
def test_missing_processes_are_started_and_surplus_ones_stopped(
    want: tuple[int, int],
    run: tuple[int, int] | tuple[()],
    stopping: str,
    started: list[str],
    stopped: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = wanted(*run) if run else ()
    fleet = Recorder(running, [member for member in running if member.name == stopping])
    cluster(spec(*want), fleet)._reconcile()
    assert (fleet.started, fleet.stopped) == (started, stopped)
    assert ("router: waiting: its machine, a, is gone" in told(capsys)) == (not run)


def test_a_node_is_settled_once_every_router_uses_it_or_none_does() -> None:
    def left(want: tuple[ProcessSpec, ...], run: tuple[ProcessSpec, ...], *used: str, stopping: str = "") -> list[str]:
        nodes = [member for member in wanted(2, 2) if not member.is_router]
        ending = [member for member in run if member.name == stopping]
        found = unsettled(nodes, want, run, ending, {"main": [set(names.split()) for names in used]})
        return sorted(member.name for member in found)

    want, before = wanted(2, 1), wanted(1, 2)
    assert left(want, before, "prefill-0 decode-0 decode-1") == ["decode-1", "prefill-1"]
    all_used = "prefill-0 prefill-1 decode-0"
    assert left(want, wanted(2, 2), all_used, stopping="decode-1") == ["decode-1"]
    assert left(want, want, f"{all_used} decode-1") == ["decode-1"]
    assert left(want, want, all_used, "prefill-0 decode-0") == ["prefill-1"]
    assert left(want, want, all_used, all_used) == []
    assert len(left(want, want)) == 4  # No router answers.


def test_a_colocated_node_is_settled_once_both_its_sides_are_used() -> None:
    want, sides = wanted(0, 0, 1), {"colocated-0-prefill", "colocated-0-decode"}
    (node,) = want[1:]
    for used, left in ((sides, frozenset()), ({"colocated-0-prefill"}, {node}), ({"colocated-0"}, {node})):
        assert unsettled([node], want, want, (), {"main": [used]}) == left
    assert unsettled([node], (), (), (), {"main": [{"colocated-0-decode"}]}) == {node}


def test_a_node_that_decodes_is_killed_for_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    """A colocated node goes by its decode side, as in receipts."""
    counts = {"prefill": 1, "decode": 1, "colocated": 1}
    of = ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas=counts),))
    made = cluster(of, Recorder(members(of)), {"decode-0", "colocated-0-decode"})
    made._answer_kills(made._pools["main"])  # Without the operator's leave, nobody can ask.
    offered: list[Any] = []
    made._pools["main"].kills = SimpleNamespace(answer=lambda *given: offered.append(given))  # type: ignore[assignment]
    made._answer_kills(made._pools["main"])
    ((nodes, used, kill),) = offered
    assert (nodes, used) == (("decode-0", "colocated-0-decode"), ({"decode-0", "colocated-0-decode"},))
    kill("colocated-0-decode")
    assert made._fleet.killed == ["colocated-0"]  # type: ignore[attr-defined]
    assert told(capsys) == ["killing colocated-0: a client of the gateway asked for it"]


PAIR, PAIR_AND_TWO_SIDES = (1, 2), (1, 1, 1)


@pytest.mark.parametrize(
    ("want", "failed", "is_ready", "fatal"),
    [
        (PAIR, "", False, ""),
        (PAIR, "decode-1", False, "decode-1"),
        (PAIR, "decode-1", True, ""),
        (PAIR, "decode-0 decode-1", True, "decode-0"),
        (PAIR, "prefill-0", True, "prefill-0"),
        (PAIR, "router", True, "router"),
        # A colocated node does what a pair does.
        (PAIR_AND_TWO_SIDES, "prefill-0", True, ""),
        (PAIR_AND_TWO_SIDES, "decode-0", True, ""),
        (PAIR_AND_TWO_SIDES, "colocated-0", True, ""),
        (PAIR_AND_TWO_SIDES, "prefill-0 decode-0", True, ""),
        (PAIR_AND_TWO_SIDES, "prefill-0 colocated-0", True, "prefill-0"),
        (PAIR_AND_TWO_SIDES, "decode-0 colocated-0", True, "decode-0"),
    ],
)
def test_what_a_cluster_does_not_survive(want: tuple[int, ...], failed: str, is_ready: bool, fatal: str) -> None:
    statuses = {
        m: ProcessStatus(state=ProcessState.FAILED if m.name in failed.split() else ProcessState.RUNNING)
        for m in wanted(*want)
    }
    found = failure(wanted(*want), statuses, ["main"] if is_ready else [])
    assert (found.name if found else "") == fatal


def test_a_change_of_numbers_is_told_when_it_begins_and_when_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Recorder(wanted())
    tested = cluster(spec(), fleet, {"prefill-0", "decode-0"})
    more = spec().scaled("", {"decode": 2})
    for want in (None, spec(), more, more, more.scaled("main", {"prefill": 1})):  # The last is the default: no change.
        tested._scale(want)
    assert {node.name for node in tested._scale_status({}).unsettled} == {"decode-1"}
    fleet.running = list(members(more))
    assert {node.name for node in tested._scale_status({}).unsettled} == {"decode-1"}
    tested._pools["main"].in_use = ({"prefill-0", "decode-0", "decode-1"},)
    status = tested._scale_status({})
    assert (status.unsettled, status.failed) == (frozenset(), {})
    assert told(capsys) == ["scaling decode 1 → 2", "scaled decode 1 → 2"]


def test_a_node_that_cannot_start_ends_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    tested = cluster(spec(), Recorder(wanted(1, 2)), {"prefill-0", "decode-0"})
    tested._scale(spec().scaled("", {"decode": 2}))
    *_, new = wanted(1, 2)
    failed = ProcessStatus(state=ProcessState.FAILED, detail="exit code 2")
    assert tested._scale_status({new: failed}).failed == {new: "exit code 2\nlogs in logs"}
    assert told(capsys)[-1] == "scaled decode 1 → 2, without decode-1"


PREFILL = wanted()[1]


def life(pid: int, deaths: int = 0) -> ProcessStatus:
    """Return the status of a prefill node; pid 0: it waits for its next start."""
    state = ProcessState.RUNNING if pid else ProcessState.WAITING
    return ProcessStatus(state=state, pid=pid, deaths=deaths, detail="exit code 1" if deaths else "")


RUNS, DEAD, AGAIN = life(7), life(0, 1), life(8, 1)
DEATH = ["prefill-0: process 7", "prefill-0: waiting: exit code 1", "prefill-0: process 8, start 2"]


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([RUNS, RUNS, DEAD, DEAD, AGAIN, AGAIN], DEATH),
        ([RUNS, AGAIN, AGAIN], DEATH),  # It died and started between two looks.
        (
            [RUNS, DEAD, AGAIN, life(9, 2), life(9, 2)],
            [*DEATH, "prefill-0: waiting: exit code 1", "prefill-0: process 9, start 3"],
        ),
        # Deaths on a machine that is gone do not count.
        ([AGAIN, RUNS, AGAIN], [*DEATH[1:], *DEATH]),
    ],
)
def test_every_death_is_told(lives: list[ProcessStatus], expected: list[str], capsys: Any) -> None:
    tested = cluster(spec())
    for status in lives:
        tested._tell_processes({PREFILL: status})
    assert told(capsys) == expected


@pytest.mark.parametrize(
    "error",
    [InternalError("internal error, id 1"), CancelledByPeerError("cancelled"), UnauthenticatedError("needs a token")],
)
def test_no_error_of_a_router_ends_a_cluster_that_was_ready(error: CorunError) -> None:
    """The processes serve on. Before that, it may be a mistake that no wait will mend."""

    def refuse(**_: float) -> None:
        raise error

    answering: Any = SimpleNamespace(get_cluster=lambda **_: "status")
    refusing: Any = SimpleNamespace(get_cluster=refuse)
    pool = cluster(spec())._pools["main"]
    pool.clients = (refusing, answering)
    with pytest.raises(type(error)):
        _ask(pool)
    pool.is_ready = True
    assert _ask(pool) == ["status"]


def test_what_a_node_does_is_told_until_it_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    tested = cluster(spec())
    loading = replace(RUNS, doing="loading the weights")
    tested._tell_start({wanted()[0]: replace(RUNS, doing="listening"), PREFILL: loading})
    assert told(capsys) == ["prefill-0: loading the weights"]
    tested._pools["main"].in_use = ({"prefill-0"},)
    tested._tell_start({PREFILL: replace(RUNS, doing="something else")})
    tested._pools["main"].in_use, tested._pools["main"].is_ready = (), True
    tested._tell_start({PREFILL: replace(RUNS, doing="something else")})
    assert told(capsys) == []


def test_each_stage_is_told_once_and_a_long_one_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    say = Progress()
    for stage in ("", "importing vLLM", "importing vLLM", "loading the weights"):
        say.starting({"decode-0": stage, "prefill-0": ""})
    assert told(capsys) == ["decode-0: importing vLLM", "decode-0: loading the weights"]
    for now in (QUIET_S, QUIET_S + 1, 2 * QUIET_S, 3 * QUIET_S):  # noqa: B007
        say.starting({"decode-0": "loading the weights", "prefill-0": ""})
    assert told(capsys) == [
        "waiting for decode-0 (loading the weights, 11 s), prefill-0",
        "waiting for decode-0 (loading the weights, 30 s), prefill-0",
    ]
    now = 100.0
    say.starting({})
    assert told(capsys) == []


def test_every_stage_of_a_node_says_how_much_of_its_start_has_passed() -> None:
    sources = [*(ROOT / "corun" / "node").rglob("*.py"), ROOT / "corun" / "models" / "__init__.py"]
    found = [name for path in sources for name in re.findall(r'stages\.enter\(f?"([^"{]+)', path.read_text("utf-8"))]
    assert len(found) >= 8
    known = {name: passed(name) for name in found if not name.startswith("fetching ")}
    assert all(0 < share < 1 for share in known.values()), known
    assert list(PASSED.values()) == sorted(PASSED.values())
    assert passed("fetching smollm2, 5 of 93 MB") == passed("") == 0


def test_on_a_terminal_a_bar_shows_how_far_a_start_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    say = Progress()
    say.starting({"decode-0": "", "prefill-0": "importing vLLM"}, nodes=2)
    say.starting({"decode-0": "testing itself: every layer"}, nodes=2)
    say.close()
    say.close()
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"1 of 2 nodes ready \S+ +80% 0:00:0\d about \S+ left", shown), shown
    assert "decode-0: testing itself" in shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    say.starting({"decode-0": "loading the weights"}, nodes=2)
    assert "nodes ready" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # The bar's own thread ends.
def test_a_cluster_goes_on_when_its_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no process would drain: a terminal that is closed sends SIGHUP, and takes no more lines."""
    main, side = pty.openpty()
    terminal = os.fdopen(side, "w")
    monkeypatch.setattr("sys.stderr", terminal)
    try:
        say = Progress()
        say.starting({"decode-0": "importing vLLM"}, nodes=2)
        os.close(main)
        say("stopping decode-0")
        say.starting({"decode-0": "testing itself"}, nodes=2)
        say.close()
    finally:
        with suppress(OSError):
            terminal.close()


def test_the_next_steps_are_commands_that_reach_the_cluster(tmp_path: Path) -> None:
    pool = PoolSpec(common={"model": "tiny"})
    assert next_steps(pool, "127.0.0.1:50051")[0] == "corun generate 'Once upon a time' --seed 42"
    assert next_steps(pool, "127.0.0.1:7001")[1] == "corun status --router 127.0.0.1:7001"
    (tmp_path / "client.token").write_text("x")
    files = {"tls_ca": str(tmp_path / "ca.pem"), "client_tokens_file": str(tmp_path / "clients.tokens")}
    security = Security(**files, tls_name="corun", tls_clients=True)
    for command in next_steps(replace(pool, security=security), "10.0.0.7:50051"):
        assert command.endswith(
            f" --router 10.0.0.7:50051 --tls-ca {tmp_path}/ca.pem --tls-name corun --tls-cert YOUR-client.pem"
            f" --tls-key YOUR-client.key --token-file {tmp_path}/client.token"
        )
        parse(command.replace("'Once upon a time'", "Once").split()[1:])


@pytest.mark.parametrize(("is_ready", "code"), [(False, 130), (True, 0)])
def test_a_signal_interrupts_a_start_and_ends_what_is_ready(
    is_ready: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(*_: object, **__: object) -> Cluster:
        made = cluster(spec())
        made._pools["main"].is_ready = is_ready
        return made

    monkeypatch.setattr(launch, "Cluster", make)
    monkeypatch.setattr(launch, "with_free_ports", lambda spec: spec)
    monkeypatch.setattr(launch.runtime, "started", lambda *_: nullcontext())
    for name in ("start", "watch", "stop"):
        monkeypatch.setattr(Cluster, name, lambda *_: None)
    assert launch.run(spec(), log_dir=tmp_path) == code


def test_two_clusters_do_not_share_a_directory_of_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else one writes its settings over those that the other's processes read when they start again."""
    monkeypatch.setattr(launch, "with_free_ports", lambda spec: spec)
    monkeypatch.setattr(launch.runtime, "started", lambda *_: nullcontext())
    for name in ("start", "stop"):
        monkeypatch.setattr(Cluster, name, lambda *_: None)

    def second(*_: object) -> None:
        with pytest.raises(InvalidArgumentError, match="must not be that of another corun up that runs") as error:
            launch.run(spec(), log_dir=tmp_path)
        assert (error.value.field, error.value.value) == ("log_dir", str(tmp_path))

    monkeypatch.setattr(Cluster, "watch", second)
    launch.run(spec(), log_dir=tmp_path)
    monkeypatch.setattr(Cluster, "watch", lambda *_: None)
    launch.run(spec(), log_dir=tmp_path)


def test_a_gateway_that_fails_ends_a_cluster_only_before_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    tested = cluster(spec())
    failed = ProcessStatus(state=ProcessState.FAILED, detail="exit code 1 after 0 s")
    gateway: Any = SimpleNamespace(status=lambda: failed)
    tested._gateways, pool = {"gateway": gateway}, tested._pools["main"]
    pool.gateway = "gateway"
    with pytest.raises(UnavailableError, match="gateway exit code 1"):
        tested._tell_gateways()
    pool.is_ready = True
    tested._tell_gateways()
    tested._tell_gateways()
    assert told(capsys) == ["gateway: failed: exit code 1 after 0 s"]
