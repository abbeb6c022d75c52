"""A fleet over several Ray hosts, with fake engines. Hosts are lost and added, and the number of nodes changes. Every
stream that runs meanwhile is bit for bit what it is undisturbed."""

from __future__ import annotations

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
[pools.main.decode]
slots = 8
replicas = 2
"""


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
        ray.add(r=0, a=2, b=1)
        with up(ray, TOML) as fleet:
            address, cases = fleet.address, known_cases(longest=150)
            assert (fleet.host("router-0"), fleet.host("router-1")) == ("head", "r")
            assert fleet.host("prefill-0") == fleet.host("decode-0") == "a"  # They are a pair.
            assert fleet.host("decode-1") == "b"
            with streaming(address, cases) as streams:
                streams.more()
                lose_a_host_and_add_one(ray, fleet, streams)
                scale_up_and_down(fleet, streams)
                kill_ray_alone(ray, fleet, streams)
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
        with up(ray, TOML.replace("drain_grace_s", "nodes_per_gpu = 3\ndrain_grace_s")) as fleet:
            names = ("prefill-0", "decode-0", "decode-1")
            for name in names:
                fleet.wait_for(rf"\] {name}: process ")
            assert " in cluster: " not in fleet.output
            (model / HELD).unlink()
            assert fleet.address  # An interrupt before the cluster is ready is no success.
            assert {fleet.host(name) for name in names} == {"a"}
            fleet.stop()


def lose_a_host_and_add_one(ray: Hosts, fleet: Up, streams: Streams) -> None:
    replaced, reruns = fleet.ready()["decode-1"], count_reruns(fleet)
    ray.lose("b")
    fleet.wait_for(r"decode-1: waiting: no machine has 1 free GPU$")
    streams.more()
    assert count_reruns(fleet) > reruns  # Some streams were there.
    ray.add(c=3)
    wait_for(lambda: fleet.is_back("decode-1", replaced), "decode-1 runs on the new host")
    assert fleet.host("decode-1") == "c"
    streams.more()


def scale_up_and_down(fleet: Up, streams: Streams) -> None:
    done = fleet.scale("prefill=2", "decode=3")
    assert (done.returncode, done.stdout) == (0, "scaled prefill 1 → 2, decode 2 → 3\n"), done.stderr
    assert fleet.ready().keys() == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    streams.more()
    done = fleet.scale("prefill=1", "decode=1")
    assert done.returncode == 0, done.stderr
    assert fleet.ready().keys() == {"prefill-0", "decode-0"}
    streams.more()
    assert fleet.scale("decode=2").returncode == 0
    streams.more()


def kill_ray_alone(ray: Hosts, fleet: Up, streams: Streams) -> None:
    """Kill Ray on a host: the processes that its workers guarded end, and are started elsewhere."""
    host, generation = fleet.host("decode-1"), fleet.ready()["decode-1"]
    orphans = ray.kill_raylet(host)
    ray.add(e=2)
    wait_for(lambda: fleet.is_back("decode-1", generation), "decode-1 runs on another host")
    wait_for(lambda: not living(orphans), "nothing is left where Ray died")
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


def count_reruns(fleet: Up) -> int:
    return (fleet.logs / "router-0.log").read_text().count("an attempt of sample")
