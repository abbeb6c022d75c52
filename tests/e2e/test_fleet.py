"""A fleet over several Ray hosts with real engines: a host is lost under its streams, another one is added and used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corun import AsyncClient
from tests.chaos.traffic import Case, answered, make_cases
from tests.fleet.hosts import Up, hosts, up, wait_for
from tests.fleet.streams import streaming

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

READY_S = 400.0
TOML = """
[security]
insecure = true
[pools.main]
model = "tiny"
threads = 1
[pools.main.router]
host = "0.0.0.0"
port = 0
audit_fraction = 0
[pools.main.prefill]
chunk_size = 128
kv_check_fraction = 1
[pools.main.decode]
slots = 8
replicas = 2
"""


def test_streams_survive_a_host(tmp_path: Path) -> None:
    with hosts(tmp_path) as ray:
        ray.add(a=2, b=1)
        with up(ray, TOML, fake=False) as fleet:
            fleet.wait_for(r"^ready:", READY_S)
            assert (fleet.host("decode-0"), fleet.host("decode-1")) == ("a", "b")
            cases = asyncio.run(undisturbed(fleet.address))
            with streaming(fleet.address, cases) as streams:
                streams.more()
                wait_for(lambda: leases(fleet)["decode-1"] > 0, "the node has told that streams run there")
                ray.lose("b")
                streams.more()
                assert "an attempt of sample" in (fleet.logs / "router.log").read_text()
                ray.add(c=1)
                wait_for(lambda: fleet.host("decode-1") == "c", "decode-1 is started on the new host")
                streams.more()
            assert streams.failed == streams.wrong == []
            fleet.stop()


async def undisturbed(address: str) -> list[Case]:
    async with AsyncClient(address) as client:
        return [await answered(client, case) for case in make_cases(12)]


def leases(fleet: Up) -> dict[str, int]:
    """Return the leases of each node, up to a heartbeat old."""
    return {n.node.ref.node_id: n.load.leases for n in fleet.status().nodes}
