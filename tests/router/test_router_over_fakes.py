"""The real router over real node services and fake engines: whole requests, faults, cancellation, bounds.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    UnavailableError,
)
from corun.node.membership import NodeAgent
from corun.params import SamplingParams
from corun.receipt import output_digest, prompt_digest, tokens_digest
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.seeds import derive_seed, sample_seed
from corun.testing.cluster import WAIT_S
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE, expected
from corun.testing.nodes import LocalNode
from corun.types import FinishReason, ModelStatus, NodeState, ResumePoint
from corun.v1 import cluster_service_pb2 as pb
from decode_node.service import DecodeService
from router import sample, service
from router.request import Request
from router.text import VERSION, Tokenizer
from tests.clusters import FakeCluster, Output, cluster, generate, retries, send, take

PARAMS = SamplingParams(max_tokens=12, logprobs=True)
PROMPT = (5, 6, 7)


def check(output: Output, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> None:
    """The output is what these tokens, parameters and seed always give, and the receipt says so."""
    ids, logprobs, reason = expected(prompt, params, seed)
    assert (output.token_ids, output.seed) == (ids, seed)
    assert output.logprobs == (logprobs if params.logprobs else [])
    receipt = output.receipt
    assert receipt.output_digest == output_digest(ids, logprobs)
    assert receipt.tokens_digest == tokens_digest(ids)
    assert (receipt.prompt_digest, receipt.params_digest) == (prompt_digest(prompt), params.digest())
    assert (receipt.seed, receipt.finish_reason) == (seed, reason)
    assert (receipt.num_prompt_tokens, receipt.num_output_tokens) == (len(prompt), len(ids))


@contextlib.asynccontextmanager
async def gathering(fake: FakeCluster, node: LocalNode, prompts: int) -> AsyncIterator[None]:
    """Lets a prefill node compute nothing before so many prompts, which are sent meanwhile, are there."""
    async with node.engine.turn:
        yield
        await fake.until(lambda: node.service.queued_prompts == prompts)


class TestRequests:
    async def test_a_request_streams_its_tokens_and_a_receipt(self, model: str) -> None:
        async with cluster(model) as fake:
            fake.nodes[1].engine.step_ms = 5  # So that steps do not merge on their way.
            (output,) = await generate(fake, PROMPT, PARAMS, seed=42, request_id="r1")
            check(output, PROMPT, PARAMS, 42)
            assert output.messages > 2
            assert output.receipt.request_id == "r1"
            assert output.receipt.fingerprint == (await fake.status()).fingerprint != ""
            p1, d1 = fake.nodes
            assert (output.receipt.prefill_node, output.receipt.decode_node) == (p1.info.ref, d1.info.ref)
            status = await fake.status()
            assert status.finished_samples == 1
            most_bytes = MAX_MODEL_LEN * Tokenizer.load(model).max_token_bytes
            named = ModelStatus(name=Path(model).name, max_model_len=MAX_MODEL_LEN, max_prompt_bytes=most_bytes)
            assert status.model == named

    async def test_text_is_tokenized_and_decoded(self, model: str) -> None:
        async with cluster(model) as fake:
            tokenizer = fake.router.registry.model.tokenizer  # type: ignore[union-attr]
            (output,) = await generate(fake, "Once upon a tïme", PARAMS, seed=1)
            check(output, tokenizer.encode("Once upon a tïme"), PARAMS, 1)
            assert output.text == tokenizer.decode(output.token_ids)

    async def test_logprobs_only_if_asked_for(self, model: str) -> None:
        async with cluster(model) as fake:
            params = SamplingParams(max_tokens=4)
            (output,) = await generate(fake, PROMPT, params, seed=3)
            check(output, PROMPT, params, 3)

    async def test_seeds_are_derived_from_the_request_id(self, model: str) -> None:
        async with cluster(model) as fake:
            (one,) = await generate(fake, PROMPT, PARAMS, request_id="a")
            (two,) = await generate(fake, PROMPT, PARAMS, request_id="a")
            (other,) = await generate(fake, PROMPT, PARAMS)
            assert one.seed == two.seed == derive_seed(bytes(32), "a") != other.seed
            assert one.token_ids == two.token_ids
            assert len(other.receipt.request_id) == 32

    async def test_samples_have_their_own_seeds_and_run_together(self, model: str) -> None:
        async with cluster(model) as fake:
            params = SamplingParams(max_tokens=30, n=4, logprobs=True)
            outputs = await generate(fake, PROMPT, params, seed=9)
            for index, output in enumerate(outputs):
                check(output, PROMPT, params, sample_seed(9, index))
                assert output.receipt.sample_index == index
            assert fake.nodes[1].engine.most_running == 4
            assert len({output.seed for output in outputs}) == 4

    async def test_samples_of_one_prompt_share_its_prefill(self, model: str) -> None:
        async with cluster(model) as fake:
            async with gathering(fake, fake.nodes[0], 4):
                run = asyncio.ensure_future(generate(fake, PROMPT, replace(PARAMS, n=4), seed=9))
            outputs = await run
            for index, output in enumerate(outputs):
                check(output, PROMPT, PARAMS, sample_seed(9, index))
            assert fake.nodes[0].engine.prefilled == [PROMPT]

    async def test_samples_on_all_decode_nodes_share_one_prefill(self, model: str) -> None:
        """Whichever prefill node has it: more samples than a router has prompts at one of them."""
        async with cluster(model, prefills=2, decodes=2) as fake:
            async with gathering(fake, fake.nodes[0], 8):
                run = asyncio.ensure_future(generate(fake, PROMPT, replace(PARAMS, n=8), seed=9))
            outputs = await run
            for index, output in enumerate(outputs):
                check(output, PROMPT, PARAMS, sample_seed(9, index))
            assert [node.engine.prefilled for node in fake.nodes[:2]] == [[PROMPT], []]
            assert {output.receipt.decode_node.node_id for output in outputs} == {"d1", "d2"}

    async def test_samples_that_have_to_wait_for_slots_share_it_too(self, model: str) -> None:
        async with cluster(model, slots=2) as fake:
            samples = await asyncio.gather(*(generate(fake, (i,), replace(PARAMS, n=5), seed=i) for i in range(3)))
            for i, outputs in enumerate(samples):
                for index, output in enumerate(outputs):
                    check(output, (i,), PARAMS, sample_seed(i, index))
            assert sorted(fake.nodes[0].engine.prefilled) == [(0,), (1,), (2,)]

    async def test_routers_that_share_nothing_spread_equal_prompts(self, model: str) -> None:
        async with cluster(model, prefills=2, share_kv=False) as fake:
            for node in fake.nodes[:2]:
                node.engine.delay_s = 0.02
            await generate(fake, PROMPT, replace(PARAMS, n=8), seed=9)
            assert [len(node.engine.prefilled) for node in fake.nodes[:2]] == [4, 4]

    async def test_a_prefill_that_fails_is_computed_once_more_and_not_for_each_sample(self, model: str) -> None:
        async with cluster(model, prefills=2) as fake:
            p1, p2 = fake.nodes[:2]
            p1.engine.errors = [InternalError("broken")]
            async with gathering(fake, p2, 6), gathering(fake, p1, 6):
                run = asyncio.ensure_future(generate(fake, PROMPT, replace(PARAMS, n=6), seed=9))
            outputs = await run
            for index, output in enumerate(outputs):
                check(output, PROMPT, PARAMS, sample_seed(9, index))
            assert [node.engine.prefilled for node in fake.nodes[:2]] == [[], [PROMPT]]

    async def test_a_sample_that_is_resumed_shares_nothing(self, model: str) -> None:
        """Its tokens are compared with those that its client has."""
        async with cluster(model) as fake:
            point = ResumePoint(
                sample_index=0, seed=sample_seed(5, 0), num_tokens=3, output_digest="0" * 64, text_bytes=0
            )
            request = Request(prompt=PROMPT, params=replace(PARAMS, n=2), request_id="r", seed=5, resume=(point,))
            deadline = asyncio.get_running_loop().time() + WAIT_S
            samples = await fake.router.requests.accept(request, deadline)
            assert [bool(sample.need.kv_key) for sample in samples] == [False, True]

    async def test_stop_tokens_and_stop_strings(self, model: str) -> None:
        async with cluster(model) as fake:
            tokenizer = fake.router.registry.model.tokenizer  # type: ignore[union-attr]
            plain = SamplingParams(max_tokens=40, logprobs=True)
            ids, _, _ = expected(PROMPT, plain, 5)
            by_token = SamplingParams(max_tokens=40, stop_token_ids=[ids[6]])
            (output,) = await generate(fake, PROMPT, by_token, seed=5)
            check(output, PROMPT, by_token, 5)
            if output.receipt.finish_reason is FinishReason.STOP:
                assert output.text == tokenizer.decode(output.token_ids[:-1])

    async def test_a_stop_string_cuts_text_and_ends_the_slot(self, model: str) -> None:
        async with cluster(model) as fake:
            tokenizer = fake.router.registry.model.tokenizer  # type: ignore[union-attr]
            # Parameters are part of what the fake model hashes, so a stop string is searched that occurs.
            for seed in range(200):
                params = SamplingParams(max_tokens=200, stop=["a", "e"], logprobs=True)
                ids, _, _ = expected(PROMPT, params, seed)
                text = tokenizer.decode(ids)
                if (cut := min((text.find(s) for s in "ae" if s in text), default=-1)) > 3:
                    break
            (output,) = await generate(fake, PROMPT, params, seed=seed)
            assert output.text == text[:cut]
            assert output.receipt.finish_reason is FinishReason.STOP
            assert output.token_ids == ids[: len(output.token_ids)]
            assert set(tokenizer.decode(output.token_ids)) & set("ae")
            assert not set(tokenizer.decode(output.token_ids[:-1])) & set("ae")
            assert output.receipt.num_output_tokens == len(output.token_ids)

    async def test_many_prompts_share_few_slots_in_order(self, model: str) -> None:
        async with cluster(model, decodes=2, prefills=2, slots=4) as fake:
            prompts = [tuple(range(i, i + 3 + i % 7)) for i in range(40)]
            params = [SamplingParams(max_tokens=1 + i % 9, temperature=i % 2, logprobs=True) for i in range(40)]
            runs = [generate(fake, p, params[i], seed=i) for i, p in enumerate(prompts)]
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                check(output, prompts[i], params[i], i)
            assert all(0 < node.engine.most_running <= 4 for node in fake.nodes if node.info.slots)

    async def test_admission_is_first_in_first_out(self, model: str) -> None:
        async with cluster(model, slots=1) as fake:
            prefill = fake.nodes[0].engine
            runs = []
            for i in range(8):
                runs.append(asyncio.ensure_future(generate(fake, (100 + i,), SamplingParams(max_tokens=3))))
                await fake.until(lambda i=i: fake.router.queue.waiting + len(prefill.prefilled) > i)  # type: ignore[misc]
            await asyncio.gather(*runs)
            assert prefill.prefilled == [(100 + i,) for i in range(8)]


def invalid(**changes: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    for name, value in changes.items():
        if name in request.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
        elif name == "ids":
            del request.token_ids.ids[:]
            request.token_ids.ids.extend(value)
        elif isinstance(value, (list, tuple)):
            getattr(request.sampling_params, name).extend(value)
        elif isinstance(value, dict):
            getattr(request.sampling_params, name).update(value)
        else:
            setattr(request.sampling_params, name, value)
    return request


BAD_REQUESTS = [
    (pb.GenerateRequest(), "prompt"),
    (invalid(text=""), "prompt"),
    (invalid(ids=[]), "prompt"),
    (invalid(ids=[1, 2, VOCAB_SIZE]), "prompt.token_ids[2]"),
    (invalid(ids=[1] * MAX_MODEL_LEN), "prompt.token_ids"),
    (invalid(max_tokens=MAX_MODEL_LEN), "sampling_params.max_tokens"),
    (invalid(max_tokens=0), "sampling_params.max_tokens"),
    (invalid(temperature=float("nan")), "sampling_params.temperature"),
    (invalid(temperature=-1.0), "sampling_params.temperature"),
    (invalid(top_p=1.5), "sampling_params.top_p"),
    (invalid(top_p=0.0), "sampling_params.top_p"),
    (invalid(stop=["x"] * 1000), "sampling_params.stop"),
    (invalid(stop_token_ids=[VOCAB_SIZE]), "sampling_params.stop_token_ids[0]"),
    (invalid(logit_bias={VOCAB_SIZE: 1.0}), "sampling_params.logit_bias"),
    (invalid(n=0), "sampling_params.n"),
    (invalid(n=1000), "sampling_params.n"),
    (invalid(seed=2**63), "seed"),
    (invalid(request_id="x" * 129), "request_id"),
]


class TestRefusals:
    async def test_bad_requests_name_the_field_and_reserve_nothing(self, model: str) -> None:
        async with cluster(model) as fake:
            for request, field in BAD_REQUESTS:
                with pytest.raises(InvalidArgumentError) as caught:
                    await send(fake, request)
                assert caught.value.field == field
                assert caught.value.limit
                if field == "prompt":
                    assert str(caught.value) == "prompt = nothing: must be text or token ids, at least one"
            assert fake.nodes[0].engine.prefilled == []

    async def test_what_an_engine_refuses_is_tried_once_and_named(
        self, model: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is the request's: no other node would take it, none is to blame, and no log fills with tracebacks."""
        async with cluster(model, decodes=2) as fake:
            for node in fake.nodes[1:]:
                node.engine.start_errors = [InvalidArgumentError("sampling_params.temperature", 2.5, "must not be")] * 3
            with pytest.raises(InvalidArgumentError, match=r"^sampling_params\.temperature = 2\.5: must not be$"):
                await generate(fake, PROMPT, PARAMS)
            assert fake.nodes[0].engine.prefilled == [PROMPT]
            fake.nodes[0].engine.errors = [InvalidArgumentError("prompt.token_ids", 7, "must not be")] * 3
            with pytest.raises(InvalidArgumentError, match=r"^prompt\.token_ids = 7: must not be$"):
                await generate(fake, PROMPT, PARAMS)
            assert len(fake.nodes[0].engine.errors) == 2
            assert not retries(fake)
            assert [record for record in caplog.records if record.exc_info] == []

    async def test_a_request_that_no_node_has_kv_for_is_refused(self, model: str) -> None:
        async with cluster(model, decodes=0) as fake:
            await fake.add_decode(kv_blocks=2)
            await fake.ready("d1")
            with pytest.raises(InvalidArgumentError, match="room in the KV"):
                await generate(fake, PROMPT, SamplingParams(max_tokens=32))
            await generate(fake, PROMPT, SamplingParams(max_tokens=29))

    async def test_an_oversized_message_names_the_limit(self, model: str) -> None:
        async with cluster(model, max_message_bytes=1024) as fake:
            with pytest.raises(InvalidArgumentError, match="at most 1024"):
                await generate(fake, "x" * 2000)

    async def test_a_full_queue_says_when_to_come_back(self, model: str) -> None:
        async with cluster(model, slots=1, max_queued_samples=2) as fake:
            fake.nodes[1].engine.hanging = True
            params = SamplingParams(max_tokens=5)
            runs = [asyncio.ensure_future(generate(fake, (i,), params)) for i in range(3)]
            await fake.until(lambda: fake.router.queue.waiting == 2)
            with pytest.raises(OverloadedError) as caught:
                await generate(fake, PROMPT, params)
            assert 0 < caught.value.retry_after_s <= 30
            assert fake.router.queue.waiting == 2
            assert (await fake.status()).queued_samples == 2
            fake.nodes[1].engine.hanging = False
            await asyncio.gather(*runs)

    async def test_queued_tokens_are_bounded_too(self, model: str) -> None:
        async with cluster(model, slots=1, max_queued_tokens=100) as fake:
            fake.nodes[1].engine.hanging = True
            runs = [asyncio.ensure_future(generate(fake, [i] * 60, SamplingParams(max_tokens=5))) for i in range(2)]
            await fake.until(lambda: fake.router.queue.waiting == 1)
            with pytest.raises(OverloadedError, match="60 of at most 100 tokens"):
                await generate(fake, [1] * 41)
            fake.nodes[1].engine.hanging = False
            await asyncio.gather(*runs)

    @pytest.mark.parametrize(
        ("prefills", "decodes", "missing"),
        [
            (0, 1, "no prefill node has joined"),
            (1, 0, "no decode node has joined"),
            (0, 0, "no prefill node has joined"),
        ],
    )
    async def test_missing_nodes_are_named(self, model: str, prefills: int, decodes: int, missing: str) -> None:
        async with cluster(model, prefills=prefills, decodes=decodes, node_wait_s=0.1) as fake:
            await fake.until(lambda: len(fake.router.registry.statuses()) == prefills + decodes)
            with pytest.raises(UnavailableError, match=missing):
                await generate(fake, PROMPT)

    async def test_the_reason_comes_before_the_clients_deadline(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "ANSWER_S", 1.0)
        async with cluster(model, prefills=0, decodes=0) as fake:
            with pytest.raises(UnavailableError, match="no prefill node has joined; no decode node has joined"):
                await generate(fake, PROMPT, timeout_s=2.0)

    async def test_requests_wait_for_nodes(self, model: str) -> None:
        async with cluster(model, prefills=0, decodes=0) as fake:
            run = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=1))
            await asyncio.sleep(0.05)
            await fake.add_decode()
            await asyncio.sleep(0.05)
            await fake.add_prefill()
            check((await run)[0], PROMPT, PARAMS, 1)


