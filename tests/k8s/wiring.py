"""Whether manifests and processes agree: every pod's command line goes through the real parser, with the pod's files.

`faults` lists what does not fit, in words. Anything that a process reads (flags, ports, paths of probes,
files, variables) is looked up in the process's own code, never written down here a second time.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig
from corun.config.flags import parse
from corun.errors import CorunError
from corun.node.vllm import pin
from corun.observe.endpoints import LIVEZ, LOOP_TIMEOUT_S, READYZ, STARTEDZ
from router.app import STOP_GRACE_S
from tests.k8s.manifests import Object, of_kind, pod_labels, selects, workloads
from tests.k8s.netpol import Peer, allowed
from tests.k8s.pods import BrokenPodError, Pod

ENGINE_END_S = 30
"""For a node's engine to end after its drain: seen to take up to 10 s on busy cores."""
ROUTER_END_S = STOP_GRACE_S + 10
EXTERNAL_VARIABLES = ("UCX_NET_DEVICES", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Read by libraries. Others must be used in the args."""
POOL_LABEL = "corun.dev/pool"


@dataclass(frozen=True)
class Role:
    """What a role's process is, in its own code."""

    module: str
    config: type[Any]
    end_s: float


ROLES = {
    "router": Role("router", RouterConfig, ROUTER_END_S),
    "prefill": Role("prefill_node", PrefillConfig, ENGINE_END_S),
    "decode": Role("decode_node", DecodeConfig, ENGINE_END_S),
}


def faults(objects: list[Object], root: Path) -> list[str]:
    """What does not fit together. Every pod's files are written below `root`."""
    found: list[str] = []
    seen: dict[tuple[str, str], Any] = {}
    for index, workload in enumerate(workloads(objects)):
        name = workload["metadata"]["name"]
        pod = Pod(workload, objects, ip=f"10.0.0.{index + 1}", name=f"{name}-0")
        try:
            config = configuration(pod, root / name)
        except (BrokenPodError, CorunError, KeyError) as error:
            found.append(f"{name}: {error}")
            continue
        seen[pod.role, pod.labels.get(POOL_LABEL, "")] = config
        found += [f"{name}: {fault}" for check in CHECKS for fault in check(pod, config)]
    pools = {pool for _, pool in seen}
    found += [f"pool {pool} has no {role}" for pool in sorted(pools) for role in ROLES if (role, pool) not in seen]
    return found


def configuration(pod: Pod, root: Path) -> Any:
    """The config that the pod's process would make of its command line, with its files below `root`.

    Raises BrokenPodError with the process's own words where it would refuse to start.
    """
    role = ROLES[pod.role]
    command = pod.command()
    if command[:3] != ["python", "-m", role.module]:
        raise BrokenPodError(f"{command[:3]} does not start a {pod.role}")
    pod.materialise(root)
    _make_model(pod, root)
    for file in root.rglob("cluster.toml"):
        file.write_text(_below(root, pod, file.read_text(encoding="utf-8")), encoding="utf-8")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse(role.config, [_below(root, pod, word) for word in command[3:]], prog=role.module)
    except SystemExit:
        raise BrokenPodError(" ".join(said.getvalue().split())) from None


def _below(root: Path, pod: Pod, text: str) -> str:
    """A text whose mounted paths are those below `root`."""
    mounted = "|".join(re.escape(path) for path in pod.mounts())
    return re.sub(rf'(?<=[="])(?:{mounted})(?=/)', lambda match: f"{root}{match[0]}", text)


def _make_model(pod: Pod, root: Path) -> None:
    """Models are where an init container makes one, or on a volume that is not the pod's own."""
    for container in pod.spec.get("initContainers", []):
        words = pod.command(container)
        if words[:2] != ["corun", "model"]:
            raise BrokenPodError(f"{words} is no init container that is known here")
        if not any(words[2].startswith(f"{path}/") for path in pod.mounts(container)):
            raise BrokenPodError(f"{words[2]} is on no volume of its init container")
        _touch(root, words[2])
    for path, volume in pod.mounts().items():
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if not any(one["metadata"]["name"] == claim for one in of_kind(pod.objects, "PersistentVolumeClaim")):
                raise BrokenPodError(f"there is no PersistentVolumeClaim {claim}")
            for model in ("Qwen3-8B", "Qwen3-14B"):
                _touch(root, f"{path}/{model}")


def _touch(root: Path, model: str) -> None:
    directory = root / model.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}", encoding="utf-8")


