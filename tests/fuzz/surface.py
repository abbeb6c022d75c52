"""Every RPC there is, a valid request for each, and which answers are right. Tests only."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import grpc
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2

from corun.v1 import cluster_service_pb2, decode_service_pb2, prefill_service_pb2, registry_service_pb2, types_pb2

Code = grpc.StatusCode
TYPED = frozenset(Code) - {Code.INTERNAL, Code.UNKNOWN, Code.UNIMPLEMENTED, Code.ALREADY_EXISTS, Code.OUT_OF_RANGE}
"""What an answer may be: all of corun.errors but INTERNAL, which is a bug of ours."""
UNKNOWN_METHODS = (
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetServers",
    "/corun.v1.ClusterService/Stop",
    "/corun.v1.ClusterService",
    "/",
    "//",
    "/corun.v1.clusterservice/generate",
    "/corun.v1.ClusterService/Generate/",
    "/corun.v1.ClusterService/../RegistryService/Register",
    "/" + "a" * 4000,
)
_FILES = (cluster_service_pb2, registry_service_pb2, prefill_service_pb2, decode_service_pb2, health_pb2)
SERVICES: dict[str, Any] = {
    service.full_name: service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()
}
CLUSTER, REGISTRY = "corun.v1.ClusterService", "corun.v1.RegistryService"
HEALTH, PREFILL, DECODE = "grpc.health.v1.Health", "corun.v1.PrefillService", "corun.v1.DecodeService"
SERVED = {
    "open": (CLUSTER, CLUSTER, CLUSTER, HEALTH),
    "guarded": (CLUSTER, REGISTRY, HEALTH),
    "lone": (REGISTRY, REGISTRY, CLUSTER),
    "prefill": (PREFILL, PREFILL, HEALTH),
    "decode": (DECODE, DECODE, HEALTH),
    "colocated": (PREFILL, DECODE, HEALTH),
}
"""Services of each server of the target, as often as they are drawn."""


class Method:
    """One RPC."""

    def __init__(self, rng: Random, server: str) -> None:
        self.server, self.service = server, rng.choice(SERVED[server])
        self.descriptor: Any = rng.choice(SERVICES[self.service].methods)
        self.path = f"/{self.service}/{self.descriptor.name}"
        self.is_unary = not self.descriptor.server_streaming

    def check(self, answer: bytes) -> None:
        """Raises DecodeError unless the bytes are an answer of this method."""
        message_factory.GetMessageClass(self.descriptor.output_type).FromString(answer)

    def valid(self, rng: Random, nodes: Mapping[str, Mapping[str, str]]) -> Any:
        """A request that is right, or nearly: what a change of one field makes most of."""
        request: Any = message_factory.GetMessageClass(self.descriptor.input_type)()
        names = request.DESCRIPTOR.fields_by_name
        if self.service in (PREFILL, DECODE):
            request.generation = nodes[self.server]["generation"]
        for name, draw in _OWN.items():
            if name in names and self.service in (PREFILL, DECODE):
                setattr(request, name, draw(rng))
        if self.descriptor.name in _FILLERS:
            _FILLERS[self.descriptor.name](rng, request, nodes)
        if self.server == "colocated" and self.descriptor.name == "Prefill":
            _with_sample(rng, request, nodes)
        return request


_OWN: dict[str, Any] = {
    "request_id": lambda rng: f"p{rng.getrandbits(40)}",
    "router_id": lambda rng: f"router{rng.randrange(3)}",
    "lease_id": lambda rng: rng.randrange(1, 500),
}
"""What requests to nodes have in common, by the field."""


def _params(rng: Random, params: types_pb2.SamplingParams) -> None:
    params.max_tokens = rng.choice((1, 3, 8))
    params.n = rng.choice((1, 1, 1, 2))
    params.logprobs = rng.random() < 0.5
    if rng.random() < 0.3:
        params.stop.extend(("ab", "b"))
        params.stop_token_ids.append(7)
        params.logit_bias[3] = 1.5


def _generate(rng: Random, request: Any, _: Any) -> None:
    request.request_id = rng.choice(("", f"r-{rng.getrandbits(32)}"))
    if rng.random() < 0.5:
        request.text = rng.choice(("Once upon", "é\U0001f600", "x" * 100))
    else:
        request.token_ids.ids.extend(rng.randrange(256) for _ in range(rng.choice((1, 5, 40))))
    _params(rng, request.sampling_params)
    if rng.random() < 0.8:
        request.seed = rng.getrandbits(62)
    if rng.random() < 0.2:
        request.request_id = "resumed"
        request.resume.add(sample_index=0, seed=request.seed, num_tokens=rng.randrange(4), output_digest="0" * 64)


def _verify(rng: Random, request: Any, _: Any) -> None:
    for _ in range(rng.choice((1, 1, 2))):
        case = request.cases.add(prompt_token_ids=[1, 2, 3], seed=rng.getrandbits(62))
        _params(rng, case.sampling_params)
        case.sampling_params.n = 1
    request.conditions.append(rng.choice((1, 1, 4)))


def _score(rng: Random, request: Any, _: Any) -> None:
    request.prompt.text = rng.choice(("Once upon", "x" * 100))
    for _ in range(rng.choice((1, 1, 3))):
        if rng.random() < 0.5:
            request.continuations.add(text=rng.choice((" a time", "é")))
        else:
            request.continuations.add().token_ids.ids.extend(rng.randrange(256) for _ in range(rng.choice((1, 5, 40))))


def _score_tokens(rng: Random, request: Any, _: Any) -> None:
    request.token_ids.extend((1, 2, 3))
    request.num_scored = rng.choice((1, 2))


def _tokenize(rng: Random, request: Any, _: Any) -> None:
    request.text = rng.choice(("Once upon", "é\U0001f600", "x" * 1000))
    request.without_special_tokens = rng.random() < 0.5


def _detokenize(rng: Random, request: Any, _: Any) -> None:
    request.token_ids.ids.extend(rng.randrange(257) for _ in range(rng.choice((1, 5, 40))))


def _register(rng: Random, request: Any, nodes: Any) -> None:
    role, node = rng.choice(("prefill", "decode")), request.node
    node.ref.node_id, node.ref.generation = f"n{rng.randrange(50)}", f"{rng.getrandbits(4):016x}"
    node.role = 1 if role == "prefill" else 2
    node.address, node.model, node.contract_json = "127.0.0.1:1", "/nowhere", nodes[role]["contract"]
    node.slots, node.kv_blocks, node.block_size, node.max_model_len, node.vocab_size = 8, 1000, 16, 512, 256
    if role == "prefill":
        node.nixl.engine_id, node.nixl.host, node.nixl.port, node.nixl.tp_size = "e", "127.0.0.1", 1, 1
        node.nixl.stamp_addresses.append(4096)


def _heartbeat(rng: Random, request: Any, _: Any) -> None:
    request.ref.node_id, request.ref.generation = f"n{rng.randrange(50)}", f"{rng.getrandbits(4):016x}"
    request.load.leases, request.load.steps = rng.randrange(9), rng.getrandbits(40)


def _prefill(_: Random, request: Any, nodes: Any) -> None:
    request.prompt_token_ids.extend((1, 2, 3))
    request.reader.node_id, request.reader.generation = "d", nodes["decode"]["generation"]


def _with_sample(rng: Random, request: Any, nodes: Any) -> None:
    request.reader.node_id, request.reader.generation = "c-decode", nodes["colocated"]["generation"]
    _params(rng, request.sample.sampling_params)
    request.sample.seed, request.sample.router_id = rng.getrandbits(62), f"router{rng.randrange(3)}"


def _reserve(_: Random, request: Any, __: Any) -> None:
    request.num_prompt_tokens, request.max_tokens = 3, 4


def _start(rng: Random, request: Any, nodes: Any) -> None:
    request.prompt_token_ids.extend((1, 2, 3))
    _params(rng, request.sampling_params)
    request.handle.num_tokens = 3
    request.handle.reader.node_id, request.handle.reader.generation = "d", nodes["decode"]["generation"]


def _health(rng: Random, request: Any, _: Any) -> None:
    request.service = rng.choice(("", CLUSTER, DECODE, "no such service"))


_FILLERS: dict[str, Any] = {
    "Generate": _generate,
    "Score": _score,
    "Verify": _verify,
    "Tokenize": _tokenize,
    "Detokenize": _detokenize,
    "Register": _register,
    "Heartbeat": _heartbeat,
    "Prefill": _prefill,
    "ScoreTokens": _score_tokens,
    "Reserve": _reserve,
    "Start": _start,
    "Check": _health,
    "Watch": _health,
}
