"""`corun up`: one router, prefill nodes and decode nodes as supervised processes, placed by Ray.

Owns the life of a cluster from its first process to its last. Each process is a plain `python -m router|prefill_node|
decode_node` under a supervisor, and each supervisor is a Ray actor, which Ray starts again should it die. By default
Ray is started too, for this launch alone and on the loopback interface. Only this file imports ray; it must not know
what the processes do.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corun.client import Client
from corun.cluster import ClusterStatus, NodeState
from corun.config import SEED_KEY_VARIABLE, MemberConfig
from corun.errors import DeadlineError, InvalidArgumentError, UnavailableError
from corun.plan import (
    LOOPBACK,
    ROUTER,
    TINY,
    Plan,
    Security,
    command,
    free_port,
    resolve_model,
    role_of,
    share_of_cores,
    share_of_gpu,
)
from corun.processes import descendants, end_tree
from corun.signals import StopSignals
from corun.supervisor import ProcessState, ProcessStatus, Supervisor

_START_TIMEOUT_S = 3600.0  # Most of it may be the download of a model.
_STATUS_TIMEOUT_S = 2.0
_POLL_S = 0.5
_GRACE_S = 40.0  # A process has 30 s to drain, and some more to end.

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Leaves CUDA_VISIBLE_DEVICES alone.
    "RAY_memory_monitor_refresh_ms": "0",  # An actor holds no memory worth killing it for.
}
_LOCAL_RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Else Ray listens on the outward interface.
    # What Ray would do to its workers, the processes would inherit: run after all others, be the first out of memory.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
}
# What Ray adds to the environment of its workers: not the processes' business, and OMP_NUM_THREADS could move bits.
_ADDED_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


def up(
    model: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    slots: int = 256,
    port: int = 50051,
    host: str = LOOPBACK,
    threads: int = 0,
    chunk_size: int = 2048,
    dtype: str = "auto",
    ray_address: str | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
    tls_name: str = "",
    tls_clients: bool = False,
    cluster_token_file: str = "",
    client_tokens_file: str = "",
    insecure: bool = False,
    audit_fraction: float = 0.001,
    audit_dir: str = "",
    metrics_port: int | None = None,
) -> int:
    """Runs a cluster until SIGINT, SIGTERM or SIGHUP; returns 0 then, and 1 when the cluster cannot go on.

    model: a path, a hub id, or "tiny". port: the router's; 0 picks a free one. ray_address: a running Ray to join
    instead of a local one. log_dir: one log per process; by default a new directory. Without threads, nodes on a
    machine without GPUs get equal shares of its cores. tls_*, *_file: paths, on every machine; see `RouterConfig`.
    insecure: allows a public `host` without them. audit_*, metrics_port: the router's. Call it in the main thread.

    Raises:
        InvalidArgumentError: a value is out of range, the port is taken, or a public host lacks TLS and tokens. Nothing
            was started.
        UnavailableError: Ray cannot be started or joined.
    """
    security = Security(
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        tls_ca=_absolute(tls_ca),
        tls_name=tls_name,
        tls_clients=tls_clients,
        cluster_token_file=_absolute(cluster_token_file),
        client_tokens_file=_absolute(client_tokens_file),
        insecure=insecure,
    )
    security.check(host)
    plan = Plan(
        model=model if model == TINY else resolve_model(model),
        prefill=prefill,
        decode=decode,
        slots=slots,
        host=host,
        port=free_port(host, port),
        threads=threads,
        chunk_size=chunk_size,
        dtype=dtype,
        security=security,
        audit_fraction=audit_fraction,
        audit_dir=_absolute(audit_dir),
        metrics_port=metrics_port,
    )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # Else every lost connection is a line on the terminal.
    logs = Path(log_dir or tempfile.mkdtemp(prefix="corun-logs-")).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals:
        return _run(plan, logs, ray_address, signals)


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def _run(plan: Plan, logs: Path, ray_address: str | None, signals: StopSignals) -> int:
    say = Progress()
    say(f"logs in {logs}")
    with _ray(ray_address, signals):
        cluster = _Cluster(plan, logs, say)
        try:
            if not signals.count:
                cluster.start()
                cluster.watch(signals)
            return 0
        except (DeadlineError, UnavailableError) as error:
            say(f"giving up: {error}")
            return 1
        finally:
            cluster.stop(signals)


class Progress:
    """Lines with the time since the start, on stderr; what is repeated is said once."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._said: dict[str, str] = {}

    def __call__(self, text: str) -> None:
        with suppress(BrokenPipeError):  # Nobody reads any more; the cluster still has to be ended.
            print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def change(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self(f"{subject}: {text}")


@dataclass(frozen=True, slots=True)
class _Share:
    """What of a machine a process gets."""

    gpu: float = 0.0
    cores: tuple[int, ...] = ()
    """Empty: all."""


class _Actor:
    """One supervisor, on the machine that Ray chose. host: where a node is reached; None is that machine's address."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        router: str,
        host: str | None,
        share: _Share,
        logs: Path,
        environment: Mapping[str, str],
    ) -> None:
        plan = replace(plan, model=resolve_model(plan.model))  # Every machine makes its own copy of the built-in one.
        argv = command(plan, name, router=router, host=host or _own_host(), gpu_share=share.gpu)
        logs.mkdir(parents=True, exist_ok=True)
        env = {key: value for key, value in os.environ.items() if key not in _ADDED_BY_RAY} | dict(environment)
        if share.cores:
            os.sched_setaffinity(0, share.cores)
        self._supervisor = Supervisor(name, argv, logs / f"{name}.log", grace_s=_GRACE_S, env=env)

    def status(self) -> ProcessStatus:
        return self._supervisor.status()

    def stop(self) -> None:
        self._supervisor.stop()


class _Cluster:
    """The actors of one launch, and what its user is told about them."""

    def __init__(self, plan: Plan, logs: Path, say: Progress) -> None:
        self._plan, self._logs, self._say = plan, logs, say
        self._actors: dict[str, Any] = {}
        # A router that is started again has to give the same seeds, so that clients can go on.
        seed_key = os.environ.get(SEED_KEY_VARIABLE) or secrets.token_hex(32)
        self._router_environment = {SEED_KEY_VARIABLE: seed_key}
        self._ready = False

    def start(self) -> None:
        """Places every process; they start at once, in no order."""
        spread = sum(node["Alive"] for node in _api().nodes()) > 1
        if spread and self._plan.host == LOOPBACK:
            raise InvalidArgumentError("host", self._plan.host, "must be an address that the other machines reach")
        self._router = self._plan.router_address(_own_host() if spread else LOOPBACK)
        for name, share in self._shares(spread).items():
            placement = _here() if name == ROUTER else {"scheduling_strategy": "SPREAD", "num_gpus": share.gpu}
            actor = _api().remote(_Actor).options(num_cpus=0, max_restarts=-1, **placement)
            host = None if spread else LOOPBACK
            environment = self._router_environment if name == ROUTER else {}
            self._actors[name] = actor.remote(self._plan, name, self._router, host, share, self._logs, environment)

    def _shares(self, spread: bool) -> dict[str, _Share]:
        nodes = self._plan.nodes
        gpu = share_of_gpu(_api().cluster_resources().get("GPU", 0.0), len(nodes))
        if gpu or spread or self._plan.threads:
            return {ROUTER: _Share()} | {name: _Share(gpu=gpu) for name in nodes}
        cores = share_of_cores(sorted(os.sched_getaffinity(0)), nodes)
        return {ROUTER: _Share()} | {name: _Share(cores=cores[name]) for name in nodes}

    def watch(self, signals: StopSignals) -> None:
        """Tells what happens until a stop signal, for as long as the cluster can work.

        Raises UnavailableError when it cannot any more, and DeadlineError if it never could.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        member = MemberConfig(**self._plan.security.of_member())
        with Client(self._router, tls=member.tls, token=member.cluster_token()) as client:
            while not signals.count:
                if not self._ready and time.monotonic() > deadline:
                    raise DeadlineError(f"the cluster was not ready in {_START_TIMEOUT_S:.0f} s")
                self._check_processes(self._statuses())
                if (status := _ask(client)) is not None:
                    self._tell_nodes(status)
                time.sleep(_POLL_S)

    def stop(self, signals: StopSignals) -> None:
        """Ends the router, which drains, then the nodes. A second stop signal kills what is still running."""
        for names in ((ROUTER,), self._plan.nodes):
            self._stop([name for name in names if name in self._actors], signals)

    def _stop(self, names: Sequence[str], signals: StopSignals) -> None:
        asked = 0
        deadline = time.monotonic() + _GRACE_S + _STATUS_TIMEOUT_S
        while running := [name for name, status in self._statuses(names).items() if _may_run(status)]:
            if asked < 1 + (signals.count > 1):
                asked += 1
                self._say(f"{'stopping' if asked == 1 else 'killing'} {', '.join(running)}")
                for name in running:
                    self._actors[name].stop.remote()
            if time.monotonic() > deadline:
                self._say(f"{', '.join(running)} did not end in time")
                return
            time.sleep(_POLL_S / 5)

    def _statuses(self, names: Sequence[str] | None = None) -> dict[str, ProcessStatus]:
        refs = {name: self._actors[name].status.remote() for name in (self._actors if names is None else names)}
        return {name: _status(name, ref) for name, ref in refs.items()}

    def _check_processes(self, statuses: dict[str, ProcessStatus]) -> None:
        for name, status in statuses.items():
            if status.state is ProcessState.RUNNING:
                again = f", start {status.deaths + 1}" if status.deaths else ""
                self._say.change(name, f"process {status.pid}{again}")
            else:
                self._say.change(name, f"{status.state.value}: {status.detail or 'being placed'}")
        failed = [name for name, status in statuses.items() if status.state is ProcessState.FAILED]
        if failed and (not self._ready or _whole_role(failed, statuses)):
            raise UnavailableError(f"{failed[0]} {statuses[failed[0]].detail}\nlogs in {self._logs}")

    def _tell_nodes(self, status: ClusterStatus) -> None:
        for node in status.nodes:
            name = node.node.ref.node_id
            detail = f": {node.detail}" if node.detail else ""
            self._say.change(f"{name} in cluster", f"{node.state.value}{detail}")
            if node.state is NodeState.REFUSED and not self._ready:
                raise UnavailableError(f"the router refused {name}: {node.detail}")
        slots = {node.node.ref.node_id: node.node.slots for node in status.nodes if node.state is NodeState.READY}
        if not self._ready and slots.keys() >= set(self._plan.nodes):
            self._ready = True
            line = f"ready: {self._router}, fingerprint {status.fingerprint}, {sum(slots.values())} slots"
            with suppress(BrokenPipeError):
                print(line, flush=True)


def _whole_role(failed: Sequence[str], names: Iterable[str]) -> bool:
    """Whether nothing is left of the role of any failed process."""
    alive = {role_of(name) for name in names if name not in failed}
    return any(role_of(name) not in alive for name in failed)


def _may_run(status: ProcessStatus) -> bool:
    """False for one that has not been placed, too: its process could start only once its actor runs."""
    return status.state is ProcessState.RUNNING or (status.state is ProcessState.WAITING and status.deaths > 0)


def _status(name: str, ref: Any) -> ProcessStatus:
    try:
        status: ProcessStatus = _api().get(ref, timeout=_STATUS_TIMEOUT_S)
    except _api().exceptions.ActorDiedError as error:
        return ProcessStatus(name=name, state=ProcessState.FAILED, detail=f"its supervisor died: {error}")
    except (_api().exceptions.RayActorError, _api().exceptions.GetTimeoutError):
        return ProcessStatus(name=name, state=ProcessState.WAITING)
    return status


def _ask(client: Client) -> ClusterStatus | None:
    """What the router says; None while there is none."""
    try:
        return client.get_cluster(timeout_s=_STATUS_TIMEOUT_S)
    except (UnavailableError, DeadlineError):
        return None


def _own_host() -> str:
    return str(_api().util.get_node_ip_address())


def _here() -> dict[str, Any]:
    strategy = _api().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"scheduling_strategy": strategy(_api().get_runtime_context().get_node_id(), soft=False)}


@contextmanager
def _ray(address: str | None, signals: StopSignals) -> Iterator[None]:
    """A Ray to place actors with. One that was started here leaves no process and no file behind."""
    os.environ.update(_RAY_ENVIRONMENT if address else _RAY_ENVIRONMENT | _LOCAL_RAY_ENVIRONMENT)
    scratch = "" if address else tempfile.mkdtemp(prefix="corun-ray-", dir="/tmp")  # A socket's path must be short.
    try:
        _init_ray(address, scratch)
        signals.install()
        yield
    finally:
        started = {} if address else descendants(os.getpid())
        _api().shutdown()
        end_tree(started)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _init_ray(address: str | None, scratch: str) -> None:
    local = {
        "num_cpus": 1,
        "object_store_memory": 80 * 2**20,  # Ray takes no less; nothing is stored.
        "include_dashboard": False,
        "_node_ip_address": LOOPBACK,
        "_temp_dir": scratch,
    }
    try:
        _api().init(address, log_to_driver=False, logging_level=logging.ERROR, **({} if address else local))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"Ray did not start: {error}") from error


def _api() -> Any:
    """ray. It reads its environment when it is imported, so that has to be set before."""
    import ray  # noqa: PLC0415

    return ray
