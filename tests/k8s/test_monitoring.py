"""Alerts, dashboard and autoscaling ask for metrics and labels that the processes show."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from corun.models import tiny
from tests.clusters import cluster
from tests.k8s.manifests import ROOT, Object, objects, of_kind, one, pod_labels, workloads
from tests.k8s.promql import asked
from tests.scraping import families

MONITORING = ROOT / "k8s" / "components" / "monitoring"
OF_TARGETS = {"namespace", "pod", "service", "corun_dev_pool", "app_kubernetes_io_component"}
"""Labels that the Prometheus operator gives every series of a ServiceMonitor, with its podTargetLabels."""
PANELS = {"row", "stat", "timeseries", "table"}
RARE = {("reason", "overloaded")}
"""Label values that a quiet cluster does not show."""


@dataclass
class Shown:
    """Everything that a router and nodes of both roles show: by metric, values by label."""

    metrics: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    roles: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def faults(self, text: str) -> list[str]:
        """What an expression asks for that is not there."""
        return [fault for query in asked(text) for fault in self._faults(query)]

    def _faults(self, query: Any) -> Iterator[str]:
        if query.metric not in self.metrics:
            yield f"{query.metric} is not shown"
            return
        labels = self.metrics[query.metric]
        yield from (f"{query.metric} has no label {name}" for name in sorted(query.labels - labels.keys() - OF_TARGETS))
        for name, value in query.equal:
            if value not in labels.get(name, set()) and (name, value) not in RARE and name not in OF_TARGETS:
                yield f"{query.metric} never has {name}={value}"


@pytest.fixture(scope="module")
def shown() -> Shown:
    return asyncio.run(_shown(str(tiny.ensure())))


async def _shown(model: str) -> Shown:
    async with cluster(model, prefills=0, decodes=0, metrics_port=0) as fake:
        nodes = [
            await fake.add_prefill("prefill", metrics_port=0),
            await fake.add_decode("decode", metrics_port=0),
        ]
        await fake.ready("prefill", "decode")
        ports = {"router": fake.router.observation.metrics.port} | {
            node.ref.node_id: node.observation.metrics.port for node in nodes
        }
        found = Shown()
        for role_name, port in ports.items():
            for metric in await asyncio.to_thread(families, port):
                for sample in metric.samples:
                    found.roles[role_name].add(sample.name)
                    found.metrics[sample.name]  # Also one without labels.
                    for name, value in sample.labels.items():
                        found.metrics[sample.name][name].add(value)
        return found


def alerts() -> dict[str, Object]:
    (rule,) = of_kind(objects("gpu"), "PrometheusRule")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}


def dashboard() -> Any:
    return json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))


def queries() -> dict[str, str]:
    """The dashboard's, as Grafana sends them."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$pool", ".*")
            assert "$" not in text, f"an unknown variable in {panel['title']}"
            found[f"{panel['title']} {target['refId']}"] = text
    return found


def test_alerts_ask_for_what_is_shown(shown: Shown) -> None:
    assert {name: found for name, alert in alerts().items() if (found := shown.faults(alert["expr"]))} == {}


def test_alerts_say_what_to_do() -> None:
    wanted = {"CorunMismatch", "CorunNoCertifiedPair", "CorunSlowQueue", "CorunPaddingWaste", "CorunLeasesExpire"}
    assert wanted <= alerts().keys()
    for alert in alerts().values():
        assert alert["labels"].keys() == {"severity"}
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_asks_for_what_is_shown(shown: Shown) -> None:
    assert len(queries()) > 20
    assert {name: found for name, text in queries().items() if (found := shown.faults(text))} == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("corun_router_mismatch_total", "corun_router_mismatch_total is not shown"),
        ("sum by (pool) (corun_router_nodes)", "corun_router_nodes has no label pool"),
        ('corun_router_nodes{state="gone"}', "corun_router_nodes never has state=gone"),
        ('corun_router_nodes{status="lost"}', "corun_router_nodes has no label status"),
        ("1 - rate(corun_decode_row_total[5m])", "corun_decode_row_total is not shown"),
    ],
)
def test_what_is_not_shown_is_seen(shown: Shown, text: str, fault: str) -> None:
    assert fault in shown.faults(text)


def test_what_is_no_promql_is_seen() -> None:
    for text in ("rate(corun_decode_rows_total)", "sum by corun_router_nodes", "corun_router_nodes >"):
        with pytest.raises(ValueError, match=r"."):
            asked(text)


def test_autoscaling_reads_a_metric_of_prefill_nodes(shown: Shown) -> None:
    spec = one(objects("gpu"), "HorizontalPodAutoscaler", "corun-prefill-main")["spec"]
    (metric,) = spec["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert [role for role, names in shown.roles.items() if name in names] == ["prefill"]
    (rule,) = yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert asked(rule["seriesQuery"])[0].metric == name
    query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.LabelMatchers>>", 'namespace="corun"')
    assert shown.faults(query) == []


def test_every_pod_is_scraped_with_its_pool_and_role() -> None:
    found = objects("pool-b")
    (monitor,) = of_kind(found, "ServiceMonitor")
    service = one(found, "Service", "corun-metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == ports
    named = {re.sub(r"[^a-zA-Z0-9_]", "_", label) for label in monitor["spec"]["podTargetLabels"]}
    assert named == OF_TARGETS - {"namespace", "pod", "service"}
    for workload in workloads(found):
        assert service["spec"]["selector"].items() <= pod_labels(workload).items()
        assert set(monitor["spec"]["podTargetLabels"]) <= pod_labels(workload).keys()


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert board["schemaVersion"] >= 36
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} <= PANELS
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "namespace", "pool"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert {target["refId"] for target in panel["targets"]} == set("ABCDEF"[: len(panel["targets"])])
    for first, second in combinations([panel["gridPos"] for panel in panels], 2):
        assert not _overlap(first, second), (first, second)


def _overlap(first: Any, second: Any) -> bool:
    return all(
        first[at] < second[at] + second[size] and second[at] < first[at] + first[size]
        for at, size in (("x", "w"), ("y", "h"))
    )


def test_the_dashboard_is_where_grafana_looks() -> None:
    config = one(objects("gpu"), "ConfigMap", "corun-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["corun.json"]) == dashboard()
    assert Path(MONITORING / "dashboard.json").stat().st_size < 200_000
