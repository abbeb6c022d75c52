"""A reference to KV is answered with that KV or not at all: stale, mixed-up and foreign handles at the real nodes.

Talks to the nodes as a router does, with handles that no router would pass on.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from corun import SamplingParams
from corun.errors import InvalidArgumentError, StaleGenerationError, from_rpc_error
from corun.node.kv.handle import bound
from corun.rpc import codec
from corun.types import FinishReason, KvHandle, NodeInfo, NodeRef, NodeRole
from corun.v1 import decode_service_pb2 as decode_pb2
from corun.v1 import decode_service_pb2_grpc, prefill_service_pb2_grpc
from corun.v1 import prefill_service_pb2 as prefill_pb2
from tests.e2e.conftest import CHUNK, Cluster
from tests.e2e.test_serving import FREE_S, idle
from tests.machine import wait_for

pytestmark = pytest.mark.e2e

ROUTER = "handoff-test"
TOKENS = 6
CALL_S = 60.0
Prompt = tuple[int, ...]


def prompt(seed: int, length: int = 2 * CHUNK + 7) -> Prompt:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 500) for _ in range(length))


@dataclass
class Sample:
    """What came back for one lease."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: FinishReason | None = None
    read_before: list[int] = field(default_factory=list)
    """For each message that said that its KV was read, the number of tokens that had come by then."""


class Nodes:
    """The prefill and the decode node, called directly; leases live while the step stream does."""

    def __init__(self, prefill: NodeInfo, decode: NodeInfo) -> None:
        self.prefill_ref, self.decode_ref = prefill.ref, decode.ref
        self._channels = [grpc.insecure_channel(prefill.address), grpc.insecure_channel(decode.address)]
        self._prefill: Any = prefill_service_pb2_grpc.PrefillServiceStub(self._channels[0])  # type: ignore[no-untyped-call]
        self._decode: Any = decode_service_pb2_grpc.DecodeServiceStub(self._channels[1])  # type: ignore[no-untyped-call]
        self._samples: dict[int, Sample] = {}
        self._steps = self._decode.StreamSteps(
            decode_pb2.StreamStepsRequest(router_id=ROUTER, generation=decode.ref.generation)
        )
        next(self._steps)
        threading.Thread(target=self._read, daemon=True).start()

    def prefill(self, tokens: Prompt, reader: NodeRef | None = None, scope: str = "") -> KvHandle:
        request = prefill_pb2.PrefillRequest(
            request_id=secrets.token_hex(8),
            generation=self.prefill_ref.generation,
            prompt_token_ids=tokens,
            reader=codec.node_ref_to_proto(reader or self.decode_ref),
            share_scope=scope,
        )
        return codec.kv_handle_from_proto(self._prefill.Prefill(request, timeout=CALL_S).handle)

    def release(self, handle: KvHandle) -> None:
        request = prefill_pb2.ReleaseKvRequest(request_id=handle.request_id, generation=handle.prefill_node.generation)
        self._prefill.ReleaseKv(request, timeout=CALL_S)

    def start(self, handle: KvHandle, tokens: Prompt) -> Sample:
        """Reserves a slot and hands over the KV. A refused start gives the slot back."""
        generation = self.decode_ref.generation
        lease = self._decode.Reserve(
            decode_pb2.ReserveRequest(
                router_id=ROUTER, generation=generation, num_prompt_tokens=len(tokens), max_tokens=TOKENS
            ),
            timeout=CALL_S,
        ).lease_id
        sample = self._samples[lease] = Sample()
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        request = decode_pb2.StartRequest(
            lease_id=lease,
            generation=generation,
            handle=codec.kv_handle_to_proto(handle),
            prompt_token_ids=tokens,
            sampling_params=codec.sampling_params_to_proto(params),
        )
        try:
            self._decode.Start(request, timeout=CALL_S)
        except grpc.RpcError as error:
            self._decode.Release(decode_pb2.ReleaseRequest(lease_id=lease, generation=generation), timeout=CALL_S)
            raise from_rpc_error(error) from None
        return sample

    def run(self, handle: KvHandle, tokens: Prompt) -> Sample:
        sample = self.start(handle, tokens)
        wait_for(lambda: sample.ended is not None, "the sample ends", CALL_S)
        return sample

    def close(self) -> None:
        self._steps.cancel()
        for channel in self._channels:
            channel.close()

    def _read(self) -> None:
        try:
            for message in self._steps:
                for lease in message.read:
                    self._samples[lease].read_before.append(len(self._samples[lease].tokens))
                rows = zip(message.lease_ids, message.token_ids, message.logprobs, strict=True)
                for lease, token, logprob in rows:
                    self._samples[lease].tokens.append(token)
                    self._samples[lease].logprobs.append(logprob)
                for end in message.ended:
                    self._samples[end.lease_id].ended = codec.finish_reason_from_proto(end.finish_reason)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.CANCELLED  # noqa: PT017


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    infos = {status.node.role: status.node for status in cluster.status().nodes}
    made = Nodes(infos[NodeRole.PREFILL], infos[NodeRole.DECODE])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_leaks(cluster: Cluster, nodes: Nodes) -> Iterator[None]:
    """After each test the decode node still answers right, and no slot or KV is held anywhere."""
    yield
    tokens = prompt(1)
    assert nodes.run(nodes.prefill(tokens), tokens).ended is FinishReason.LENGTH
    wait_for(lambda: idle(cluster), "all slots and KV are free again", FREE_S)