def _ports(pod: Pod, config: Any) -> Iterator[str]:
    declared = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    read = {"grpc": config.port, "metrics": config.metrics_port}
    if isinstance(config, NodeConfig):
        read["nixl"] = config.nixl_port
    if declared != read:
        yield f"declares ports {declared}, but listens on {read}"


def _addresses(pod: Pod, config: Any) -> Iterator[str]:
    everywhere = (pod.ip, "0.0.0.0")
    for name in ("host", "metrics_host"):
        if getattr(config, name) not in everywhere:
            yield f"{name} {getattr(config, name)} is not reached from other pods"
    if isinstance(config, NodeConfig):
        reached = config.advertise or f"{config.host}:{config.port}"
        if reached != f"{pod.ip}:{config.port}":
            yield f"routers are told to reach it at {reached}"
        if config.nixl_host != pod.ip:
            yield f"nixl_host {config.nixl_host} is not the pod's address"
        if config.node_id != pod.name:
            yield f"node_id {config.node_id!r} is not the pod's name"


def _probes(pod: Pod, config: Any) -> Iterator[str]:
    paths = {"startupProbe": STARTEDZ, "readinessProbe": READYZ, "livenessProbe": LIVEZ}
    for name, path in paths.items():
        probe = pod.container.get(name, {})
        asked = probe.get("httpGet", {})
        if asked != {"port": config.metrics_port, "path": path}:
            yield f"{name} asks {asked}, but {path} is answered on {config.metrics_port}"
        if probe.get("timeoutSeconds", 1) <= LOOP_TIMEOUT_S:
            yield f"{name} gives up before a process can say that its event loop stands still"
    if isinstance(config, NodeConfig) and "preStop" in pod.container.get("lifecycle", {}):
        yield "a node tells its routers at SIGTERM: a preStop only delays that"


def _grace(pod: Pod, config: Any) -> Iterator[str]:
    before = 0
    if hook := pod.container.get("lifecycle", {}).get("preStop"):
        words = hook["exec"]["command"]
        if words[0] != "sleep" or len(words) != 2:
            yield f"preStop {words} is not known here"
            return
        before = int(words[1])
    elif pod.role == "router":
        yield "a router without preStop refuses connections that are still sent to it"
    needed = before + config.drain_grace_s + ROLES[pod.role].end_s
    if pod.grace_s < needed:
        yield f"is killed after {pod.grace_s} s, but may take {needed:g} s to end"


def _routers(pod: Pod, config: Any) -> Iterator[str]:
    """Nodes find every router of their pool, and only those, by a headless Service."""
    for address in getattr(config, "router", ()):
        name, _, port = address.rpartition(":")
        services = [one for one in of_kind(pod.objects, "Service") if one["metadata"]["name"] == name]
        if not services:
            yield f"there is no Service {name}"
            continue
        spec = services[0]["spec"]
        if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
            yield f"Service {name} does not give the addresses of all routers, ready or not"
        if int(port) not in {one["port"] for one in spec["ports"]}:
            yield f"Service {name} has no port {port}"
        for found in workloads(pod.objects):
            labels = pod_labels(found)
            is_router = labels["app.kubernetes.io/component"] == "router"
            is_wanted = is_router and labels[POOL_LABEL] == pod.labels[POOL_LABEL]
            if selects({"matchLabels": spec["selector"]}, labels) != is_wanted:
                yield f"Service {name} is wrong about {found['metadata']['name']}"


