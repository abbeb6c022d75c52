"""The real router over real node services and fake engines: whole requests, and what is refused.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InternalError, InvalidArgumentError, UnavailableError
from corun.params import SamplingParams, derive_seed, sample_seed
from corun.rpc import codec
from corun.testing.cluster import WAIT_S
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE
from corun.types import FinishReason, ModelStatus, ResumePoint
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import types_pb2
from router.attempt import Attempt, receipt_of
from router.clock import loop_time
from router.output import Output
from router.request import Request
from tests.clusters import cluster, generate, retries, send, short_calls
from tests.router.asking import PARAMS, PROMPT, check, check_all, started, tokenizer_of


class TestRequests:
    async def test_a_request_streams_its_tokens_and_a_receipt(self, model: str) -> None:
        async with cluster(model) as fake:
            p1, d1 = fake.nodes
            d1.engine.step_ms = 5  # So that steps do not merge on their way.
            (output,) = await generate(fake, PROMPT, PARAMS, seed=42, request_id="r1")
            check(output, PROMPT, PARAMS, 42)
            assert output.messages > 2
            assert output.receipt.request_id == "r1"
            assert (output.receipt.prefill_node, output.receipt.decode_node) == (p1.info.ref, d1.info.ref)
            status = await fake.status()
            assert output.receipt.fingerprint == status.fingerprint != ""
            assert status.finished_samples == 1
            most_bytes = MAX_MODEL_LEN * tokenizer_of(fake).max_token_bytes
            named = ModelStatus(name=Path(model).name, max_model_len=MAX_MODEL_LEN, max_prompt_bytes=most_bytes)
            assert status.model == named
            (output,) = await generate(fake, "Once upon a tïme", PARAMS, seed=1)
            check(output, tokenizer_of(fake).encode("Once upon a tïme"), PARAMS, 1)
            assert output.text == tokenizer_of(fake).decode(output.token_ids)
            async with fake.stub() as stub:
                call = stub.Generate(codec.generate_request("Once upon", PARAMS), timeout=WAIT_S)
                messages = [message async for message in call]
            told = [(len(message.prompt_token_ids), message.fingerprint) for message in messages]
            assert told == [(9, status.fingerprint)] + [(0, "")] * (len(told) - 1), "only the first one says it"
            without = SamplingParams(max_tokens=4)
            check((await generate(fake, PROMPT, without, seed=3))[0], PROMPT, without, 3)

    async def test_parameters_are_summed_up_once_for_all_samples(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the longest lists that takes a millisecond, and dozens of samples end in one step."""
        digest, made = SamplingParams.digest, list[SamplingParams]()
        async with cluster(model) as fake:
            monkeypatch.setattr(SamplingParams, "digest", lambda params: made.append(params) or digest(params))
            request = Request(prompt=PROMPT, params=replace(PARAMS, n=4))
            samples = await fake.router.requests.accept(request, loop_time() + WAIT_S)
            placement = fake.router.registry.place(samples[0].need)
            receipts = [receipt_of(each, "", Output(), placement, FinishReason.STOP) for each in samples]
            placement.close()
            assert len(made) == 1
            assert [receipt.params_digest for receipt in receipts] == [digest(PARAMS)] * 4

    async def test_seeds_follow_from_the_request_and_the_sample(self, model: str) -> None:
        async with cluster(model) as fake:
            (one,) = await generate(fake, PROMPT, PARAMS, request_id="a")
            (two,) = await generate(fake, PROMPT, PARAMS, request_id="a")
            (other,) = await generate(fake, PROMPT, PARAMS)
            assert one.seed == two.seed == derive_seed(bytes(32), "a") != other.seed
            assert one.token_ids == two.token_ids
            assert len(other.receipt.request_id) == 32
            outputs = await generate(fake, PROMPT, replace(PARAMS, n=4), seed=9)
            check_all(outputs)
            assert len({output.seed for output in outputs}) == 4

    @pytest.mark.parametrize(("nodes", "n", "broken"), [(1, 4, False), (2, 8, False), (2, 6, True)])
    async def test_samples_of_one_prompt_share_its_prefill(self, model: str, nodes: int, n: int, broken: bool) -> None:
        """Whichever prefill node has it, more samples than a router has prompts at one of them. One that fails is
        computed once more, and not for each sample."""
        async with cluster(model, prefills=nodes, decodes=nodes) as fake:
            prefills, decodes = fake.nodes[:nodes], fake.nodes[nodes:]
            prefills[0].engine.errors = [InternalError("broken")] * broken
            async with prefills[-1].engine.turn:
                async with prefills[0].engine.turn if nodes > 1 else asyncio.Lock():
                    run = started(fake, params=replace(PARAMS, n=n))
                    await fake.until(lambda: prefills[0].service.queued_prompts == n)
                if broken:
                    await fake.until(lambda: prefills[1].service.queued_prompts == n)
            outputs = await run
            check_all(outputs)
            computed = [node.engine.prefilled for node in prefills]
            assert computed == ([[], [PROMPT]] if broken else [[PROMPT], []][:nodes])
            assert {output.receipt.decode_node for output in outputs} == {node.info.ref for node in decodes}
            assert sum(node.engine.most_running for node in decodes) == n

    async def test_kept_kv_is_given_back_after_an_attempt_without_any(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first attempt loses its decode node after prefill, the second one before."""
        real_reserve, real_start = Attempt.reserve, Attempt.start
        lost: list[str] = []

        async def lose(attempt: Attempt) -> None:
            lost.append(attempt.placement.decode.node_id)
            await fake.kill(lost[-1])

        async def reserve(attempt: Attempt) -> None:
            if len(lost) == 1:
                await lose(attempt)
            await real_reserve(attempt)

        async def start(attempt: Attempt, handle: Any) -> None:
            if not lost:
                await lose(attempt)
            await real_start(attempt, handle)

        monkeypatch.setattr(Attempt, "reserve", reserve)
        monkeypatch.setattr(Attempt, "start", start)
        async with cluster(model, decodes=3) as fake:
            check_all(await started(fake))
            assert len(lost) == 2
            await asyncio.wait_for(fake.until(lambda: not fake.held()), 15)  # By itself it ends after 30 s.

    async def test_samples_that_have_to_wait_for_slots_share_it_too(self, model: str) -> None:
        async with cluster(model, slots=2) as fake:
            samples = await asyncio.gather(*(generate(fake, (i,), replace(PARAMS, n=5), seed=i) for i in range(3)))
            for i, outputs in enumerate(samples):
                check_all(outputs, (i,), i)
            assert sorted(fake.nodes[0].engine.prefilled) == [(0,), (1,), (2,)]

    async def test_routers_that_share_nothing_spread_equal_prompts(self, model: str) -> None:
        async with cluster(model, prefills=2, share_kv=False) as fake:
            for node in fake.nodes[:2]:
                node.engine.delay_s = 0.02
            await generate(fake, PROMPT, replace(PARAMS, n=8), seed=9)
            assert [len(node.engine.prefilled) for node in fake.nodes[:2]] == [4, 4]

    async def test_a_sample_that_is_resumed_shares_nothing(self, model: str) -> None:
        """Its tokens are compared with those that its client has."""
        async with cluster(model) as fake:
            point = ResumePoint(
                sample_index=0, seed=sample_seed(5, 0), num_tokens=3, output_digest="0" * 64, text_bytes=0
            )
            request = Request(prompt=PROMPT, params=replace(PARAMS, n=2), request_id="r", seed=5, resume=(point,))
            samples = await fake.router.requests.accept(request, asyncio.get_running_loop().time() + WAIT_S)
            assert [bool(sample.need.kv_key) for sample in samples] == [False, True]


def asked(*ids: int, seed: int | None = None, request_id: str = "", **params: Any) -> pb.GenerateRequest:
    """A request whose parameters nobody has checked."""
    sampling = types_pb2.SamplingParams(**params)
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), request_id=request_id, seed=seed, sampling_params=sampling
    )


BAD_REQUESTS = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(text=""), "prompt"),
    (asked(), "prompt"),
    (asked(1, 2, VOCAB_SIZE), "prompt.token_ids[2]"),
    (asked(*[1] * MAX_MODEL_LEN), "prompt.token_ids"),
    (asked(1, max_tokens=MAX_MODEL_LEN), "sampling_params.max_tokens"),
    (asked(1, temperature=float("nan")), "sampling_params.temperature"),
    (asked(1, stop_token_ids=[VOCAB_SIZE]), "sampling_params.stop_token_ids[0]"),
    (asked(1, logit_bias={VOCAB_SIZE: 1.0}), "sampling_params.logit_bias"),
    (asked(1, n=1000), "sampling_params.n"),
    (asked(1, seed=2**63), "seed"),
    (asked(1, request_id="x" * 129), "request_id"),
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

    async def test_a_constraint_that_nodes_would_not_see_is_refused(self, model: str) -> None:
        """The contract of older nodes does not have what follows constraints. Their outputs would be free."""
        async with cluster(model) as fake:
            with pytest.raises(InvalidArgumentError, match="by their contract"):
                await generate(fake, PROMPT, SamplingParams(structured_outputs={"regex": "a"}))
            assert fake.nodes[0].engine.prefilled == []

    async def test_a_request_that_no_node_has_kv_for_is_refused(self, model: str) -> None:
        async with cluster(model, decodes=0) as fake:
            await fake.add_decode(kv_blocks=2)
            await fake.ready("d1")
            with pytest.raises(InvalidArgumentError, match="room in the KV"):
                await generate(fake, PROMPT, SamplingParams(max_tokens=32))
            await generate(fake, PROMPT, SamplingParams(max_tokens=29))

    @pytest.mark.parametrize(
        ("prefills", "decodes", "node_wait_s", "missing"),
        [
            (0, 1, 0.1, "no prefill node has joined"),
            (1, 0, 0.1, "no decode node has joined"),
            (0, 0, 600.0, "no prefill node has joined; no decode node has joined"),  # In time for the deadline.
        ],
    )
    async def test_missing_nodes_are_named(
        self, model: str, prefills: int, decodes: int, node_wait_s: float, missing: str
    ) -> None:
        async with cluster(model, prefills=prefills, decodes=decodes, node_wait_s=node_wait_s) as fake:
            await fake.until(lambda: len(fake.router.registry.statuses()) == prefills + decodes)
            with short_calls(), pytest.raises(UnavailableError, match=missing):
                await generate(fake, PROMPT)

    async def test_requests_wait_for_nodes(self, model: str) -> None:
        async with cluster(model, prefills=0, decodes=0) as fake:
            run = started(fake)
            await asyncio.sleep(0.05)
            await fake.add_decode()
            await asyncio.sleep(0.05)
            await fake.add_prefill()
            check((await run)[0], PROMPT, PARAMS, 9)
