"""Router, prefill and decode node in network namespaces of their own: three machines with an address each, as far as
addresses are concerned, joined by a bridge. KV goes over TCP from one to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from corun import Client, SamplingParams, tiny
from corun.cluster import NodeRole, NodeState
from corun.processes import descendants, end_tree
from tests.e2e.conftest import START_TIMEOUT_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NET = f"10.77.{os.getpid() % 250}"
TAG = f"c{os.getpid() % 100_000}"
"""Of the names of what is made here; the kernel takes 15 characters."""
HOSTS = {"router": f"{NET}.2", "prefill": f"{NET}.3", "decode": f"{NET}.4"}
PORTS = {"router": 50051, "prefill": 50061, "decode": 50071}
ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Namespaces of one machine share its memory, which NIXL would take instead."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=10).stdout


def why_not() -> str:
    try:
        ip("netns", "add", f"{TAG}-try")
        ip("netns", "del", f"{TAG}-try")
    except FileNotFoundError:
        return "there is no ip command"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


@pytest.fixture
def machines() -> Iterator[None]:
    """A namespace for each process, and a bridge whose own address is that of clients."""
    if reason := why_not():
        pytest.skip(reason)
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
    """A process in its namespace, on its fixed port; ends with the block, as one that is asked to."""
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
    """Bytes that came to the decode node's machine so far."""
    links = json.loads(ip("-n", f"{TAG}-decode", "-s", "-j", "link", "show", "eth0"))
    return int(links[0]["stats64"]["rx"]["bytes"])


def test_the_cluster_works_over_addresses(machines: None, tmp_path: Path) -> None:
    router = f"{HOSTS['router']}:{PORTS['router']}"
    common = ("--model", str(tiny.ensure()), "--threads", "1", "--router", router)
    with ExitStack() as stack, Client(router) as client:
        stack.enter_context(running("router", tmp_path, "--audit-fraction", "0"))
        for name, flags in (("prefill", ("--kv-check-fraction", "1")), ("decode", ("--slots", "8"))):
            own = ("--nixl-host", HOSTS[name], "--node-id", name)
            stack.enter_context(running(name, tmp_path, *common, *own, *flags))
        wait_until(lambda: is_ready(client), "the cluster is ready", START_TIMEOUT_S)

        nodes = {node.node.role: node.node for node in client.get_cluster().nodes}
        assert nodes[NodeRole.PREFILL].address == f"{HOSTS['prefill']}:{PORTS['prefill']}"
        assert nodes[NodeRole.DECODE].address == f"{HOSTS['decode']}:{PORTS['decode']}"
        assert nodes[NodeRole.PREFILL].nixl is not None
        assert nodes[NodeRole.PREFILL].nixl.host == HOSTS["prefill"]

        params = SamplingParams(max_tokens=8, logprobs=True, ignore_eos=True)
        short, before = client.generate([5] * 16, params, seed=1), received()
        again, middle = client.generate([5] * 16, params, seed=1), received()
        client.generate([5] * 1024, params, seed=1)
        assert (short.token_ids, short.logprobs) == (again.token_ids, again.logprobs)
        # The KV of a thousand more tokens came over the wire: it is far larger than their ids.
        assert received() - middle > 1008 * tiny_kv_bytes() > 2 * (middle - before)


def tiny_kv_bytes() -> int:
    """Of one token, in the least that a type of KV takes."""
    config = json.loads((tiny.ensure() / "config.json").read_text())
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2)


def is_ready(client: Client) -> bool:
    from corun import CorunError

    try:
        return sum(node.state is NodeState.READY for node in client.get_cluster().nodes) == 2
    except CorunError:
        return False
