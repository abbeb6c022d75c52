"""Whether manifests and processes agree: every pod's command line goes through the real parser, with the pod's files.

`faults` lists what does not fit, in words. Anything that a process reads (flags, ports, paths of probes, files,
variables) is looked up in the process's own code, never written down here a second time.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corun.config.cluster_file import CONFIGS, SIDES
from corun.config.fields import NodeConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import CorunError
from corun.launch.members import MODULES
from corun.node.vllm import pin
from corun.observe.endpoints import LIVEZ, LOOP_TIMEOUT_S, READYZ, STARTEDZ
from router.app import STOP_GRACE_S
from tests.k8s.manifests import (
    COMPONENT_LABEL,
    POOL_LABEL,
    BrokenPodError,
    Object,
    Pod,
    of_kind,
    selects,
    workloads,
)

ENGINE_END_S = 30
"""For a node's engine to end after its drain: seen to take up to 10 s on busy cores."""
ROUTER_END_S = STOP_GRACE_S + 10
EXTERNAL_VARIABLES = ("UCX_NET_DEVICES", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that libraries read. Others must be used in the args."""


def faults(objects: list[Object], root: Path) -> list[str]:
    """Return what does not fit together. Every pod's files are written below `root`."""
    found: list[str] = []
    seen = set()
    for index, workload in enumerate(workloads(objects)):
        name = workload["metadata"]["name"]
        pod = Pod(workload, objects, ip=f"10.0.0.{index + 1}", name=f"{name}-0")
        try:
            config = configuration(pod, root / name)
        except (BrokenPodError, CorunError, KeyError) as error:
            found.append(f"{name}: {error}")
            continue
        seen |= {(side, pod.labels[POOL_LABEL]) for side in SIDES[pod.role]}
        checks = (_listening(pod, config), _ending(pod, config), _names(pod, config), _needs(pod, config, root / name))
        found += [f"{name}: {fault}" for check in checks for fault in check]
    pools, needed = {pool for _, pool in seen}, {side for sides in SIDES.values() for side in sides}
    return found + [f"pool {pool} has no {role}" for pool in pools for role in needed if (role, pool) not in seen]


def configuration(pod: Pod, root: Path) -> Any:
    """Return the config that the pod's process would make of its command line, with its files below `root`.

    Raises BrokenPodError with the process's own words where it would refuse to start.
    """
    module, config = MODULES[pod.role], CONFIGS[pod.role]
    command = pod.command()
    if command[:3] != ["python", "-m", module]:
        raise BrokenPodError(f"{command[:3]} does not start a {pod.role}")
    pod.materialise(root)
    _make_models(pod, root)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse(config, [pod.below(root, word) for word in command[3:]], prog=module)
    except SystemExit:
        raise BrokenPodError(" ".join(said.getvalue().split())) from None


def _make_models(pod: Pod, root: Path) -> None:
    """Put models where an init container makes one, or on a volume that is not the pod's own."""
    models = []
    for container in pod.spec.get("initContainers", []):
        if container["name"] == "memlock":
            continue
        words = pod.command(container)
        places = {"corun model": words[2], "hf download": words[-1].removeprefix("--local-dir=")}
        made = places.get(" ".join(words[:2]), "")
        if not any(made.startswith(f"{at}/") for at in pod.mounts(container)):
            raise BrokenPodError(f"{words} does not make a model on a volume")
        models.append(made)
    for path, volume in pod.mounts().items():
        if claim := volume.get("persistentVolumeClaim"):
            claims = [one["metadata"]["name"] for one in of_kind(pod.objects, "PersistentVolumeClaim")]
            if claim["claimName"] not in claims:
                raise BrokenPodError(f"there is no PersistentVolumeClaim {claim['claimName']}")
            models += [f"{path}/Qwen3-8B", f"{path}/Qwen3-14B"]
        if "image" in volume:
            models.append(f"{path}/Qwen3-8B")
    for model in models:
        directory = root / model.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}", encoding="utf-8")


