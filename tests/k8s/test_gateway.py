"""Gateways: what the manifest says is what `corun gateway` reads, answers and needs to end."""

from __future__ import annotations

import asyncio
from typing import Any

from corun.config.flags import parse
from corun.gateway.app import STOP_GRACE_S, Gateway
from corun.gateway.config import GatewayConfig
from tests.k8s.manifests import Pod, complete, of_kind, one, selects


def pod() -> Pod:
    found = complete("gpu")
    return Pod(one(found, "Deployment", "corun-gateway"), found, ip="10.0.0.9", name="corun-gateway-0")


def configuration(root: Any) -> GatewayConfig:
    gateway = pod()
    command = gateway.command()
    assert command[:2] == ["corun", "gateway"]
    gateway.materialise(root)
    return parse(GatewayConfig, [gateway.below(root, word) for word in command[2:]], prog="gateway")


def test_its_command_is_a_gateway_that_has_tls_on_both_sides_and_no_secret_of_routers(tmp_path: Any) -> None:
    config = configuration(tmp_path)
    config.check_files()
    assert (config.host, config.port, config.tls_name, config.token_file) == ("10.0.0.9", 8000, "corun", "")
    assert config.https is not None
    assert config.arguments("")["tls"] is not None
    files = {path.name for path in (tmp_path / "etc/corun").rglob("*") if path.is_file()}
    assert files == {"tls.crt", "tls.key", "ca.crt"}


def test_it_calls_the_routers_that_clients_call(tmp_path: Any) -> None:
    gateway = pod()
    address = configuration(tmp_path).router
    name, _, port = address.partition(":")
    spec = one(gateway.objects, "Service", name)["spec"]
    assert [str(each["port"]) for each in spec["ports"]] == [port]
    router = Pod(one(gateway.objects, "Deployment", "corun-router-main"), gateway.objects, ip="", name="")
    assert selects({"matchLabels": spec["selector"]}, router.labels)


def test_probes_ask_paths_that_are_answered_by_https_on_its_port(tmp_path: Any) -> None:
    async def routes() -> set[str]:
        gateway = Gateway(configuration(tmp_path))
        found = {route.resource.canonical for route in gateway._runner.app.router.routes() if route.resource}
        await gateway.stop()
        return found

    known = asyncio.run(routes())
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod().container[name]
        assert (probe["httpGet"]["port"], probe["httpGet"]["scheme"]) == (8000, "HTTPS")
        assert probe["httpGet"]["path"] in known
        assert probe["timeoutSeconds"] > 5, "it asks routers for up to 5 s"
    assert pod().container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert "livenessProbe" in pod().container
    assert pod().container["livenessProbe"]["httpGet"]["path"] != "/health", (
        "a cluster without nodes restarts no gateway"
    )


def test_it_may_end_what_runs(tmp_path: Any) -> None:
    spec = pod().spec
    (sleep, seconds) = pod().container["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(seconds) + configuration(tmp_path).drain_grace_s + STOP_GRACE_S + 10
    assert (sleep, spec["terminationGracePeriodSeconds"] >= needed) == ("sleep", True)


def test_it_scales_and_keeps_one() -> None:
    found = complete("gpu")
    deployment = one(found, "Deployment", "corun-gateway")
    assert "replicas" not in deployment["spec"]
    scaler = one(found, "HorizontalPodAutoscaler", "corun-gateway")["spec"]
    assert (scaler["scaleTargetRef"]["name"], scaler["minReplicas"]) == ("corun-gateway", 2)
    budget = one(found, "PodDisruptionBudget", "corun-gateway")["spec"]
    assert (budget["minAvailable"], budget["selector"]) == (1, deployment["spec"]["selector"])
    service = one(found, "Service", "corun-gateway")["spec"]
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(8000, "https")]
    assert len(of_kind(found, "Ingress", "HTTPRoute")) == 0
