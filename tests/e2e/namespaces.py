"""Router, prefill node and decode node in network namespaces of their own, joined by a bridge.

For addresses they are three machines with an address each. KV goes over TCP from one to another. Tests only.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from corun.processes import descendants, end_tree

NET = f"10.77.{os.getpid() % 250}"
TAG = f"c{os.getpid() % 100_000}"
"""The start of the names of all namespaces and links made here. The kernel allows names of 15 characters."""
HOSTS = {"router": f"{NET}.2", "prefill": f"{NET}.3", "decode": f"{NET}.4"}
PORTS = {"router": 50051, "prefill": 50061, "decode": 50071}
ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Keep NIXL on TCP. The namespaces of one machine share its memory, which it would use otherwise."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60).stdout


@functools.cache
def why_not() -> str:
    """Return why no namespaces can be made here; empty if they can."""
    try:
        ip("netns", "add", f"{TAG}-try")
        ip("netns", "del", f"{TAG}-try")
    except FileNotFoundError:
        return "there is no ip command"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    except subprocess.TimeoutExpired as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def machines() -> Iterator[None]:
    """Make a namespace for each process, and a bridge whose own address is that of clients."""
    bridge = f"{TAG}-br"
    with ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("address", "add", f"{NET}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for name, address in HOSTS.items():
            space, outer = f"{TAG}-{name}", f"{TAG}-{name[0]}"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield


@contextmanager
def running(name: str, logs: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its namespace, on its fixed port. At the end of the block it is asked to end, and must do so."""
    module = "router" if name == "router" else f"{name}_node"
    listen = ("--host", HOSTS[name], "--port", str(PORTS[name]))
    argv = ["ip", "netns", "exec", f"{TAG}-{name}", sys.executable, "-m", module, *listen, *flags]
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
    try:
        yield process
        process.terminate()
        assert process.wait(60) == 0, (logs / f"{name}.log").read_text()[-3000:]
    finally:
        tree = descendants(process.pid)
        process.kill()
        process.wait()
        end_tree(tree, 2.0)


def received() -> int:
    """Return the number of bytes that the decode node's machine has received so far."""
    links = json.loads(ip("-n", f"{TAG}-decode", "-s", "-j", "link", "show", "eth0"))
    return int(links[0]["stats64"]["rx"]["bytes"])


@contextmanager
def spread(logs: Path, *node: str, decode: Sequence[str], prefill: Sequence[str]) -> Iterator[str]:
    """Run a cluster over three machines and yield the address of its router.

    node: flags of both nodes; decode, prefill: flags of each.
    """
    router = f"{HOSTS['router']}:{PORTS['router']}"
    with ExitStack() as stack:
        stack.enter_context(machines())
        stack.enter_context(running("router", logs, "--audit-fraction", "0"))
        for name, flags in (("prefill", prefill), ("decode", decode)):
            own = ("--router", router, "--nixl-host", HOSTS[name], "--node-id", name)
            stack.enter_context(running(name, logs, *node, *own, *flags))
        yield router