def refused_after_the_read(cluster: Cluster, nodes: Nodes, handle: KvHandle, tokens: Prompt) -> str:
    """Start a sample that must end with an error and no token; return the reason of the decode node's worker."""

    def refusals() -> list[str]:
        return re.findall(r"KV of \S+ is refused: (.*?); it claims", cluster.processes.log("decode"))

    before = refusals()
    sample = nodes.run(handle, tokens)
    assert (sample.tokens, sample.ended, sample.read_before) == ([], FinishReason.ERROR, [])
    wait_for(lambda: len(refusals()) > len(before), "the worker says why")
    (reason,) = refusals()[len(before) :]
    return reason


def take_over(nodes: Nodes, blocks: Sequence[int]) -> KvHandle:
    """Prefills until a prompt gets one of these free blocks, and keeps that prompt's KV."""
    deadline = time.monotonic() + 120
    for seed in range(10_000, 20_000):
        handle = nodes.prefill(prompt(seed, 8 * CHUNK))
        if {*handle.block_ids[0]} & {*blocks}:
            return handle
        nodes.release(handle)
        assert time.monotonic() < deadline
    raise AssertionError("the blocks were not used again")


def test_a_handle_is_answered_with_its_own_kv(cluster: Cluster, nodes: Nodes) -> None:
    """The same bits as through the router, at lengths around block edges."""
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK):
        tokens = prompt(length, length)
        sample = nodes.run(nodes.prefill(tokens), tokens)
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=True)
        with cluster.client() as client:
            routed = client.generate(tokens, params)
        assert (sample.ended, sample.read_before) == (FinishReason.LENGTH, [0])
        assert (tuple(sample.tokens), tuple(sample.logprobs)) == (routed.token_ids, routed.logprobs)


def test_a_handle_whose_blocks_hold_another_prompt_now_is_refused(cluster: Cluster, nodes: Nodes) -> None:
    """Stale: its KV was given back, and another prompt's is where it was. Stock vLLM answers with that one's."""
    tokens = prompt(2)
    stale = nodes.prefill(tokens)
    nodes.release(stale)
    owner = take_over(nodes, stale.block_ids[0])
    try:
        assert "is not this prompt's" in refused_after_the_read(cluster, nodes, stale, tokens)
    finally:
        nodes.release(owner)


def test_a_handle_read_twice_is_refused_the_second_time_or_brings_the_same_kv(cluster: Cluster, nodes: Nodes) -> None:
    """Its blocks are free, but nobody has taken them: what is read is still what the handle claims."""
    tokens = prompt(3)
    handle = nodes.prefill(tokens)
    first, second = nodes.run(handle, tokens), nodes.run(handle, tokens)
    assert first.ended is FinishReason.LENGTH
    assert second.tokens in ([], first.tokens)


@pytest.mark.parametrize("fields", [("block_ids",), ("request_id", "owners"), ("prompt_digest",)], ids=" ".join)
def test_a_mixed_up_handle_is_refused(cluster: Cluster, nodes: Nodes, fields: tuple[str, ...]) -> None:
    """Its binding is right, and all that it says exists, but not together."""
    mine, other = prompt(4), prompt(5)
    handle, foreign = nodes.prefill(mine), nodes.prefill(other)
    mixed = bound(replace(handle, **{field: getattr(foreign, field) for field in fields}))
    tokens = other if "prompt_digest" in fields else mine
    assert "block 0 of 3 is not this prompt's" in refused_after_the_read(cluster, nodes, mixed, tokens)
    for name, kept in ((mine, handle), (other, foreign)):  # Neither owner lost its KV to the refused read.
        assert nodes.run(kept, name).ended is FinishReason.LENGTH