def _services(pod: Pod, config: Any) -> Iterator[str]:
    """Services that select the pod send what they get to a port that it has."""
    declared = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    found = [one for one in of_kind(pod.objects, "Service") if one["spec"]["selector"].items() <= pod.labels.items()]
    for service in found:
        for port in service["spec"]["ports"]:
            target = port["targetPort"]
            if declared.get(target) != port["port"]:
                yield f"Service {service['metadata']['name']} sends {port['port']} to {target}, {declared.get(target)}"
    if isinstance(config, RouterConfig) and len(found) < 1:
        yield "no Service leads to it"


def _environment(pod: Pod, config: Any) -> Iterator[str]:
    args = " ".join(pod.container["args"])
    for variable in pod.container.get("env", []):
        name = variable["name"]
        if f"$({name})" not in args and name not in EXTERNAL_VARIABLES:
            yield f"nobody reads {name}"
    try:
        if moving := pin.environment(pod.environment()):
            yield f"variables enter the contract: {moving}"
    except CorunError as error:
        yield str(error)


def _protection(pod: Pod, config: Any) -> Iterator[str]:
    """All of it, and each role only what it needs."""
    if config.tls is None or not config.cluster_token():
        yield "has no TLS, or no cluster token"
    files = {path.rpartition("/")[2] for path in pod.files()}
    if isinstance(config, RouterConfig):
        if not config.client_tokens() or not config.seed_key_bytes:
            yield "has no client tokens, or no seed key"
    elif files & {"clients.tokens", "seed.key"}:
        yield "has secrets that only routers need"
    if "ca.key" in files:
        yield "has the authority's key"


def _writes(pod: Pod, config: Any) -> Iterator[str]:
    """A read-only root needs volumes for what processes write (docs: k8s/README.md)."""
    needed = {"/tmp"} if isinstance(config, RouterConfig) else {"/tmp", "/dev/shm", pod.environment()["HOME"]}
    read_only = {mount["mountPath"] for mount in pod.container["volumeMounts"] if mount.get("readOnly")}
    for path in sorted(needed - (pod.mounts().keys() - read_only)):
        yield f"cannot write to {path}"
    shm = pod.mounts().get("/dev/shm", {}).get("emptyDir", {})
    if isinstance(config, NodeConfig) and (shm.get("medium") != "Memory" or "sizeLimit" not in shm):
        yield "/dev/shm is not a sized piece of memory"


def _network(pod: Pod, config: Any) -> Iterator[str]:
    """What the configuration needs to reach is allowed."""
    here = peer(pod)
    others = [Pod(one, pod.objects, ip="10.0.1.1", name="other") for one in workloads(pod.objects)]
    for other in others:
        if other.labels[POOL_LABEL] != pod.labels[POOL_LABEL]:
            continue
        if other.role == "router" and isinstance(config, NodeConfig):
            if not allowed(pod.objects, peer(other), here, config.port):
                yield f"routers do not reach port {config.port}"
            for address in config.router:
                if not allowed(pod.objects, here, peer(other), int(address.rpartition(":")[2])):
                    yield f"does not reach routers at {address}"
        if isinstance(config, NodeConfig) and other.role in {"prefill", "decode"} - {pod.role}:
            for port in (config.nixl_port, 32768, 60999):
                if not allowed(pod.objects, peer(other), here, port):
                    yield f"{other.role} nodes do not reach port {port}"


def peer(pod: Pod) -> Peer:
    """A pod as NetworkPolicies see it."""
    namespace = pod.workload["metadata"]["namespace"]
    found = next(one for one in of_kind(pod.objects, "Namespace") if one["metadata"]["name"] == namespace)
    labels = {**found["metadata"]["labels"], "kubernetes.io/metadata.name": namespace}
    return Peer(labels=pod.labels, namespace=namespace, namespace_labels=labels)


CHECKS: tuple[Callable[[Pod, Any], Iterator[str]], ...] = (
    _ports,
    _addresses,
    _probes,
    _grace,
    _routers,
    _services,
    _environment,
    _protection,
    _writes,
    _network,
)
