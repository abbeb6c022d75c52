"""The dashboard and the alerts, asked of a real Prometheus that scrapes a running cluster of fakes.

Prometheus is Debian's package of that name. What Grafana would draw is checked as far as its queries go: each gives
data, or is known to be empty on a cluster where nothing went wrong.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from corun.models import tiny
from corun.params import SamplingParams
from tests.clusters import FakeCluster, cluster, generate
from tests.k8s.manifests import ROOT
from tests.k8s.test_monitoring import BOARD

ALERTS = ROOT / "k8s" / "components" / "monitoring" / "alerts.yaml"
PROMETHEUS = shutil.which("prometheus")
QUIET = {
    "Runs repeated a second": "no node failed",
    "KV shared by samples of a prompt": "engines of fakes share no KV: both numbers stay 0, and their ratio is none",
}
"""Panels that may have no data on a cluster of fakes without faults, and why."""
DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here: apt-get install prometheus"),
]


def queries() -> Iterator[tuple[str, str]]:
    """Yield (title, query) of every panel, as Grafana sends it for all namespaces and pools."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "15s").replace("$namespace", ".*").replace("$pool", ".*")
            yield panel["title"], text


@contextmanager
def prometheus(directory: Path, targets: dict[str, int]) -> Iterator[str]:
    """Run a Prometheus that scrapes each process as the operator's ServiceMonitor would, and evaluates the alerts.

    targets: ports by pod, such as router-0. Yield its address.
    """
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["spec"]
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    pods = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "namespace": "corun",
                "pod": pod,
                "corun_dev_pool": "main",
                "app_kubernetes_io_component": pod.partition("-")[0],
            },
        }
        for pod, port in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "corun", "static_configs": pods}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = [str(PROMETHEUS), f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*words, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
    try:
        yield _address(directory / "log", process)
    finally:
        process.kill()
        process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return where it listens, as it says once it does."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := re.search(r'"Listening on" address=(\S+)', log.read_text(encoding="utf-8"))):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[1]


def ask(address: str, path: str, **parameters: str) -> Any:
    words = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{words}", timeout=10) as answer:
        return json.load(answer)["data"]


def data(address: str, query: str) -> list[float]:
    """Return the values of a query now. What is no number is no data: it is how a ratio of nothing looks."""
    try:
        found = ask(address, "query", query=query)["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return []  # It is still starting.
    return [value for one in found if not math.isnan(value := float(one["value"][1]))]


async def load(fake: FakeCluster) -> None:
    """Send requests until cancelled: prompts that share a beginning, some with two samples, with tokens to wait for."""
    number = 0
    while True:
        number += 1
        prompt = [*range(1, 100), number % 250]
        await generate(fake, prompt, SamplingParams(max_tokens=8, ignore_eos=True, n=1 + number % 2), seed=number)


async def observed(directory: Path) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """Return the queries without data, by panel, and the alerts as Prometheus has them."""
    async with cluster(str(tiny.ensure()), prefills=0, decodes=0, metrics_port=0, audit_fraction=0.5) as fake:
        nodes = [await fake.add_prefill("prefill-0", metrics_port=0), await fake.add_decode("decode-0", metrics_port=0)]
        await fake.ready("prefill-0", "decode-0")
        targets = {"router-0": fake.router.observation.metrics.port}
        targets |= {node.ref.node_id: node.observation.metrics.port for node in nodes}
        with prometheus(directory, targets) as address:
            loading = asyncio.create_task(load(fake))
            missing, deadline = list(queries()), time.monotonic() + DEADLINE_S
            while missing and time.monotonic() < deadline and {title for title, _ in missing} - QUIET.keys():
                await asyncio.sleep(0.5)
                assert not loading.done(), loading.result()
                answers = [await asyncio.to_thread(data, address, query) for _, query in missing]
                missing = [one for one, values in zip(missing, answers, strict=True) if not values]
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            groups = (await asyncio.to_thread(ask, address, "rules"))["groups"]
    empty: dict[str, list[str]] = {}
    for title, query in missing:
        empty.setdefault(title, []).append(query)
    return empty, [rule for group in groups for rule in group["rules"]]


def test_every_panel_has_data_and_no_alert_fires_on_a_cluster_that_is_well(tmp_path: Path) -> None:
    empty, alerts = asyncio.run(observed(tmp_path))
    assert {title: found for title, found in empty.items() if title not in QUIET} == {}
    assert len(alerts) > 10
    assert {alert["name"]: alert["lastError"] for alert in alerts if alert["health"] != "ok"} == {}
    assert [alert["name"] for alert in alerts if alert["state"] == "firing"] == []


def test_the_dashboard_is_laid_out_in_full_rows() -> None:
    panels = BOARD["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert taken.isdisjoint(cells), f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel.get("description"), f"{panel['title']} is not explained"
            assert panel["fieldConfig"]["defaults"]["unit"]
    height = max(y for _, y in taken) + 1
    assert len(taken) == 24 * height, "there are holes"
