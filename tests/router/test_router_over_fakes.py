"""The real router over real node services and fake engines: whole requests, faults, cancellation, bounds.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from corun.params import SamplingParams
from corun.receipt import output_digest, prompt_digest, tokens_digest
from corun.rpc import codec
from corun.seeds import derive_seed, sample_seed
from corun.testing.cluster import WAIT_S
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE, expected
from corun.types import FinishReason, ModelStatus, NodeState, ResumePoint
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import types_pb2
from decode_node.service import DecodeService
from router import sample, service
from router.attempt import Attempt
from router.request import Request
from router.text import VERSION, Tokenizer
from tests.clusters import FakeCluster, Output, cluster, generate, retries, send
from tests.fuzz import http2

PARAMS = SamplingParams(max_tokens=12, logprobs=True)
LONG = SamplingParams(max_tokens=60, logprobs=True)
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


def check_all(outputs: list[Output], prompt: tuple[int, ...] = PROMPT, seed: int = 9) -> None:
    """The samples of a request, each with its own seed."""
    for index, output in enumerate(outputs):
        check(output, prompt, PARAMS, sample_seed(seed, index))
        assert output.receipt.sample_index == index


def started(fake: FakeCluster, prompt: Any = PROMPT, params: SamplingParams = PARAMS, seed: int = 9) -> Any:
    return asyncio.ensure_future(generate(fake, prompt, params, seed=seed))


def tokenizer_of(fake: FakeCluster) -> Tokenizer:
    assert fake.router.registry.model is not None
    return fake.router.registry.model.tokenizer


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

        async def lose(attempt: Attempt[Any]) -> None:
            lost.append(attempt.placement.decode.node_id)
            await fake.kill(lost[-1])

        async def reserve(attempt: Attempt[Any]) -> None:
            if len(lost) == 1:
                await lose(attempt)
            await real_reserve(attempt)

        async def start(attempt: Attempt[Any], handle: Any) -> None:
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

    async def test_stop_tokens_and_stop_strings_end_the_slot(self, model: str) -> None:
        async with cluster(model) as fake:
            decode = tokenizer_of(fake).decode
            # Parameters are part of what the fake model hashes, so seeds are searched whose output stops.
            by_token = SamplingParams(max_tokens=200, stop_token_ids=[7], logprobs=True)
            seed = next(s for s in range(200) if 7 in expected(PROMPT, by_token, s)[0][2:])
            (output,) = await generate(fake, PROMPT, by_token, seed=seed)
            check(output, PROMPT, by_token, seed)
            assert (output.token_ids[-1], output.receipt.finish_reason) == (7, FinishReason.STOP)
            assert output.text == decode(output.token_ids[:-1])
            by_text = SamplingParams(max_tokens=200, stop=["a", "e"], logprobs=True)
            for seed in range(200):
                ids, _, _ = expected(PROMPT, by_text, seed)
                text = decode(ids)
                if (cut := min((text.find(s) for s in "ae" if s in text), default=-1)) > 3:
                    break
            (output,) = await generate(fake, PROMPT, by_text, seed=seed)
            assert (output.text, output.receipt.finish_reason) == (text[:cut], FinishReason.STOP)
            assert output.token_ids == ids[: len(output.token_ids)]
            assert set(decode(output.token_ids)) & set("ae")
            assert not set(decode(output.token_ids[:-1])) & set("ae")
            assert output.receipt.num_output_tokens == len(output.token_ids)

    async def test_many_prompts_share_few_slots(self, model: str) -> None:
        async with cluster(model, decodes=2, prefills=2, slots=4) as fake:
            prompts = [tuple(range(i, i + 3 + i % 7)) for i in range(40)]
            params = [SamplingParams(max_tokens=1 + i % 9, temperature=i % 2, logprobs=True) for i in range(40)]
            runs = [generate(fake, p, params[i], seed=i) for i, p in enumerate(prompts)]
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                check(output, prompts[i], params[i], i)
            assert all(0 < node.engine.most_running <= 4 for node in fake.nodes if node.info.slots)


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
        self, model: str, prefills: int, decodes: int, node_wait_s: float, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "ANSWER_S", 1.0)
        async with cluster(model, prefills=prefills, decodes=decodes, node_wait_s=node_wait_s) as fake:
            await fake.until(lambda: len(fake.router.registry.statuses()) == prefills + decodes)
            with pytest.raises(UnavailableError, match=missing):
                await generate(fake, PROMPT, timeout_s=2.0)

    async def test_requests_wait_for_nodes(self, model: str) -> None:
        async with cluster(model, prefills=0, decodes=0) as fake:
            run = started(fake)
            await asyncio.sleep(0.05)
            await fake.add_decode()
            await asyncio.sleep(0.05)
            await fake.add_prefill()
            check((await run)[0], PROMPT, PARAMS, 9)


class TestNodes:
    @pytest.mark.parametrize(
        ("contract", "detail"),
        [
            ({"tokenizer_digest": "0" * 64}, "is not the one of the contract"),
            ({"tokenizers": "0.1.2"}, "install tokenizers==0.1.2 for the router"),
            ({"tokenizers": "0.1.2"}, f"model.tokenizers: 0.1.2 != {VERSION}"),
        ],
    )
    async def test_a_tokenizer_that_may_give_other_tokens_is_not_used(
        self, model: str, contract: dict[str, str], detail: str
    ) -> None:
        """Two routers could turn one text into other tokens, and a resumed stream would end in data loss."""
        async with cluster(model, prefills=0, decodes=0) as fake:
            await fake.add_decode(**contract)
            await fake.until(lambda: detail in fake.detail("d1"))
            assert fake.state("d1") is NodeState.JOINING

    async def test_another_contract_or_an_old_generation_is_refused(self, model: str) -> None:
        async with cluster(model) as fake:
            other = await fake.add_decode("d2", join=False, threads=2)
            with pytest.raises(ContractMismatchError) as caught:
                fake.router.registry.register(other.info)
            assert caught.value.differences == {"model.threads": ("1", "2")}
            assert fake.state("d2") is NodeState.REFUSED
            assert "model.threads: 1 != 2" in fake.detail("d2")
            old, new = fake.nodes[1], await fake.restart("d1")
            (output,) = await generate(fake, PROMPT, PARAMS, seed=2)
            assert output.receipt.decode_node == new.info.ref
            with pytest.raises(CorunError, match="is generation"):
                fake.router.registry.register(old.info)

    async def test_a_draining_node_gets_no_new_work(self, model: str) -> None:
        async with cluster(model, decodes=2) as fake:
            _, d1, d2 = fake.nodes
            d1.engine.step_ms = 10
            running = started(fake)
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
                runs.append(started(fake, (i,)))
                await fake.until(lambda i=i: fake.router.queue.waiting == i + 1)  # type: ignore[misc]
            await asyncio.sleep(0.12)
            assert fake.nodes[0].engine.prefilled == []
            for lease in leases:
                table.release(lease.lease_id)
            await asyncio.gather(*runs)
            assert fake.nodes[0].engine.prefilled[2] == (2,)  # The first two are admitted together.


def drawn(fake: FakeCluster) -> bool:
    return any(node.drawn_tokens > 20 for node in fake.nodes if node.info.slots)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to the first prefill or decode node, `victim`, while two samples run, and what comes of it."""

    victim: str
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """What its engine is told before."""
    at: Callable[[FakeCluster], bool] | None = None
    """When it is killed; None if it is not."""
    restarts: bool = False
    retries: str = "lost"
    error: type[CorunError] | None = None
    says: str = ""


