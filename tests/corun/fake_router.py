"""A router for client tests: the real public service over a real socket, with a hash of the prompt for a model.

Its outputs are a pure function of (prompt, seed, position), as a cluster's are. Failures are scripted by the test.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
from grpc_status import rpc_status

from corun.errors import CorunError, DeadlineError, to_status
from corun.params import SamplingParams, sample_seed
from corun.receipt import Receipt, alternatives_digest, output_digest, prompt_digest, text_digest, tokens_digest
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
from corun.testing.engines import expected_alternatives
from corun.testing.model import filled_contract
from corun.types import (
    Alternatives,
    ClusterStatus,
    FinishReason,
    NodeInfo,
    NodeLoad,
    NodeRef,
    NodeRole,
    NodeState,
    NodeStatus,
)
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server

FINGERPRINT = "f" * 64
VOCAB_SIZE, MAX_MODEL_LEN, SLOTS = 1000, 512, 100
WAIT_S = 60.0
"""Longest wait for what has to happen, in seconds: it ends what hangs and times nothing."""
PREFILL, DECODE = NodeRef(node_id="prefill-0", generation="1" * 16), NodeRef(node_id="decode-0", generation="2" * 16)


class FakeRouter(ClusterServiceServicer):
    """Answers as the router of a healthy cluster; tests change its fields to make it another."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.verified: list[pb.VerifyRequest] = []
        self.errors: list[CorunError] = []
        """Raised by the next calls, first in, first out."""
        self.refused_prompts: dict[str, CorunError] = {}
        self.refused_beside = 0
        """Other calls that run before a prompt is refused."""
        self.gate = threading.Event()
        """While it is not set, samples stay after their first token."""
        self.gate.set()
        self.cancelled = threading.Event()
        """Set once a call has ended early."""
        self.running = self.most_running = 0
        self.tamper = False
        """Deliver another token than the receipt says."""
        self.cut = False
        """End streams before their samples."""
        self.silent = False
        """Verify nothing."""
        self.without_texts = False
        """Leave out the texts of tokens, and the digests of texts."""
        self.broken: set[Condition] = set()
        """Conditions under which bits differ."""
        self.stopping: set[Condition] = set()
        """Conditions under which samples end for another reason."""
        self.results_per_call: int | None = None
        """Results after which the time of a verification is over."""
        self.on_result: Callable[[int], None] = lambda _: None
        """Called before each result of a verification, with its number in its call."""
        self.status = healthy_status()
        self.streams: dict[str, queue.SimpleQueue[pb.StreamOutputsResponse | None]] = {}
        """What waits to be sent on each open stream, by its id; None ends it."""
        self._lock = threading.Lock()

    def __enter__(self) -> FakeRouter:
        return self.start("127.0.0.1:0")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, address: str) -> FakeRouter:
        self._server = grpc.server(ThreadPoolExecutor(40), options=[("grpc.so_reuseport", 0)])
        add_ClusterServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        self._server.start()
        return self

    def stop(self) -> None:
        self.gate.set()
        self._server.stop(None).wait()

    def Generate(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        with self._lock:
            self.requests.append(request)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            self._refuse(request.text, context)
            if not request.stream_id:
                yield from self._responses(request, context)
            else:
                self._share(request, context, self.streams[request.stream_id])
        finally:
            with self._lock:
                self.running -= 1
            if not context.is_active():
                self.cancelled.set()

    def StreamOutputs(self, request: Any, context: Any) -> Iterator[pb.StreamOutputsResponse]:  # noqa: N802
        stream_id, waiting = secrets.token_hex(8), queue.SimpleQueue[pb.StreamOutputsResponse | None]()
        self.streams[stream_id] = waiting
        context.add_callback(lambda: waiting.put(None))
        yield pb.StreamOutputsResponse(stream_id=stream_id)
        while (message := waiting.get()) is not None:
            yield message

    def GetCluster(self, request: Any, context: Any) -> pb.GetClusterResponse:  # noqa: N802
        self._refuse("", context)
        return codec.cluster_status_to_proto(self.status)

    def Verify(self, request: Any, context: Any) -> Iterator[pb.VerifyResponse]:  # noqa: N802
        self.verified.append(request)
        self._refuse("", context)
        if self.silent:
            return
        cases = [codec.verify_case_from_proto(case) for case in request.cases]
        todo = itertools.product(map(codec.condition_from_proto, request.conditions), enumerate(cases))
        for number, (condition, (index, case)) in enumerate(todo):
            self.on_result(number)
            if number == self.results_per_call:
                error = DeadlineError("the verification's time is over")
                context.abort_with_status(rpc_status.to_status(to_status(error)))
            yield codec.verify_result_to_proto(self._verify(index, case, condition))

    def _refuse(self, text: str, context: Any) -> None:
        while text in self.refused_prompts and self.running <= self.refused_beside and context.is_active():
            time.sleep(0.002)
        with self._lock:
            error = self.refused_prompts.get(text) or (self.errors.pop(0) if self.errors else None)
        if error is not None:
            context.abort_with_status(rpc_status.to_status(to_status(error)))

    def _share(self, request: Any, context: Any, stream: queue.SimpleQueue[pb.StreamOutputsResponse | None]) -> None:
        for response in self._responses(request, context):
            response.call_number = request.call_number
            stream.put(pb.StreamOutputsResponse(responses=[response]))
        if context.is_active():  # Else its end says why.
            stream.put(pb.StreamOutputsResponse(ended=[request.call_number]))

    def _responses(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:
        prompt = tuple(request.text.encode()) if request.text else tuple(request.token_ids.ids)
        params = codec.sampling_params_from_proto(request.sampling_params)
        seed = request.seed if request.HasField("seed") else 77
        samples = [sample_output(prompt, sample_seed(seed, i), params.max_tokens) for i in range(params.n)]
        request_id = request.request_id or "drawn-by-router"
        for position in range(params.max_tokens):
            while position and not self.gate.wait(0.01):
                if not context.is_active():
                    return
            for index, tokens in enumerate(samples):
                token_id, logprob = tokens[position]
                last = position + 1 == params.max_tokens
                if last and self.cut:
                    return
                receipt = make_receipt(
                    request_id, index, prompt=prompt, seed=sample_seed(seed, index), params=params, tokens=tokens
                )
                yield pb.GenerateResponse(
                    request_id=request_id,
                    sample_index=index,
                    seed=sample_seed(seed, index),
                    text=text_of(token_id),
                    token_ids=[token_id ^ 1 if self.tamper and last else token_id],
                    logprobs=[logprob] if params.logprobs else [],
                    top_logprobs=[pb.TopLogprobs(**tops_of(token_id, logprob, params.top_logprobs)._asdict())]
                    if params.top_logprobs
                    else [],
                    token_texts=[text_of(token_id)] if request.token_texts and not self.without_texts else [],
                    finish_reason=codec.finish_reason_to_proto(FinishReason.LENGTH if last else None),
                    receipt=codec.receipt_to_proto(receipt) if last else None,
                    prompt_token_ids=prompt if request.text and (position, index) == (0, 0) else (),
                )

    def _verify(self, index: int, case: VerifyCase, condition: Condition) -> VerifyResult:
        params = case.sampling_params
        tokens = sample_output(case.prompt_token_ids, case.seed, params.max_tokens)
        receipt = make_receipt("verify", 0, prompt=case.prompt_token_ids, seed=case.seed, params=params, tokens=tokens)
        expected = case.output_digest or receipt.output_digest
        match = expected == receipt.output_digest and condition not in self.broken
        count = params.top_logprobs
        text = text_digest("".join(text_of(token_id) for token_id, _ in tokens))
        if condition in self.stopping:
            receipt = replace(receipt, finish_reason=FinishReason.STOP)
        return VerifyResult(
            case_index=index,
            condition=condition,
            match=match,
            expected_digest=expected,
            receipt=receipt,
            text_digest="" if self.without_texts else text,
            alternatives_digest=alternatives_digest([tops_of(*token, count) for token in tokens] if count else []),
        )


class FailedCall(grpc.RpcError):
    """A failed call, as stubs raise it."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: Any = None) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


def text_of(token_id: int) -> str:
    return chr(97 + token_id % 26)


def tops_of(token_id: int, logprob: float, count: int) -> Alternatives:
    """The alternatives beside a token, with their texts."""
    tops = expected_alternatives(token_id, logprob, count)
    return tops._replace(texts=tuple(map(text_of, tops.token_ids)))


def sample_output(prompt: tuple[int, ...], seed: int, count: int) -> list[tuple[int, float]]:
    """(token id, fp32 log probability) at each position."""
    found = []
    for position in range(count):
        word = struct.pack(f"<{len(prompt)}IQI", *prompt, seed, position)
        token, level = struct.unpack("<II", hashlib.blake2b(word, digest_size=8).digest())
        found.append((token % VOCAB_SIZE, struct.unpack("<f", struct.pack("<f", -(level % 5000) / 977))[0]))
    return found


def make_receipt(
    request_id: str,
    index: int,
    *,
    prompt: tuple[int, ...],
    seed: int,
    params: SamplingParams,
    tokens: list[tuple[int, float]],
) -> Receipt:
    return Receipt(
        fingerprint=FINGERPRINT,
        request_id=request_id,
        sample_index=index,
        seed=seed,
        prompt_digest=prompt_digest(prompt),
        params_digest=params.digest(),
        output_digest=output_digest(*zip(*tokens, strict=True)),
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(tokens),
        finish_reason=FinishReason.LENGTH,
        prefill_node=PREFILL,
        decode_node=DECODE,
        tokens_digest=tokens_digest(token_id for token_id, _ in tokens),
    )


def healthy_status() -> ClusterStatus:
    def node(ref: NodeRef, role: NodeRole, **others: Any) -> NodeInfo:
        others |= {"max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE, "block_size": 16, "kv_blocks": 640}
        return NodeInfo(ref=ref, role=role, contract_json=contract(role), model="m", **others)

    prefill = node(PREFILL, NodeRole.PREFILL, address="h:1")
    decode = node(DECODE, NodeRole.DECODE, address="h:2", slots=SLOTS)
    load = NodeLoad(used_slots=3, used_kv_blocks=9, steps=50, tokens=120, leases=5)
    return ClusterStatus(
        router_id="router-a",
        fingerprint=FINGERPRINT,
        nodes=(
            NodeStatus(node=prefill, load=NodeLoad(queued_prompt_tokens=5, tokens=40), state=NodeState.READY),
            NodeStatus(node=decode, load=load, state=NodeState.READY, last_heartbeat_ms=300),
        ),
        queued_samples=2,
        max_queued_samples=4096,
        finished_samples=7,
    )


def contract(role: NodeRole, **model: Any) -> str:
    """A contract's canonical JSON, with the given fields of the model part."""
    facts = {"block_size": 16, "max_model_len": MAX_MODEL_LEN, "driver": "x", **model}
    return filled_contract(role, SLOTS, **facts).canonical_json()
