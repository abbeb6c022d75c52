"""One thread per engine, which means other kernels and another contract. If network namespaces can be made, router,
prefill node and decode node run on machines of their own, so that KV goes over TCP.

The file's name sorts first, so that its cluster has the machine for itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from corun import Client, SamplingParams
from corun.models import tiny
from corun.types import NodeRole
from tests.e2e.conftest import ALL_CHECKED, CHUNK, SLOTS, START_TIMEOUT_S, ready, started
from tests.e2e.namespaces import HOSTS, PORTS, received, spread, why_not
from tests.e2e.test_determinism import make_cases, verify_all
from tests.machine import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client of the cluster, once the cluster is ready."""
    logs = tmp_path_factory.mktemp("one-thread")
    with ExitStack() as stack:
        if why_not():
            yield stack.enter_context(stack.enter_context(started(logs, threads=1)).client())
            return
        node = ("--model", str(tiny.ensure()), "--threads", "1")
        chunks = ("--chunk-size", str(CHUNK), *ALL_CHECKED)
        router = stack.enter_context(spread(logs, *node, decode=("--slots", str(SLOTS)), prefill=chunks))
        client = stack.enter_context(Client(router))
        wait_for(lambda: ready(client.get_cluster), "the cluster is ready", START_TIMEOUT_S)
        yield client


def test_verify_under_every_condition(client: Client) -> None:
    verify_all(client, make_cases(10))


def test_nodes_are_reached_by_their_addresses_and_so_is_kv(client: Client) -> None:
    if reason := why_not():
        pytest.skip(reason)
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
    config = json.loads((tiny.ensure() / "config.json").read_text())
    values_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    kv_bytes = 2 * 1008 * values_per_token  # A value of KV has at least 2 bytes here.
    assert received() - middle > kv_bytes > 2 * (middle - before)
