"""Alerts, dashboard and autoscaling ask for metrics and labels that the processes show."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from corun.models import tiny
from tests.clusters import cluster
from tests.k8s.manifests import ROOT, objects, of_kind, one, workloads
from tests.scraping import families

MONITORING = ROOT / "k8s" / "components" / "monitoring"
BOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
OF_TARGETS = {"namespace", "pod", "service", "corun_dev_pool", "app_kubernetes_io_component"}
"""Labels that the Prometheus operator gives every series of a ServiceMonitor, with its podTargetLabels."""
RARE = {("reason", "overloaded")}
"""Label values that a quiet cluster does not show."""

Shown = dict[str, dict[str, set[str]]]
"""What processes show: for each metric its labels with their values. The label "" has the names of the processes."""


@pytest.fixture(scope="module")
def shown() -> Shown:
    return asyncio.run(_shown(str(tiny.ensure())))


async def _shown(model: str) -> Shown:
    found: Shown = defaultdict(lambda: defaultdict(set))
    async with cluster(model, prefills=0, decodes=0, metrics_port=0) as fake:
        nodes = [await fake.add_prefill("prefill", metrics_port=0), await fake.add_decode("decode", metrics_port=0)]
        await fake.ready("prefill", "decode")
        ports = {"router": fake.router.observation.metrics.port}
        ports |= {node.ref.node_id: node.observation.metrics.port for node in nodes}
        for process, port in ports.items():
            for metric in await asyncio.to_thread(families, port):
                for sample in metric.samples:
                    for name, value in {"": process, **sample.labels}.items():
                        found[sample.name][name].add(value)
    return found


def selectors(found: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yield the selectors of a PromQL expression: metric, matchers, and the labels of the groupings around it."""
    if isinstance(found, promql_parser.MatrixSelector):
        found = found.vector_selector
    if isinstance(found, promql_parser.VectorSelector):
        yield found.name, found.matchers.matchers, grouped
        return
    if isinstance(found, promql_parser.AggregateExpr) and found.modifier is not None:
        grouped |= frozenset(found.modifier.labels)
    parts = [getattr(found, name) for name in ("expr", "lhs", "rhs") if hasattr(found, name)]
    for part in (*parts, *getattr(found, "args", ())):
        yield from selectors(part, grouped)


def faults(shown: Shown, text: str) -> list[str]:
    """Return what an expression asks for that is not there. Raises ValueError if it is no PromQL, types included."""
    found = []
    for metric, matchers, grouped in selectors(promql_parser.parse(text)):
        if metric not in shown:
            found.append(f"{metric} is not shown")
            continue
        labels = shown[metric]
        named = grouped | {one.name for one in matchers}
        found += [f"{metric} has no label {name}" for name in sorted(named - labels.keys() - OF_TARGETS)]
        equal = {(one.name, one.value) for one in matchers if one.op == promql_parser.MatchOp.Equal}
        for name, value in equal - RARE:
            if name not in OF_TARGETS and value not in labels.get(name, set()):
                found.append(f"{metric} never has {name}={value}")
    return found


def test_alerts_ask_for_what_is_shown_and_say_what_to_do(shown: Shown) -> None:
    (rule,) = of_kind(objects("gpu"), "PrometheusRule")
    alerts = {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}
    wanted = {"CorunMismatch", "CorunNoCertifiedPair", "CorunSlowQueue", "CorunPaddingWaste", "CorunLeasesExpire"}
    assert wanted <= alerts.keys()
    assert {name: found for name, alert in alerts.items() if (found := faults(shown, alert["expr"]))} == {}
    for alert in alerts.values():
        assert alert["labels"].keys() == {"severity"}
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_asks_for_what_is_shown(shown: Shown) -> None:
    queries = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    for query in queries:  # As Grafana sends them.
        text = query.replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$pool", ".*")
        assert ("$" in text, faults(shown, text)) == (False, []), query


def test_the_dashboard_shows_what_freedoms_give_and_what_was_found_of_them() -> None:
    queries = " ".join(target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", []))
    wanted = ("node_freedom_held", "prefill_cached_tokens_total", "prefill_rechecked_prompts_total")
    wanted += ("decode_shared_prompt_tokens_total",)
    assert [name for name in wanted if f"corun_{name}{{" not in queries] == []


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
    assert fault in faults(shown, text)


@pytest.mark.parametrize("text", ["rate(corun_decode_rows_total)", "sum by corun_router_nodes", "corun_router_nodes >"])
def test_what_is_no_promql_is_seen(shown: Shown, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        faults(shown, text)


def test_autoscaling_reads_a_metric_of_prefill_nodes(shown: Shown) -> None:
    (metric,) = one(objects("gpu"), "HorizontalPodAutoscaler", "corun-prefill-main")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert shown[name][""] == {"prefill"}
    (rule,) = yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    assert rule["name"]["as"] == name
    query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.LabelMatchers>>", 'namespace="corun"')
    for text in (rule["seriesQuery"], query):
        assert [asked for asked, *_ in selectors(promql_parser.parse(text))] == [name]
        assert faults(shown, text) == []


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
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert set(monitor["spec"]["podTargetLabels"]) <= labels.keys()


def test_the_dashboard_can_be_imported() -> None:
    config = one(objects("gpu"), "ConfigMap", "corun-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["corun.json"]) == BOARD
    assert {"title", "uid", "panels", "time"} <= BOARD.keys()
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "namespace", "pool"}
    assert BOARD["schemaVersion"] >= 36
    panels = BOARD["panels"]
    assert {panel["type"] for panel in panels} <= {"row", "stat", "timeseries", "table"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert {target["refId"] for target in panel["targets"]} == set("ABCDEF"[: len(panel["targets"])]) != set()
