"""A fleet over several Ray hosts, with fake engines. Hosts are lost and added, and the number of nodes changes. Every
stream that runs meanwhile is bit for bit what it is undisturbed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from corun.processes import living
from corun.testing.model import write_tokenizer
from tests.chaos.fakes import known_cases
from tests.fleet.hosts import Hosts, Up, hosts, up, wait_for
from tests.fleet.nodes import HELD, WRONG
from tests.fleet.streams import Streams, streaming

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TOML = """
[security]
insecure = true
[pools.main]
model = "model"
drain_grace_s = 1
[pools.main.router]
replicas = 2
host = "0.0.0.0"
port = 0
max_attempts = 20
share_kv = false  # The fakes keep KV as a file, which has one reader.
audit_fraction = 0
[pools.main.prefill]
[pools.main.decode]
slots = 8
replicas = 2
[pools.main.colocated]
slots = 8
"""
SIDES = {"colocated-0-prefill", "colocated-0-decode"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model directory that TOML names."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    return directory


def test_streams_do_not_notice_what_happens_to_hosts_and_nodes(tmp_path: Path, model: Path) -> None:
    with hosts(tmp_path) as ray:
        ray.add(r=0, a=2, b=2)
        with up(ray, TOML) as fleet:
            address, cases = fleet.address, known_cases(longest=150)
            assert (fleet.host("router-0"), fleet.host("router-1")) == ("head", "r")
            home, lost = fleet.host("prefill-0"), fleet.host("decode-1")
            assert {home, lost} == {"a", "b"}
            assert fleet.host("decode-0") == home  # They are a pair.
            assert fleet.host("colocated-0") == lost
            with streaming(address, cases) as streams:
                streams.more()
                lose_a_host_and_add_one(ray, fleet, streams, lost)
                scale_up_and_down(fleet, streams)
                lose_the_pair_and_kill_ray_under_the_colocated_node(ray, fleet, streams, model / HELD)
                lose_a_router(ray, fleet, streams)
            assert streams.failed == streams.wrong == []
            say_what_cannot_be(fleet)
            (model / WRONG).touch()
            assert fleet.scale("decode=3").returncode == 0
            with streaming(address, cases) as streams:
                wait_for(lambda: streams.wrong, "other bits are seen to be others")
            fleet.stop()


def test_nodes_that_share_a_gpu_start_side_by_side(tmp_path: Path, model: Path) -> None:
    """Each counts its own memory alone, so none has to wait until another one has loaded."""
    (model / HELD).touch()
    with hosts(tmp_path) as ray:
        ray.add(a=1)
        with up(ray, TOML.replace("drain_grace_s", "nodes_per_gpu = 4\ndrain_grace_s")) as fleet:
            names = ("prefill-0", "decode-0", "decode-1", "colocated-0")
            for name in names:
                fleet.wait_for(rf"\] {name}: process ")
            assert " in cluster: " not in fleet.output
            (model / HELD).unlink()
            assert fleet.address  # An interrupt before the cluster is ready is no success.
            assert {fleet.host(name) for name in names} == {"a"}
            fleet.stop()


def lose_a_host_and_add_one(ray: Hosts, fleet: Up, streams: Streams, lost: str) -> None:
    replaced, begun = fleet.ready(), streams.begun()
    ray.lose(lost)
    for name in ("decode-1", "colocated-0"):
        fleet.wait_for(rf"{name}: waiting: no machine has 1 free GPU$")
    wait_for(lambda: went_on(fleet, streams, begun, "decode-1", "decode-0"), "the pair goes on with streams")
    ray.add(c=4)
    for name, node in (("decode-1", "decode-1"), ("colocated-0", "colocated-0-decode")):
        wait_for(lambda node=node: fleet.is_back(node, replaced[node]), f"{node} runs on the new host")
        assert fleet.host(name) == "c"
    streams.more()


def scale_up_and_down(fleet: Up, streams: Streams) -> None:
    done = fleet.scale("prefill=2", "decode=3")
    assert (done.returncode, done.stdout) == (0, "scaled prefill 1 → 2, decode 2 → 3\n"), done.stderr
    assert fleet.ready().keys() == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", *SIDES}
    streams.more()
    done = fleet.scale("prefill=1", "decode=1")
    assert done.returncode == 0, done.stderr
    assert fleet.ready().keys() == {"prefill-0", "decode-0", *SIDES}
    streams.more()


def lose_the_pair_and_kill_ray_under_the_colocated_node(ray: Hosts, fleet: Up, streams: Streams, held: Path) -> None:
    """Only the colocated node can go on with the pair's streams, since the pair's decode node does not come back. Then
    only the pair can go on with those: Ray dies on the colocated node's host, and with it all that its workers guarded.
    """
    held.touch()
    begun = streams.begun()
    fleet.kill("decode-0")
    wait_for(lambda: went_on(fleet, streams, begun, "decode-0", "colocated-0-decode"), "the colocated node goes on")
    streams.more()
    generation = fleet.ready()["colocated-0-decode"]
    orphans = ray.kill_raylet("c")
    held.unlink()
    wait_for(
        lambda: went_on(fleet, streams, streams.decoded_by.copy(), "colocated-0-decode", "decode-0"), "the pair goes on"
    )
    ray.add(e=3)
    wait_for(lambda: fleet.is_back("colocated-0-decode", generation), "the colocated node runs on another host")
    assert fleet.host("colocated-0") == "e"
    wait_for(lambda: not living(orphans), "nothing is left where Ray died")
    assert fleet.scale("decode=2").returncode == 0
    streams.more()


def lose_a_router(ray: Hosts, fleet: Up, streams: Streams) -> None:
    """Nodes and clients know a router's address, so it waits for its host to come back."""
    ray.lose("r")
    fleet.wait_for(r"router-1: waiting: its machine, 127\.0\.0\.12, is gone$")
    streams.more()
    ray.add(r=0)
    wait_for(lambda: fleet.host("router-1") == "r", "router-1 is back on its host")
    streams.more()


def say_what_cannot_be(fleet: Up) -> None:
    for words, message in (("other.decode=2", "pool = 'other': must be one of main"), ("router=2", "cannot change")):
        refused = fleet.scale(words)
        assert refused.returncode == 2, refused
        assert message in refused.stderr


def went_on(fleet: Up, streams: Streams, samples: Iterable[str], lost: str, found: str) -> list[str]:
    """Return which of these samples have ended at node `found`, after node `lost` had failed them."""
    log = (fleet.logs / "router-0.log").read_text()
    ended = [sample for sample in samples if streams.decoded_by[sample] == found]
    return [sample for sample in ended if f"an attempt of {sample} failed: {lost}@" in log]