TWO = {"prefills": 2, "decodes": 2}
FAULTS = {
    "decode dies": Fault(victim="d1", settings=TWO, at=drawn),
    "only decode restarts": Fault(victim="d1", at=drawn, restarts=True),
    "only prefill restarts": Fault(
        victim="p1", engine={"hanging": True}, at=lambda fake: fake.node("p1").queued_tokens > 0, restarts=True
    ),
    "prefill fails": Fault(victim="p1", engine={"errors": [RuntimeError("secret")]}, retries="fault"),
    "decode fails": Fault(victim="d1", engine={"fail_after": 5}, retries="fault"),
    "prefill hangs": Fault(
        victim="p1", settings=TWO | {"prefill_timeout_s": 1.0}, engine={"hanging": True}, retries="fault"
    ),
    "decode hangs": Fault(
        victim="d1", settings=TWO | {"step_timeout_s": 1.0}, engine={"hanging": True}, retries="fault"
    ),
    "prefill fails again and again": Fault(
        victim="p1",
        engine={"errors": [RuntimeError("secret")] * 3},
        retries="fault",
        error=UnavailableError,
        says="failed 3 runs",
    ),
    "decode stays away": Fault(
        victim="d1", settings={"node_wait_s": 0.2}, at=drawn, error=UnavailableError, says="no decode node is in use"
    ),
    "the other decode lies": Fault(
        victim="d1", settings={"decodes": 2}, at=drawn, error=DataLossError, says="differs at token 0"
    ),
}


class TestFaults:
    @pytest.mark.parametrize("name", FAULTS)
    async def test_a_fault_changes_no_bit_or_ends_the_request_with_its_name(self, model: str, name: str) -> None:
        fault = FAULTS[name]
        async with cluster(model, **fault.settings) as fake:
            victim = fake.node(fault.victim)
            for what, value in fault.engine.items():
                setattr(victim.engine, what, value)
            runs = [started(fake, (i, 1), LONG, i) for i in range(1 if fault.error else 2)]
            if fault.at is not None:
                await fake.until(lambda: fault.at(fake))  # type: ignore[misc]
                if fault.error is DataLossError:
                    fake.node("d2").engine.corrupt = True
                await victim.kill()
            if fault.restarts:
                await fake.restart(fault.victim)
            if fault.error:
                with pytest.raises(fault.error, match=fault.says) as caught:
                    await asyncio.gather(*runs)
                assert "secret" not in str(caught.value)
            else:
                for i, (output,) in enumerate(await asyncio.gather(*runs)):
                    check(output, (i, 1), LONG, i)
                    used = output.receipt.prefill_node, output.receipt.decode_node
                    assert victim.is_member or victim.info.ref not in used
            assert set(retries(fake)) == {fault.retries}

    async def test_a_node_that_was_given_up_but_lives_comes_back(self, model: str) -> None:
        async with cluster(model) as fake:
            member = fake.router.registry._decodes["d1"]
            running = started(fake, params=LONG)
            await fake.until(lambda: drawn(fake))
            fake.router.registry.lose(member, "a test gave it up")
            check((await running)[0], PROMPT, LONG, 9)
            await fake.until(lambda: fake.router.registry._decodes["d1"] is not member)

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
            outputs: Any = await asyncio.gather(good, bad, return_exceptions=True)
            assert isinstance(outputs[1], InternalError)
            assert "secret" not in str(outputs[1])
            check(outputs[0][0], (1,), PARAMS, 1)


