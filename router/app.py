"""A whole router: its parts, put together, and its lifecycle from listening to the last release.

Lifecycle: made → `start` → `drain` → `stop`. This module must not know command lines or signals.
"""

from __future__ import annotations

import logging
import secrets

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from corun.config.fields import RouterConfig, is_loopback
from corun.observe.endpoints import Observation
from corun.params import MAX_NAME_LENGTH
from corun.rpc.activity import Activity
from corun.rpc.auth import Gate
from corun.rpc.certificates import Renewed
from corun.rpc.channel import Access
from corun.rpc.server import GrpcServer
from corun.v1 import cluster_service_pb2_grpc, registry_service_pb2_grpc
from router.audit.auditor import Auditor
from router.audit.idle import IdleRuns
from router.audit.verifier import Verifier
from router.delivery import OutputStreams
from router.metrics import RouterMetrics
from router.nodes.registry import Registry
from router.queue import SampleQueue
from router.reflection import BoundedReflection
from router.request import RequestRunner
from router.sample import RunContext
from router.score import ScoreRunner
from router.service import AWAY_S, CLUSTER_SERVICE, LONGEST_CALL_S, REGISTRY_SERVICE, ClusterService, RegistryService
from router.targets import Targets

BYTES_OF_CASES = 4 * 1024 * 1024
"""The bytes that one Verify request may have beyond one case with a prompt of the model's length, and a Score request
beyond its prompt: the tokens that it may score need less."""
_BESIDE = {"Generate": 0, "Score": BYTES_OF_CASES, "Tokenize": 0, "Detokenize": 0, "Verify": BYTES_OF_CASES}
BYTES_BESIDE = {f"/{CLUSTER_SERVICE}/{name}": size for name, size in _BESIDE.items()}
"""The bytes that a request may have beyond one prompt of the model's length, by the method's full name."""
OF_CLIENTS = (CLUSTER_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
"""The services that reflection lists: those that a client may call."""
STOP_GRACE_S = 5.0
"""The seconds that cancelled calls have to end."""

log = logging.getLogger(__name__)


class Router:
    """One router. Make it inside a running loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.router_id = config.router_id or f"router-{secrets.token_hex(4)}"
        self.observation = Observation(config, CLUSTER_SERVICE)
        access = Access.of_member(config)
        self.registry = Registry(config, _process_id(self.router_id), access)
        self.queue = SampleQueue(self.registry, config)
        self.targets = Targets(self.registry, self.queue, config)
        self.idle = IdleRuns(self.registry, self.queue, config)
        self.auditor = Auditor(self.registry, self.idle, config)
        self.registry.watch(self.idle.give_way)
        self.metrics = RouterMetrics(
            self.router_id, self.registry, self.queue, self.targets.flexing, self.auditor.status
        )
        self.observation.metrics.show(self.metrics)
        # If the file of client tokens cannot be used or has none, the previous ones stay.
        client_tokens = Renewed((config.client_tokens_file,), config.client_tokens).current
        self.server = GrpcServer(
            config.host,
            config.port,
            tls=access.tls,
            mutual=config.tls_clients,
            gate=Gate(cluster=access.token, clients=client_tokens),
            max_message_bytes=config.max_message_bytes,
            request_limit=self.request_limit,
            client_timeout_s=config.client_timeout_s,
            longest_call_s=LONGEST_CALL_S,
            health=self.observation.health,
        )
        self.context = RunContext(
            registry=self.registry,
            queue=self.queue,
            config=config,
            metrics=self.metrics,
            on_finished=self.auditor.note,
        )
        self.requests = RequestRunner(self.context)
        self.verifier = Verifier(
            self.requests, self.registry, self.idle, self.auditor, max_cases=config.max_queued_samples
        )
        self.registry.on_change = self._changed
        self.streams = OutputStreams()
        self._activity = Activity("the router", AWAY_S)
        self._is_ready = False
        self._add_services()

    async def start(self) -> None:
        """Listen for clients and nodes. Raises UnavailableError if the router cannot bind the address."""
        await self.observation.start()
        try:
            await self.server.start()
        except BaseException:
            await self.observation.stop()
            raise
        for service in ("", REGISTRY_SERVICE):
            self.server.set_serving(service, True)
        self.server.set_serving(CLUSTER_SERVICE, False)
        self.observation.note_started()
        log.info("router %s listens on %s", self.router_id, self.server.address)
        config = self._config
        if not (is_loopback(config.host) or (config.tls_cert and config.client_tokens_file)):
            log.warning("%s is a public address without TLS and tokens: anyone may use this router", config.host)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, at most `drain_grace_s` seconds."""
        self._activity.draining = True
        self.auditor.stop()
        self._is_ready = False
        for service in ("", CLUSTER_SERVICE):
            self.server.set_serving(service, False)
        if await self._activity.drain(self._config.drain_grace_s):
            await self.streams.end()  # gRPC complains of calls that are open when their server stops.
        else:
            log.warning("requests still run after %g s and are cancelled", self._config.drain_grace_s)

    async def stop(self) -> None:
        """Cancel the calls that still run, give back what they held on the nodes, and close."""
        self._activity.draining = True
        await self.server.stop(0.0)
        await self._activity.drain(STOP_GRACE_S)  # Cancelled calls still have to give back what they hold.
        self.requests.close()
        await self.auditor.close()
        await self.idle.close()
        await self.registry.close()
        await self.observation.stop()

    def request_limit(self, method: str) -> int:
        """Return the most bytes that a request may have, by the method's full name. The limit follows the model,
        because parsing a request that is too long for the model costs as much as parsing a valid one."""
        most, model = self._config.max_message_bytes, self.registry.model
        beside = BYTES_BESIDE.get(method)
        return most if beside is None or model is None else min(most, model.max_request_bytes + beside)

    def _changed(self) -> None:
        """Let everybody use what has changed in the registry: clients' samples first, then audits, which use the room
        that these leave, then the crowds of verifications."""
        self.targets.review_soon()
        self.queue.pump_soon()
        self.idle.review()
        self.auditor.pump()
        self.verifier.pump()
        self._tell_health()

    def _tell_health(self) -> None:
        """Update the health of the client service, which serves while a certified pair of nodes is warm. The health of
        the process and of the node service does not depend on it."""
        ready = not self.registry.missing() and not self._activity.draining
        if ready != self._is_ready:
            self._is_ready = ready
            self.server.set_serving(CLUSTER_SERVICE, ready)

    def _add_services(self) -> None:
        cluster = ClusterService(
            router_id=self.router_id,
            activity=self._activity,
            registry=self.registry,
            queue=self.queue,
            metrics=self.metrics,
            requests=self.requests,
            scores=ScoreRunner(self.context, self.requests),
            streams=self.streams,
            verifier=self.verifier,
            auditor=self.auditor,
            max_queued_samples=self._config.max_queued_samples,
        )
        nodes = RegistryService(
            router_id=self.router_id,
            activity=self._activity,
            registry=self.registry,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
        )
        self.server.add(cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, cluster)
        self.server.add(registry_service_pb2_grpc.add_RegistryServiceServicer_to_server, nodes)
        if self._config.reflection:
            self.server.add(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, BoundedReflection(OF_CLIENTS))


def _process_id(router_id: str) -> str:
    """Return the id by which decode nodes know this process. A later session with the same id ends the leases of
    earlier ones. So each process needs its own id, even if a router was started again or two routers were given one
    name."""
    suffix = f"-{secrets.token_hex(4)}"
    return router_id[: MAX_NAME_LENGTH - len(suffix)] + suffix
