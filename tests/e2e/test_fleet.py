"""A fleet over several Ray hosts with real engines: a host is lost under its streams, another one is added and used."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from corun import Client, SamplingParams
from tests.fleet.hosts import Up, hosts, up, wait_for
from tests.fleet.streams import pack

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
PROMPTS = ([5, 6, 7], [9] * 150, [3, 1, 4, 1, 5, 9, 2, 6], [11] * 40)
ATTEMPTS = 10
PARAMS = SamplingParams(temperature=0.8, max_tokens=1200, ignore_eos=True, logprobs=True)


class Streaming(threading.Thread):
    """One stream: its bits, and how many tokens it has so far."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__()
        self._address, self._number = address, number
        self.tokens = 0
        self.bits = b""
        self.start()

    @property
    def has_all(self) -> bool:
        return self.tokens == PARAMS.max_tokens

    def run(self) -> None:
        with Client(self._address) as client:
            for chunk in client.stream(PROMPTS[self._number], PARAMS, seed=self._number):
                self.bits += pack(chunk.token_ids, chunk.logprobs)
                self.tokens += len(chunk.token_ids)


def stream_all(address: str) -> list[Streaming]:
    return [Streaming(address, number) for number in range(len(PROMPTS))]


def bits(streams: list[Streaming]) -> list[bytes]:
    for stream in streams:
        stream.join(READY_S)
        assert stream.has_all
    return [stream.bits for stream in streams]


def leases(fleet: Up) -> dict[str, int]:
    """By node; up to a heartbeat old."""
    return {n.node.ref.node_id: n.load.leases for n in fleet.status().nodes}


def streams_that_run_on(fleet: Up, node: str) -> list[Streaming]:
    """Start streams until a node tells, while none has ended, that some of them run there.

    A node tells by heartbeat. On a machine that is busy with something else, all may have ended by then: try again.
    """
    for _ in range(ATTEMPTS):
        wait_for(lambda: not any(leases(fleet).values()), "the nodes have told that earlier streams have ended")
        streams = stream_all(fleet.address)
        while all(stream.is_alive() for stream in streams):  # A stream that failed ends this wait, too.
            if all(stream.tokens > 10 for stream in streams) and leases(fleet)[node] > 0:
                return streams
            time.sleep(0.05)
        bits(streams)
    raise AssertionError(f"{ATTEMPTS} times, all streams ended before {node} told that they run there")


def test_a_stream_survives_its_host(tmp_path: Path) -> None:
    with hosts(tmp_path) as ray:
        ray.add(a=2, b=1)
        with up(ray, TOML, fake=False) as fleet:
            fleet.wait_for(r"^ready:", READY_S)
            address = fleet.address
            assert (fleet.host("decode-0"), fleet.host("decode-1")) == ("a", "b")
            undisturbed = bits(stream_all(address))

            streams = streams_that_run_on(fleet, "decode-1")
            ray.lose("b")
            assert bits(streams) == undisturbed
            assert "an attempt of sample" in (fleet.logs / "router.log").read_text()

            streams = stream_all(address)
            ray.add(c=1)
            wait_for(lambda: fleet.host("decode-1") == "c", "decode-1 is started on the new host")
            assert bits(streams) == undisturbed
            fleet.stop()