class TestCancellation:
    @pytest.mark.parametrize("way", ["call", "connection", "deadline"])
    @pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
    async def test_what_a_client_leaves_is_given_back(
        self, model: str, stage: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "ANSWER_S", 1.0)
        async with cluster(model, slots=1) as fake:
            p1, d1 = fake.nodes
            d1.engine.step_ms = 20
            d1.engine.hanging, p1.engine.hanging = stage == "waiting", stage == "prefilling"
            first = started(fake, (1,)) if stage == "waiting" else None
            await fake.until(lambda: d1.used_slots == (stage == "waiting"))
            reached = {
                "waiting": lambda: fake.router.queue.waiting == 1,
                "prefilling": lambda: p1.queued_tokens > 0,
                "decoding": lambda: d1.drawn_tokens > 3,
            }[stage]
            request = codec.generate_request(PROMPT, SamplingParams(max_tokens=400), seed=1)
            if way == "connection":
                data = http2.call(1, b"/corun.v1.ClusterService/Generate", request.SerializeToString())
                link = await http2.Connection.open(fake.address, http2.hello() + data)
                await fake.until(reached)
                link.close()
            else:
                async with fake.stub() as stub:
                    call = stub.Generate(request, timeout=2.0 if way == "deadline" else WAIT_S)
                    reading = asyncio.ensure_future(drained(call))
                    await fake.until(reached)
                    if way == "call":
                        call.cancel()
                        await asyncio.wait((reading,))
                    elif stage == "waiting":
                        assert "no slot became free" in await reading
                    else:
                        assert "the deadline passed in an attempt of sample 0" in await reading
            await fake.until(lambda: not (fake.router.queue.waiting or p1.queued_tokens))  # The work has ended, too.
            d1.engine.hanging = p1.engine.hanging = False
            if first is not None:
                check((await first)[0], (1,), PARAMS, 9)
            check((await generate(fake, (9,), PARAMS, seed=2))[0], (9,), PARAMS, 2)
            assert d1.drawn_tokens < 400
            assert (PROMPT in p1.engine.prefilled) == (stage == "decoding")

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
            requests = fake.router.requests
            for turns in range(60):
                request = Request(prompt=PROMPT, params=SamplingParams(max_tokens=4), seed=turns)
                running = requests.start(await requests.accept(request, asyncio.get_running_loop().time() + WAIT_S))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await running.close()
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
                params = SamplingParams(max_tokens=rng.randint(1, 60), n=rng.randint(1, 3))
                call = stub.Generate(codec.generate_request((number % 200, 1), params, seed=1), timeout=WAIT_S)
                await asyncio.sleep(rng.random() * 0.3)
                call.cancel()

            async def customer(number: int) -> None:
                params = SamplingParams(max_tokens=rng.randint(1, 40), logprobs=True)
                check((await generate(fake, (number, 2), params, seed=number))[0], (number, 2), params, number)

            work = [visitor(i) for i in range(60)] + [customer(i) for i in range(20)]
            rng.shuffle(work)
            running = asyncio.gather(*work)
            for node_id in ("d1", "p1"):
                await asyncio.sleep(0.05)
                await fake.restart(node_id)
            await running


async def drained(call: Any) -> str:
    """Read a call to its end; return what its error says."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return ""


class TestDrain:
    async def test_running_requests_end_and_new_ones_are_refused(self, model: str) -> None:
        async with cluster(model) as fake:
            fake.nodes[1].engine.step_ms = 5
            run = started(fake)
            await fake.until(lambda: fake.nodes[1].used_slots == 1)
            drain = asyncio.ensure_future(fake.router.drain())
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="shutting down"):
                await generate(fake, PROMPT, PARAMS)
            check((await run)[0], PROMPT, PARAMS, 9)
            await drain

    async def test_what_takes_too_long_is_cancelled_and_given_back(self, model: str) -> None:
        async with cluster(model, drain_grace_s=0.05) as fake:
            run = started(fake, params=SamplingParams(max_tokens=500))
            await fake.until(lambda: fake.nodes[1].used_slots == 1)
            await fake.router.drain()
            await fake.router.stop()
            with pytest.raises(CorunError):
                await run
            assert fake.nodes[1].used_slots == 0
            assert fake.kv.held == {}