def _listening(pod: Pod, config: Any) -> Iterator[str]:
    """Compare ports, addresses and probes with those that the process listens on."""
    declared = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    read = {"grpc": config.port, "metrics": config.metrics_port}
    for name in ("host", "metrics_host"):
        if getattr(config, name) not in (pod.ip, "0.0.0.0"):
            yield f"{name} {getattr(config, name)} is not reached from other pods"
    if isinstance(config, NodeConfig):
        read["nixl"] = config.nixl_port
        reached = config.advertise or f"{config.host}:{config.port}"
        if reached != f"{pod.ip}:{config.port}":
            yield f"routers are told to reach it at {reached}"
        if config.nixl_host != pod.ip:
            yield f"nixl_host {config.nixl_host} is not the pod's address"
        if config.node_id != pod.name:
            yield f"node_id {config.node_id!r} is not the pod's name"
    if declared != read:
        yield f"declares ports {declared}, but listens on {read}"
    for name, path in (("startupProbe", STARTEDZ), ("readinessProbe", READYZ), ("livenessProbe", LIVEZ)):
        probe = pod.container.get(name, {})
        asked = probe.get("httpGet", {})
        if asked != {"port": config.metrics_port, "path": path}:
            yield f"{name} asks {asked}, but {path} is answered on {config.metrics_port}"
        if probe.get("timeoutSeconds", 1) <= LOOP_TIMEOUT_S:
            yield f"{name} gives up before a process can say that its event loop stands still"


def _ending(pod: Pod, config: Any) -> Iterator[str]:
    """Check that the grace period is enough for preStop, drain and end."""
    hook = pod.container.get("lifecycle", {}).get("preStop")
    is_node = isinstance(config, NodeConfig)
    if hook and is_node:
        yield "a node tells its routers at SIGTERM: a preStop only delays that"
    elif not hook and not is_node:
        yield "a router without preStop refuses connections that are still sent to it"
    sleep, before = hook["exec"]["command"] if hook else ("sleep", 0)
    needed = int(before) + config.drain_grace_s + (ENGINE_END_S if is_node else ROUTER_END_S)
    grace = pod.spec["terminationGracePeriodSeconds"]
    if sleep != "sleep" or grace < needed:
        yield f"is killed after {grace} s, but may take {needed:g} s to end"


def _names(pod: Pod, config: Any) -> Iterator[str]:
    """Check the Services: nodes find all routers of their pool and no others; each port that is named is there."""
    services = of_kind(pod.objects, "Service")
    for address in getattr(config, "router", ()):
        name, _, port = address.rpartition(":")
        spec = next((one["spec"] for one in services if one["metadata"]["name"] == name), None)
        if spec is None:
            yield f"there is no Service {name}"
            continue
        if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
            yield f"Service {name} does not give the addresses of all routers, ready or not"
        if int(port) not in {one["port"] for one in spec["ports"]}:
            yield f"Service {name} has no port {port}"
        wanted = {COMPONENT_LABEL: "router", POOL_LABEL: pod.labels[POOL_LABEL]}
        for other in (Pod(found, pod.objects, ip="", name="") for found in workloads(pod.objects)):
            if selects({"matchLabels": spec["selector"]}, other.labels) != (wanted.items() <= other.labels.items()):
                yield f"Service {name} is wrong about {other.workload['metadata']['name']}"
    declared = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    leading = [one for one in services if one["spec"]["selector"].items() <= pod.labels.items()]
    for service in leading:
        for port in service["spec"]["ports"]:
            if declared.get(port["targetPort"]) != port["port"]:
                yield f"Service {service['metadata']['name']} sends {port['port']} to {port['targetPort']}"
    if isinstance(config, RouterConfig) and not leading:
        yield "no Service leads to it"


def _needs(pod: Pod, config: Any, root: Path) -> Iterator[str]:
    """Check variables, secrets and volumes: all that the role needs, and no more."""
    args = " ".join(pod.container["args"])
    for name in (variable["name"] for variable in pod.container.get("env", [])):
        if f"$({name})" not in args and name not in EXTERNAL_VARIABLES:
            yield f"nobody reads {name}"
    environment = pod.environment()
    try:
        if moving := pin.environment(environment):
            yield f"variables enter the contract: {moving}"
    except CorunError as error:
        yield str(error)
    if config.tls is None or not config.cluster_token():
        yield "has no TLS, or no cluster token"
    files = set(pod.materialise(root))
    if isinstance(config, RouterConfig):
        if not config.client_tokens() or not config.seed_key_bytes:
            yield "has no client tokens, or no seed key"
    elif files & {"clients.tokens", "seed.key"}:
        yield "has secrets that only routers need"
    if "ca.key" in files:
        yield "has the authority's key"
    # The root is read-only, so what processes write needs a volume.
    needed = {"/tmp"} if isinstance(config, RouterConfig) else {"/tmp", "/dev/shm", environment["HOME"]}
    read_only = {mount["mountPath"] for mount in pod.container["volumeMounts"] if mount.get("readOnly")}
    for path in sorted(needed - (pod.mounts().keys() - read_only)):
        yield f"cannot write to {path}"
    shm = pod.mounts().get("/dev/shm", {}).get("emptyDir", {})
    if isinstance(config, NodeConfig) and (shm.get("medium") != "Memory" or "sizeLimit" not in shm):
        yield "/dev/shm is not a sized piece of memory"