class TestNodes:
    async def test_health_follows_the_last_warm_pair(self, model: str) -> None:
        async def serving() -> bool:
            async with channel(fake.address) as link:
                request = health_pb2.HealthCheckRequest(service="corun.v1.ClusterService")
                answer = await health_pb2_grpc.HealthStub(link).Check(request, timeout=WAIT_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async with cluster(model) as fake:
            assert await serving()
            await fake.nodes[1].kill()
            await fake.until(lambda: fake.state("d1") is not NodeState.READY)
            assert not await serving()
            await fake.add_decode("d2")
            await fake.ready("d2")
            assert await serving()

    async def test_another_contract_is_refused_and_shown(self, model: str) -> None:
        async with cluster(model) as fake:
            node = await fake.add_decode("d2", join=False, threads=2)
            with pytest.raises(ContractMismatchError) as caught:
                fake.router.registry.register(node.info)
            assert caught.value.differences == {"model.threads": ("1", "2")}
            status = {s.node.ref.node_id: s for s in (await fake.status()).nodes}
            assert status["d2"].state is NodeState.REFUSED
            assert "model.threads: 1 != 2" in status["d2"].detail
            assert status["d1"].state is NodeState.READY
            await generate(fake, PROMPT, PARAMS)
            other_role = await fake.add_prefill("p2", join=False, dtype="bfloat16")
            with pytest.raises(ContractMismatchError, match=r"model\.dtype"):
                fake.router.registry.register(other_role.info)

    async def test_a_silent_node_is_lost_and_may_come_back(self, model: str) -> None:
        async with cluster(model, heartbeat_timeout_ms=500, lease_ttl_ms=600) as fake:
            decode = fake.nodes[1]
            await decode.fall_silent()
            await fake.until(lambda: fake.state("d1") is NodeState.LOST)
            status = (await fake.status()).nodes[1]
            assert status.detail == "no heartbeat for 0.5 s"
            decode.join()
            await fake.ready("d1")
            check((await generate(fake, PROMPT, PARAMS, seed=1))[0], PROMPT, PARAMS, 1)

    async def test_a_node_that_was_given_up_but_lives_comes_back(self, model: str) -> None:
        async with cluster(model) as fake:
            member = fake.router.registry._decodes["d1"]
            fake.nodes[1].engine.step_ms = 5
            running = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=1))
            await fake.until(lambda: fake.nodes[1].drawn_tokens > 2)
            fake.router.registry.lose(member, "a test gave it up")
            check((await running)[0], PROMPT, PARAMS, 1)
            await fake.until(lambda: fake.router.registry._decodes["d1"] is not member)

    async def test_a_tokenizer_that_is_not_the_models_is_not_used(self, model: str) -> None:
        async with cluster(model, prefills=0, decodes=0) as fake:
            await fake.add_decode(tokenizer_digest="0" * 64)
            await fake.until(lambda: "is not the one of the contract" in fake.detail("d1"))
            assert fake.state("d1") is NodeState.JOINING

    async def test_a_router_with_another_tokenizers_library_uses_no_node(self, model: str) -> None:
        """Two routers could turn one text into other tokens, and a resumed stream would end in data loss."""
        async with cluster(model, prefills=0, decodes=0) as fake:
            await fake.add_decode(tokenizers="0.1.2")
            await fake.until(lambda: f"model.tokenizers: 0.1.2 != {VERSION}" in fake.detail("d1"))
            assert "install tokenizers==0.1.2 for the router" in fake.detail("d1")
            assert fake.state("d1") is NodeState.JOINING

    async def test_two_routers_share_the_nodes(self, model: str) -> None:
        async with cluster(model, slots=3) as one, cluster(model, prefills=0, decodes=0) as two:
            agents = [NodeAgent(node.info, [two.address], node.service.load) for node in one.nodes]
            memberships = [asyncio.ensure_future(agent.run()) for agent in agents]
            await two.ready("p1", "d1")
            runs = [generate(one if i % 2 else two, (i, 4), PARAMS, seed=i) for i in range(24)]
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                check(output, (i, 4), PARAMS, i)
            assert one.nodes[1].engine.most_running == 3
            for membership in memberships:
                membership.cancel()
            await asyncio.wait(memberships)

    async def test_a_restarted_node_replaces_its_old_generation(self, model: str) -> None:
        async with cluster(model) as fake:
            old = fake.nodes[1]
            await old.kill()
            new = await fake.add_decode("d1")
            await fake.ready(str(new.info.ref))
            (output,) = await generate(fake, PROMPT, PARAMS, seed=2)
            assert output.receipt.decode_node == new.info.ref
            with pytest.raises(CorunError, match="is generation"):
                fake.router.registry.register(old.info)

    async def test_a_pair_that_cannot_connect_yet_is_tried_again(self, model: str) -> None:
        async with cluster(model, decodes=0) as fake:
            decode = await fake.add_decode(join=False)
            decode.engine.connect_errors = [RuntimeError("not yet")]
            decode.join()
            await fake.until(lambda: "d1 cannot connect to p1" in fake.detail("d1"))
            assert fake.state("d1") is NodeState.JOINING
            await fake.ready("d1", "p1")
            assert [peer.engine_id for peer in decode.engine.connected] == [fake.nodes[0].engine.endpoint.engine_id]

    async def test_a_draining_node_gets_no_new_work(self, model: str) -> None:
        async with cluster(model, decodes=2) as fake:
            _, d1, d2 = fake.nodes
            d1.engine.step_ms = 10
            running = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=1))
            await fake.until(lambda: d1.used_slots == 1)
            d1.service.draining = d1.agent.draining = True
            outputs = await asyncio.gather(*(generate(fake, (i,), PARAMS, seed=i) for i in range(4)))
            assert {output.receipt.decode_node for (output,) in outputs} == {d2.info.ref}
            assert (await running)[0].receipt.decode_node == d1.info.ref
            await fake.until(lambda: fake.state("d1") is NodeState.DRAINING)

    async def test_slots_are_the_nodes_own_business(self, model: str) -> None:
        """Another router holds slots; a refused Reserve waits for a change and keeps its turn."""
        async with cluster(model, slots=2) as fake:
            table = fake.nodes[1].service._table
            leases = [table.reserve("another router", 1, 1) for _ in range(2)]
            runs = []
            for i in range(3):
                runs.append(asyncio.ensure_future(generate(fake, (i,), PARAMS, seed=i)))
                await fake.until(lambda i=i: fake.router.queue.waiting == i + 1)  # type: ignore[misc]
            await asyncio.sleep(0.12)
            assert fake.nodes[0].engine.prefilled == []
            for lease in leases:
                table.release(lease.lease_id)
            await asyncio.gather(*runs)
            assert fake.nodes[0].engine.prefilled[2] == (2,)  # The first two are admitted together.