def test_blocks_in_another_order_and_kv_of_an_earlier_generation_are_refused(cluster: Cluster, nodes: Nodes) -> None:
    tokens = prompt(6)
    handle = nodes.prefill(tokens)
    first, second, *rest = handle.block_ids[0]
    swapped = bound(replace(handle, block_ids=((second, first, *rest),)))
    assert "block 0 of 3 is not this prompt's (2 are not)" in refused_after_the_read(cluster, nodes, swapped, tokens)
    renamed = bound(replace(handle, prefill_node=replace(handle.prefill_node, generation="0" * 16)))
    assert "is not this prompt's" in refused_after_the_read(cluster, nodes, renamed, tokens)
    nodes.release(handle)


def test_blocks_that_do_not_exist_are_refused(cluster: Cluster, nodes: Nodes) -> None:
    """Their ids lead into another layer's memory, or nowhere."""
    tokens = prompt(7)
    handle = nodes.prefill(tokens)
    num_blocks = next(s.node.kv_blocks for s in cluster.status().nodes if s.node.role is NodeRole.PREFILL) + 1
    for shift in (num_blocks, 2**31):
        moved = bound(replace(handle, block_ids=(tuple(block + shift for block in handle.block_ids[0]),)))
        sample = nodes.run(moved, tokens)
        assert (sample.tokens, sample.ended) == ([], FinishReason.ERROR)
    nodes.release(handle)


def test_a_handle_of_another_reader_is_refused(nodes: Nodes) -> None:
    """Made for an earlier life of this decode node; once honest, once with the reader's name changed. The KV is the
    prompt's all the same: readers of shared KV get a handle each."""
    tokens = prompt(8)
    dead = replace(nodes.decode_ref, generation="0" * 16)
    handle = nodes.prefill(tokens, reader=dead)
    with pytest.raises(StaleGenerationError):
        nodes.start(handle, tokens)
    with pytest.raises(InvalidArgumentError, match=r"handle\.binding"):
        nodes.start(replace(handle, reader=nodes.decode_ref), tokens)
    own, alone = bound(replace(handle, reader=nodes.decode_ref)), nodes.prefill(tokens)
    samples = [nodes.run(made, tokens) for made in (own, alone)]
    assert [sample.ended for sample in samples] == [FinishReason.LENGTH] * 2
    assert (samples[0].tokens, samples[0].logprobs) == (samples[1].tokens, samples[1].logprobs)


def test_kv_from_the_cache_gives_the_bits_of_kv_that_was_computed(nodes: Nodes) -> None:
    """Turns of a conversation. Each takes the whole chunks of those before it, and once more nothing: without a scope
    all of it is computed."""
    lengths = (CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7)
    cached, hits, misses = [], [], []
    for length in lengths:
        tokens = prompt(9, length)
        handle = nodes.prefill(tokens, scope="turns")
        cached.append(handle.cached_tokens)
        hits.append(nodes.run(handle, tokens))
        misses.append(nodes.run(nodes.prefill(tokens), tokens))
    assert cached == [0, CHUNK, CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert all(sample.ended is FinishReason.LENGTH for sample in hits)
    assert [(one.tokens, one.logprobs) for one in hits] == [(one.tokens, one.logprobs) for one in misses]
    assert len({(*sample.logprobs,) for sample in hits}) == len(lengths), "bits that always agree show nothing"


def test_only_whoever_computed_cached_blocks_is_their_owner(cluster: Cluster, nodes: Nodes) -> None:
    """Another prompt of the same first tokens is not; nor is anybody else's prompt, or another client's."""
    tokens = prompt(10)
    assert nodes.run(nodes.prefill(tokens, scope="owners"), tokens).ended is FinishReason.LENGTH
    other, longer = nodes.prefill(tokens, scope="another client"), (*tokens, 5)
    assert other.cached_tokens == 0
    handle = nodes.prefill(longer, scope="owners")
    assert [one.num_blocks for one in handle.owners] == [2, 1]
    for name in (handle.request_id, other.request_id):
        forged = bound(replace(handle, owners=(replace(handle.owners[0], request_id=name), handle.owners[1])))
        reason = refused_after_the_read(cluster, nodes, forged, longer)
        assert reason.startswith("block 0 of 3 is not this prompt's (2 are not)")
    with pytest.raises(InvalidArgumentError, match=r"handle\.owners"):
        nodes.start(bound(replace(handle, owners=handle.owners[::-1])), longer)
    assert nodes.run(handle, longer).ended is FinishReason.LENGTH
    assert nodes.run(other, tokens).ended is FinishReason.LENGTH
