"""`corun up`: the routers and nodes of a cluster as supervised processes, placed by Ray.

This package owns the life of a cluster from its first process to its last. `run` starts the processes that a spec
describes, keeps them running, changes their number when asked, and ends all of them. Each process is a plain
`python -m MODULE --config FILE --pool NAME` (`members.MODULES`). Only this package imports ray (`runtime`). It must not
know what the processes do.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from corun.config.cluster_file import ClusterSpec
from corun.errors import INTERRUPTED, DeadlineError, InvalidArgumentError, UnavailableError
from corun.launch import runtime
from corun.launch.cluster import Cluster
from corun.launch.members import MODULES, with_free_ports
from corun.launch.progress import Progress
from corun.models import checked


def run(
    spec: ClusterSpec,
    *,
    ray_address: str | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    modules: Mapping[str, str] = MODULES,
) -> int:
    """Run a cluster until SIGINT, SIGTERM or SIGHUP. Return 0 after such a signal, 130 if it came before the cluster
    was ready, and 1 if the cluster cannot go on.

    ray_address: a running Ray to join instead of a local one. log_dir: the directory of the logs, one per process, on
    the machine of the process; by default a new directory. modules: the Python module that runs for each role. If the
    spec does not set threads, nodes on one machine without GPUs get equal shares of its cores. Call this function in
    the main thread.

    Raises:
        InvalidArgumentError: a value is out of range, a port is taken, a public host lacks TLS and tokens, this
            machine has fewer GPUs than a pool says it needs, or another cluster uses log_dir. Nothing was started.
        UnavailableError: Ray cannot be started or joined.
    """
    check(spec)
    spec = with_free_ports(spec)
    logs = Path(log_dir or tempfile.mkdtemp(prefix="corun-logs-")).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    say = Progress()
    say(f"logs in {logs}")
    say("starting Ray" if ray_address is None else f"joining Ray at {ray_address}")
    with _kept(logs), runtime.StopSignals() as signals, runtime.started(ray_address, signals):
        cluster = Cluster(spec, logs, say, modules, joined=ray_address is not None)
        try:
            if not signals.count:
                cluster.start()
                cluster.watch(signals)
            code = 0 if cluster.is_ready else INTERRUPTED
        except (DeadlineError, UnavailableError) as error:
            say.close()
            say(f"giving up: {error}")
            code = 1
        finally:
            say.close()
            cluster.stop(signals)
    say(f"ended: every process has stopped; logs in {logs}")
    return code


@contextmanager
def _kept(logs: Path) -> Iterator[None]:
    """Keep other clusters out of a directory for as long as the block runs: the names of their files are the same.

    The lock also keeps systemd from clearing the directory of what is old (tmpfiles.d(5)).
    """
    directory = os.open(logs, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            limit = "must not be that of another corun up that runs"
            raise InvalidArgumentError("log_dir", str(logs), limit) from None
        except OSError:
            pass  # NFS locks no directory.
        yield
    finally:
        os.close(directory)


def check(spec: ClusterSpec) -> None:
    """Raise InvalidArgumentError unless every process of the cluster can be started. Start nothing."""
    spec.check()
    spec.check_files()
    for pool in spec.pools:
        with pool.saying_where("prefill"):
            checked(pool.model)  # A model that is fetched or made comes to the machine where it is needed.