class TestFaults:
    async def test_a_decode_node_dies_in_the_middle(self, model: str) -> None:
        async with cluster(model, decodes=2) as fake:
            params = SamplingParams(max_tokens=60, logprobs=True)
            runs = [asyncio.ensure_future(generate(fake, (i, 1), params, seed=i)) for i in range(6)]
            await fake.until(lambda: fake.nodes[1].used_slots == 3 and fake.nodes[1].drawn_tokens > 20)
            await fake.nodes[1].kill()
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                check(output, (i, 1), params, i)
                assert output.receipt.decode_node == fake.nodes[2].info.ref
            assert fake.state("d1") is NodeState.LOST

    async def test_the_only_decode_node_is_restarted_in_the_middle(self, model: str) -> None:
        async with cluster(model) as fake:
            params = SamplingParams(max_tokens=60, logprobs=True)
            run = asyncio.ensure_future(generate(fake, PROMPT, params, seed=8))
            await fake.until(lambda: fake.nodes[1].drawn_tokens > 10)
            await fake.nodes[1].kill()
            new = await fake.add_decode("d1")
            (output,) = await run
            check(output, PROMPT, params, 8)
            assert output.receipt.decode_node == new.info.ref

    async def test_the_prefill_node_dies_during_a_prefill(self, model: str) -> None:
        async with cluster(model) as fake:
            fake.nodes[0].engine.hanging = True
            run = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=8))
            await fake.until(lambda: fake.nodes[0].queued_tokens > 0)
            await fake.nodes[0].kill()
            new = await fake.add_prefill("p1")
            (output,) = await run
            check(output, PROMPT, PARAMS, 8)
            assert output.receipt.prefill_node == new.info.ref

    async def test_engine_errors_are_tried_again_and_not_shown(self, model: str) -> None:
        async with cluster(model) as fake:
            prefill, decode = fake.nodes[0].engine, fake.nodes[1].engine
            prefill.errors = [RuntimeError("secret")]
            decode.fail_after = 5
            check((await generate(fake, PROMPT, PARAMS, seed=1))[0], PROMPT, PARAMS, 1)
            prefill.errors = [RuntimeError("secret")] * 3
            with pytest.raises(UnavailableError, match="failed 3 runs") as caught:
                await generate(fake, PROMPT, PARAMS, seed=1)
            assert "secret" not in str(caught.value)

    async def test_a_repeated_run_with_other_bits_is_data_loss(self, model: str) -> None:
        async with cluster(model, decodes=2) as fake:
            params = SamplingParams(max_tokens=60)
            run = asyncio.ensure_future(generate(fake, PROMPT, params, seed=8))
            await fake.until(lambda: fake.nodes[1].drawn_tokens > 10)
            fake.nodes[2].engine.corrupt = True
            await fake.nodes[1].kill()
            with pytest.raises(DataLossError, match="differs at token 0"):
                await run

    async def test_a_node_that_draws_nothing_times_out(self, model: str) -> None:
        async with cluster(model, decodes=2, step_timeout_s=1.0) as fake:
            fake.nodes[1].engine.hanging = True
            check((await generate(fake, PROMPT, PARAMS, seed=1))[0], PROMPT, PARAMS, 1)

    async def test_a_hanging_prefill_times_out(self, model: str) -> None:
        async with cluster(model, prefills=2, prefill_timeout_s=1.0) as fake:
            fake.nodes[0].engine.hanging = True
            (output,) = await generate(fake, PROMPT, PARAMS, seed=1)
            assert output.receipt.prefill_node == fake.nodes[1].info.ref

    async def test_nodes_that_stay_away_are_given_up_on(self, model: str) -> None:
        async with cluster(model, node_wait_s=0.2) as fake:
            run = asyncio.ensure_future(generate(fake, PROMPT, SamplingParams(max_tokens=400)))
            await fake.until(lambda: fake.nodes[1].drawn_tokens > 3)
            await fake.nodes[1].kill()
            with pytest.raises(UnavailableError, match="no decode node is in use"):
                await run

    async def test_a_bug_in_one_sample_does_not_reach_the_others(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with cluster(model) as fake:
            real = sample.SampleOutput.end

            def end(output: sample.SampleOutput, reason: FinishReason) -> FinishReason:
                if output._seed == 13:
                    raise RuntimeError("secret")
                return real(output, reason)

            monkeypatch.setattr(sample.SampleOutput, "end", end)
            good, bad = generate(fake, (1,), PARAMS, seed=1), generate(fake, (2,), PARAMS, seed=13)
            outputs = await asyncio.gather(good, bad, return_exceptions=True)
            assert isinstance(outputs[1], InternalError)
            assert "secret" not in str(outputs[1])
            check(outputs[0][0], (1,), PARAMS, 1)  # type: ignore[index]


class Reader:
    """A request that is read message by message."""

    def __init__(self, stub: Any, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.call = stub.Generate(codec.generate_request(prompt, params, seed=1), timeout=WAIT_S)
        self.output = Output()

    async def read(self) -> None:
        take(self.output, await self.call.read())


class TestCancellation:
    async def test_cancelled_while_decoding(self, model: str) -> None:
        async with cluster(model, slots=1) as fake, fake.stub() as stub:
            reader = Reader(stub, PROMPT, SamplingParams(max_tokens=500))
            await reader.read()
            waiting = asyncio.ensure_future(generate(fake, (9,), PARAMS, seed=2))
            await fake.until(lambda: fake.router.queue.waiting == 1)
            reader.call.cancel()
            check((await waiting)[0], (9,), PARAMS, 2)

    async def test_cancelled_while_prefilling(self, model: str) -> None:
        async with cluster(model) as fake, fake.stub() as stub:
            fake.nodes[0].engine.hanging = True
            reader = Reader(stub, PROMPT, PARAMS)
            read = asyncio.ensure_future(reader.read())
            await fake.until(lambda: fake.nodes[0].queued_tokens > 0)
            reader.call.cancel()
            await asyncio.wait((read,))
            await fake.until(lambda: fake.nodes[0].queued_tokens == 0)  # The work has ended, too.
            await fake.idle()
            assert fake.nodes[0].engine.prefilled == []

    async def test_cancelled_while_waiting(self, model: str) -> None:
        async with cluster(model, slots=1) as fake, fake.stub() as stub:
            fake.nodes[1].engine.hanging = True
            first = asyncio.ensure_future(generate(fake, (1,), PARAMS, seed=1))
            await fake.until(lambda: fake.nodes[1].used_slots == 1)
            reader = Reader(stub, PROMPT, PARAMS)
            read = asyncio.ensure_future(reader.read())
            await fake.until(lambda: fake.router.queue.waiting == 1)
            reader.call.cancel()
            await fake.until(lambda: fake.router.queue.waiting == 0)
            await asyncio.wait((read,))
            fake.nodes[1].engine.hanging = False
            await first
            assert fake.nodes[0].engine.prefilled == [(1,)]

    async def test_a_client_that_is_gone_frees_everything(self, model: str) -> None:
        async with cluster(model) as fake:
            async with fake.stub() as stub:
                readers = [Reader(stub, (i,), SamplingParams(max_tokens=500, n=2)) for i in range(3)]
                for reader in readers:
                    await reader.read()
                del reader, readers  # With the channel, the connection closes.
            await fake.idle()
            assert 6 <= fake.nodes[1].drawn_tokens < 6 * 500

    async def test_the_clients_deadline_ends_the_sample(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "ANSWER_S", 1.0)
        async with cluster(model) as fake:
            fake.nodes[1].engine.step_ms = 20
            with pytest.raises(DeadlineError, match="the deadline passed in an attempt of sample 0"):
                await generate(fake, PROMPT, SamplingParams(max_tokens=500), timeout_s=2.0)

    async def test_a_slot_that_is_granted_after_the_deadline_is_given_back(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not first when its lease expires: that is a minute here."""
        reserve, may_answer = DecodeService.Reserve, asyncio.Event()

        async def answered_late(node: DecodeService, request: Any, context: Any) -> Any:
            granted = await reserve(node, request, context)
            await may_answer.wait()
            return granted

        monkeypatch.setattr(DecodeService, "Reserve", answered_late)
        monkeypatch.setattr(service, "ANSWER_S", 1.0)
        async with cluster(model) as fake:
            with pytest.raises(DeadlineError):
                await generate(fake, PROMPT, PARAMS, timeout_s=2.0)
            assert fake.nodes[1].used_slots == 1
            may_answer.set()
            await fake.idle()

    async def test_cancelled_at_every_step(self, model: str) -> None:
        async with cluster(model, slots=2) as fake:
            generator = fake.router.requests
            for turns in range(60):
                request = Request(prompt=PROMPT, params=SamplingParams(max_tokens=4), seed=turns)
                samples = await generator.accept(request, asyncio.get_running_loop().time() + WAIT_S)
                generation = generator.start(samples)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await generation.close()
            await fake.idle()
            check((await generate(fake, PROMPT, PARAMS, seed=1))[0], PROMPT, PARAMS, 1)

    async def test_storm(self, model: str) -> None:
        """Cancels at random moments while a node restarts; the cluster must hold nothing and still answer right."""
        async with (
            # A loaded machine loses no node but those that die.
            cluster(model, prefills=2, decodes=2, slots=3, heartbeat_timeout_ms=30_000) as fake,
            fake.stub() as stub,
        ):
            rng = random.Random(7)

            async def visitor(number: int) -> None:
                reader = Reader(
                    stub, (number % 200, 1), SamplingParams(max_tokens=rng.randint(1, 60), n=rng.randint(1, 3))
                )
                await asyncio.sleep(rng.random() * 0.3)
                reader.call.cancel()

            async def customer(number: int) -> None:
                params = SamplingParams(max_tokens=rng.randint(1, 40), logprobs=True)
                check((await generate(fake, (number, 2), params, seed=number))[0], (number, 2), params, number)

            work = [visitor(i) for i in range(60)] + [customer(i) for i in range(20)]
            rng.shuffle(work)
            running = asyncio.gather(*work)
            await asyncio.sleep(0.05)
            await fake.nodes[2].kill()
            await fake.add_decode("d1", slots=3)
            await asyncio.sleep(0.05)
            await fake.nodes[0].kill()
            await fake.add_prefill("p1")
            await running


class TestDrain:
    async def test_running_requests_end_and_new_ones_are_refused(self, model: str) -> None:
        async with cluster(model) as fake:
            fake.nodes[1].engine.step_ms = 5
            run = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=1))
            await fake.until(lambda: fake.nodes[1].used_slots == 1)
            drain = asyncio.ensure_future(fake.router.drain())
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="shutting down"):
                await generate(fake, PROMPT, PARAMS)
            check((await run)[0], PROMPT, PARAMS, 1)
            await drain

    async def test_what_takes_too_long_is_cancelled_and_given_back(self, model: str) -> None:
        async with cluster(model, drain_grace_s=0.05) as fake:
            run = asyncio.ensure_future(generate(fake, PROMPT, SamplingParams(max_tokens=500)))
            await fake.until(lambda: fake.nodes[1].used_slots == 1)
            await fake.router.drain()
            await fake.router.stop()
            with pytest.raises(CorunError):
                await run
            assert fake.nodes[1].used_slots == 0
            assert fake.kv.held == {}
