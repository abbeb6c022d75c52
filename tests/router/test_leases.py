"""What holds room on a node, and for how long: the line for slots, slow prompts, lost routers and nodes, retries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from corun import AsyncClient, Condition, VerifyCase
from corun.errors import CorunError, InternalError, OverloadedError, UnavailableError
from corun.node.membership import NodeAgent
from corun.receipt import prompt_digest
from corun.rpc import codec
from corun.testing.cluster import WAIT_S, router_config
from corun.testing.nodes import LocalNode
from corun.types import NodeState, Priority
from corun.v1 import decode_service_pb2 as pb
from decode_node.service import DecodeService
from router import attempt
from router.nodes import node_client
from router.nodes.node import DecodeNode, PrefillPlacement
from router.output import SampleOutput
from router.placement import ENDING
from router.queue import QueueEntry
from tests.clusters import FakeCluster, Output, cluster, generate, retries, send
from tests.router.asking import LONG, PARAMS, PROMPT, check, right, started

PATIENT: dict[str, Any] = {"heartbeat_timeout_ms": 20_000}
"""Nobody is to be lost because the machine is busy."""


def member_of(fake: FakeCluster, node: LocalNode) -> DecodeNode:
    return fake.router.registry._decodes[node.info.ref.node_id]


async def hold(fake: FakeCluster, node: LocalNode) -> asyncio.Future[list[Output]]:
    """Fills both slots of a node whose engine does nothing."""
    node.engine.hanging = True
    run = started(fake, PROMPT, replace(PARAMS, n=2), seed=1)
    await fake.until(lambda: len(node.service._running) == 2)
    return run


class TestTheLine:
    async def fill(self, fake: FakeCluster) -> list[asyncio.Future[list[Output]]]:
        """Start a sample for each of the four slots and one for the place in line, and return when all have started."""
        runs = [started(fake, (i, 1), LONG, seed=i) for i in range(5)]
        await fake.until(lambda: len(fake.nodes[1].service._running) == 5)
        return runs

    async def test_a_sample_in_line_is_computed_and_waits_for_a_slot(self, model: str) -> None:
        """Its KV is there before a slot is free; a sixth sample waits in the router. Each slot is taken at once."""
        async with cluster(model, slots=4, **PATIENT) as fake:
            prefill, decode = fake.nodes
            decode.engine.step_ms = 5
            runs = [*await self.fill(fake), started(fake, (5, 1), LONG, seed=5)]
            await fake.until(lambda: fake.router.queue.waiting == 1)
            assert len(prefill.engine.prefilled) == 5
            load = await decode.service.load()
            assert (load.leases, load.used_slots <= 4) == (5, True)
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                assert right(output, (i, 1), LONG, i)
            assert decode.engine.most_running == 4

    @pytest.mark.parametrize("max_tokens", [1, ENDING, ENDING + 8])
    async def test_a_sample_that_ends_soon_counts_once_as_good_as_gone(
        self, model: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From its first token on, if it has few in all; and not any more when it has left."""
        async with cluster(model, slots=4, **PATIENT) as fake:
            _, decode = fake.nodes
            room, rows = member_of(fake, decode).room, list[tuple[int, int]]()
            take = SampleOutput.take

            def watched(output: SampleOutput, *row: Any) -> bool:
                rows.append((output.position + 1, room.soon_free))
                return take(output, *row)

            monkeypatch.setattr(SampleOutput, "take", watched)
            params = replace(PARAMS, max_tokens=max_tokens)
            (found,) = await generate(fake, PROMPT, params, seed=1)
            assert right(found, PROMPT, params, 1)
            assert rows == [(n, 4 if n >= max(1, max_tokens - ENDING) else 3) for n in range(1, max_tokens + 1)]
            await fake.until(lambda: room.free_slots == 4)
            assert room.soon_free == 4

    @pytest.mark.usefixtures("fast_clock")
    @pytest.mark.parametrize("excused", [True, False])
    async def test_to_wait_in_line_is_no_silence(
        self, model: str, excused: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The samples in the slots take twice the time in which each sample must have a token."""
        if not excused:
            monkeypatch.setattr(DecodeNode, "is_full", False)
        async with cluster(model, slots=4, step_timeout_s=0.4, max_attempts=20, **PATIENT) as fake:
            fake.nodes[1].engine.step_ms = 15
            for i, (output,) in enumerate(await asyncio.gather(*await self.fill(fake))):
                assert right(output, (i, 1), LONG, i)
            retries = fake.router.context.metrics.sample_retries.labels("fault").value
            assert (retries == 0) == excused

    async def test_one_of_high_priority_has_at_most_the_line_ahead(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Forty samples wait in the router, and two in line: only these two get a slot before it."""
        placed: list[QueueEntry] = []
        async with cluster(model, slots=8, **PATIENT) as fake:
            engine, queue = fake.nodes[1].engine, fake.router.queue
            engine.hanging = True
            runs = [started(fake, (i, 2), PARAMS, seed=i) for i in range(50)]
            await fake.until(lambda: (len(engine._running), queue.waiting) == (10, 40))
            real = queue._grant

            def grant(entry: QueueEntry, placement: PrefillPlacement) -> None:
                placed.append(entry)
                real(entry, placement)

            monkeypatch.setattr(queue, "_grant", grant)
            request = codec.generate_request((99, 2), PARAMS, seed=99, priority=Priority.HIGH)
            high = asyncio.ensure_future(send(fake, request))
            await fake.until(lambda: queue.waiting == 41)
            engine.hanging = False
            await asyncio.gather(high, *runs)
            assert [entry.priority for entry in placed] == [Priority.HIGH] + [Priority.NORMAL] * 40


class TestTheSource:
    """The prefill node of a sample is needed until the KV has been read, and no longer."""

    async def leave(self, fake: FakeCluster, node: LocalNode, *, planned: bool) -> None:
        """End a prefill node, and let the router know."""
        member = fake.router.registry._prefills[node.info.ref.node_id]
        if planned:
            node.stop.set()
            await fake.until(lambda: member.is_leaving)
        await node.kill()
        fake.router.registry.lose(member, "a test ended it")

    @pytest.mark.parametrize("planned", [True, False])
    async def test_a_sample_in_line_whose_kv_was_read_goes_on_without_it(
        self, model: str, planned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = 0

        def is_full(node: DecodeNode) -> bool:
            nonlocal looks
            looks += 1
            return True

        monkeypatch.setattr(attempt, "LOOK_S", 0.01)
        monkeypatch.setattr(DecodeNode, "is_full", property(is_full))
        async with cluster(model, slots=4, max_attempts=1, **PATIENT) as fake:
            prefill, decode = fake.nodes
            runs = [started(fake, (i, 1), LONG, seed=i) for i in range(5)]
            leases = member_of(fake, decode).client._leases  # The router must have heard of the reads, too.
            await fake.until(lambda: [lease.has_kv for lease in leases.values()] == [True] * 5 and not fake.kv.held)
            decode.engine.hanging = True
            await self.leave(fake, prefill, planned=planned)
            seen = looks
            await fake.until(lambda: looks > seen + 10)
            decode.engine.hanging = False
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                check(output, (i, 1), LONG, i)
            assert (retries(fake), fake.kv.held) == ({}, {})

    @pytest.mark.parametrize("planned", [True, False])
    async def test_if_the_kv_was_not_read_the_sample_runs_again_and_a_planned_end_costs_no_run(
        self, model: str, planned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempt, "LOOK_S", 0.01)
        async with cluster(model, prefills=2, max_attempts=1, **PATIENT) as fake:
            decode = fake.node("d1")
            decode.engine.reads_hang = True
            run = started(fake)
            await fake.until(lambda: decode.service._running)
            (source,) = [node for node in fake.nodes[:2] if node.engine.prefilled]
            await self.leave(fake, source, planned=planned)
            if planned:
                await fake.until(lambda: all(node.engine.prefilled for node in fake.nodes[:2]))
                decode.engine.reads_hang = False
                check((await run)[0], PROMPT, PARAMS, 9)
            else:
                with pytest.raises(UnavailableError, match="may be poison"):
                    await run
            assert retries(fake) == {"lost": 1}

    async def test_a_decode_node_that_is_told_to_end_costs_no_run_either(self, model: str) -> None:
        """It gives up what still runs after its grace, with an error of its own."""
        async with cluster(model, decodes=0, max_attempts=1, **PATIENT) as fake:
            for node_id in ("d1", "d2"):
                await fake.add_decode(node_id, drain_grace_s=0.0)
                await fake.ready(node_id)
                if node_id == "d1":
                    fake.node("d1").engine.step_ms = 20
                    run = started(fake, params=LONG)
                    await fake.until(lambda: fake.node("d1").drawn_tokens > 3)
            fake.node("d1").stop.set()
            check((await run)[0], PROMPT, LONG, 9)
            await fake.node("d1").end()

    @pytest.mark.parametrize("name", ["p1", "d1"])
    async def test_a_node_that_refuses_because_it_drains_costs_no_run_though_no_heartbeat_said_so(
        self, model: str, name: str
    ) -> None:
        async with cluster(model, prefills=2, decodes=2, max_attempts=1, **PATIENT) as fake:
            fake.node(name).service.draining = True
            check((await generate(fake, PROMPT, PARAMS, seed=9))[0], PROMPT, PARAMS, 9)
            assert retries(fake) == {"lost": 1}

    @pytest.mark.usefixtures("fast_clock")
    async def test_a_read_that_hangs_ends_the_attempt_though_no_slot_is_free(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DecodeNode, "is_full", True)
        async with cluster(model, decodes=2, step_timeout_s=0.3, **PATIENT) as fake:
            fake.node("d1").engine.reads_hang = True
            check((await generate(fake, PROMPT, PARAMS, seed=9))[0], PROMPT, PARAMS, 9)
            assert retries(fake) == {"fault": 1}


async def test_samples_of_a_prompt_share_its_blocks_but_not_those_whose_kv_is_doubted(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is the prompt's and the client's. A run again after an error before its first token has none, and so have
    cases of a verification."""
    keys: list[str] = []
    real = DecodeService.Reserve

    async def reserve(node: DecodeService, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        keys.append(request.share_key)
        return await real(node, request, context)

    monkeypatch.setattr(DecodeService, "Reserve", reserve)
    async with cluster(model, **PATIENT) as fake:
        await generate(fake, PROMPT, replace(PARAMS, n=3), seed=1)
        assert len(set(keys)) == 1
        assert keys[0].startswith(prompt_digest(PROMPT))
        fake.nodes[1].engine.fail_after = 0
        await generate(fake, PROMPT, PARAMS, seed=2)
        assert keys[3:] == [keys[0], ""]
        await generate(fake, (1, 2), PARAMS, seed=3)
        assert keys[5] not in (keys[0], "")
        async with AsyncClient(fake.address) as client:
            case = VerifyCase(prompt_token_ids=PROMPT, sampling_params=PARAMS, seed=2)
            assert [result.match async for result in client.verify([case], [Condition.ALONE])] == [True]
        assert keys[6:] == [""]


async def test_a_router_places_as_many_samples_of_a_prompt_as_the_node_grants(model: str) -> None:
    """A prompt of 48 tokens has two blocks that its samples share, and each sample two of its own."""
    prompt, params = tuple(range(48)), replace(PARAMS, n=5)
    async with cluster(model, decodes=0, **PATIENT) as fake:
        decode = await fake.add_decode(kv_blocks=10)
        decode.engine.hanging = True
        run = started(fake, prompt, params, seed=1)
        await fake.until(lambda: (decode.leases, fake.router.queue.waiting) == (4, 1))
        decode.engine.hanging = False
        assert all(right(output, prompt, params, output.seed) for output in await run)


class TestSlowPrompts:
    @pytest.mark.parametrize(("delay_s", "prompts"), [(0.3, 1), (0.04, 8)])
    async def test_prompts_may_take_longer_than_leases_live_without_a_stream(
        self, model: str, delay_s: float, prompts: int
    ) -> None:
        """One that is long, or a backlog of quick ones. It fails nobody, and does not grow."""
        async with cluster(model, lease_ttl_ms=100, **PATIENT) as fake:
            prefill, decode = fake.nodes
            prefill.engine.delay_s = delay_s
            runs = [generate(fake, (i, 1), PARAMS, seed=i) for i in range(prompts)]
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                assert right(output, (i, 1), PARAMS, i)
            assert (len(prefill.engine.prefilled), decode.service.metrics.expired_leases.value) == (prompts, 0)

    @pytest.mark.usefixtures("fast_clock")
    async def test_a_prompt_may_wait_for_longer_than_a_node_may_compute_nothing(self, model: str) -> None:
        """A prompt takes a third of that time, and waits for three others, as many as a router has at a node."""
        async with cluster(model, prefill_timeout_s=0.9, **PATIENT) as fake:
            prefill = fake.nodes[0]
            prefill.engine.delay_s = 0.3
            runs = [generate(fake, (i, 1), PARAMS, seed=i) for i in range(5)]
            for i, (output,) in enumerate(await asyncio.gather(*runs)):
                assert right(output, (i, 1), PARAMS, i)
            assert (len(prefill.engine.prefilled), retries(fake)) == (5, {})

    async def test_a_router_that_is_cut_off_loses_its_leases(self, model: str) -> None:
        """The control, and what is left of the time to live: its stream broke, and it does not come back."""
        async with cluster(model, slots=2, lease_ttl_ms=100, **PATIENT) as fake:
            decode = fake.nodes[1]
            run = await hold(fake, decode)
            await decode.fall_silent()
            fake.router.registry.lose(member_of(fake, decode), "a test cut it off")
            await fake.until(lambda: decode.leases == 0)
            assert decode.service.metrics.expired_leases.value == 2
            decode.engine.hanging = False
            decode.join()
            assert [right(output, PROMPT, PARAMS, output.seed) for output in await run] == [True] * 2


class TestSessions:
    async def test_a_node_that_was_lost_by_mistake_has_its_slots_when_it_is_back(self, model: str) -> None:
        """At once, and not first when the leases of the dropped session expire, or with the next heartbeat: that is a
        minute here."""
        async with cluster(model, slots=2, heartbeat_interval_ms=60_000, heartbeat_timeout_ms=120_000) as fake:
            decode = fake.nodes[1]
            run = await hold(fake, decode)
            old, leases = member_of(fake, decode), set(decode.service._table._leases)
            fake.router.registry.lose(old, "a test gave it up")
            decode.agent.tell()
            await fake.until(lambda: decode.leases == 2 and not leases & set(decode.service._table._leases))
            decode.engine.hanging = False
            assert [right(output, PROMPT, PARAMS, output.seed) for output in await run] == [True] * 2
            assert decode.service.metrics.expired_leases.value == 0
            assert member_of(fake, decode).client.session > old.client.session

    @pytest.mark.parametrize("router_id", ["router", "r" * 128])
    async def test_routers_of_one_name_take_nothing_from_each_other(self, model: str, router_id: str) -> None:
        """Two processes that somebody has given the same name by mistake, or one that was started again."""
        async with cluster(model, slots=2, router_id=router_id, **PATIENT) as fake:
            decode = fake.nodes[1]
            run = await hold(fake, decode)
            other = FakeCluster(model, router_config(router_id=router_id, **PATIENT))
            await other.add_router()
            try:
                nodes = [NodeAgent(node.info, [other.address], node.service.load) for node in fake.nodes]
                memberships = [asyncio.ensure_future(node.run()) for node in nodes]
                await other.ready("p1", "d1")
                assert decode.leases == 2
                decode.engine.hanging = False
                assert [right(output, PROMPT, PARAMS, output.seed) for output in await run] == [True] * 2
                (output,) = await generate(other, PROMPT, PARAMS, seed=3)
                assert right(output, PROMPT, PARAMS, 3)
                assert len(fake.nodes[0].engine.prefilled) == 2
                for membership in memberships:
                    membership.cancel()
                await asyncio.wait(memberships)
            finally:
                await other.close()

    @pytest.mark.parametrize("method", ["Reserve", "Release"])
    async def test_a_session_ends_if_nobody_knows_what_it_holds(
        self, model: str, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """Nothing else would free a lease while its stream stands. The node works on, with the next session."""
        monkeypatch.setattr(node_client, "CLEANUP_TIMEOUT_S", 1.0)
        unanswered = Unanswered(monkeypatch, method)
        async with cluster(model, reserve_timeout_s=1.0, **PATIENT) as fake:
            decode = fake.nodes[1]
            decode.engine.hanging = True  # The sample does not end by itself.
            session = member_of(fake, decode).client.session
            unanswered.calls = 1
            run = started(fake)
            await fake.until(lambda: decode.leases == 1)
            if method == "Release":  # Else the answer is what is missing.
                await fake.until(lambda: len(decode.service._running) == 1)
            run.cancel()
            await fake.until(lambda: member_of(fake, decode).client.session > session)
            decode.engine.hanging = False
            await fake.ready("d1")
            assert decode.leases == 0
            (output,) = await generate(fake, PROMPT, PARAMS, seed=1)
            assert right(output, PROMPT, PARAMS, 1)

    @pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL])
    async def test_a_session_ends_if_the_answer_to_a_reservation_is_lost_and_its_stream_stands(
        self, model: str, monkeypatch: pytest.MonkeyPatch, code: StatusCode
    ) -> None:
        """The call's connection broke. The stream has an older one, as after a change of the TLS files."""
        unanswered = Unanswered(monkeypatch, "Reserve", code)
        async with cluster(model, **PATIENT) as fake:
            session, unanswered.calls = member_of(fake, fake.nodes[1]).client.session, 1
            (output,) = await generate(fake, PROMPT, PARAMS, seed=1)
            assert right(output, PROMPT, PARAMS, 1)
            await fake.idle()
            assert member_of(fake, fake.nodes[1]).client.session > session
            assert retries(fake) == {"lost": 1}

    async def test_a_session_ends_if_its_node_grants_a_lease_twice(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its rows could be either sample's, so both run again. No room stays taken."""
        real, granted = DecodeService.Reserve, list[int]()

        async def reserve(node: DecodeService, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
            response = await real(node, request, context)
            granted.append(response.lease_id)
            return pb.ReserveResponse(lease_id=granted[0]) if len(granted) == 2 else response

        monkeypatch.setattr(DecodeService, "Reserve", reserve)
        async with cluster(model, slots=2, **PATIENT) as fake:
            decode = fake.nodes[1]
            session, room = member_of(fake, decode).client.session, member_of(fake, decode).room.free_slots
            outputs = await generate(fake, PROMPT, replace(PARAMS, n=2), seed=1)
            assert [right(output, PROMPT, PARAMS, output.seed) for output in outputs] == [True] * 2
            await fake.idle()
            assert member_of(fake, decode).client.session > session
            assert (decode.leases, member_of(fake, decode).room.free_slots) == (0, room)
            assert retries(fake) == {"lost": 2}

    async def test_a_refusal_ends_no_session(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The control: a node that answers with an error of its own has granted nothing."""
        errors: list[CorunError] = [UnavailableError("no"), InternalError("no"), OverloadedError("no", 0.0)]
        real = DecodeService.Reserve

        async def reserve(node: DecodeService, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
            if errors:
                raise errors.pop()
            return await real(node, request, context)

        monkeypatch.setattr(DecodeService, "Reserve", reserve)
        async with cluster(model, **PATIENT) as fake:
            client = member_of(fake, fake.nodes[1]).client
            (output,) = await generate(fake, PROMPT, PARAMS, seed=1)
            assert right(output, PROMPT, PARAMS, 1)
            assert (errors, member_of(fake, fake.nodes[1]).client) == ([], client)


class Unanswered:
    """Calls of a method whose answers never leave the node; the first ones, when `calls` is set. It does what they ask
    for, but releases nothing. With a code, the caller gets this status, without anything that one of our processes
    says with it, as when the network ends the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, code: StatusCode | None = None) -> None:
        self.calls = 0
        real = getattr(DecodeService, method)

        async def call(node: DecodeService, request: Any, context: Any) -> Any:
            is_lost, self.calls = self.calls > 0, max(0, self.calls - 1)
            answer = None if is_lost and isinstance(request, pb.ReleaseRequest) else await real(node, request, context)
            if is_lost and code is not None:
                await context.abort(code, "the connection broke")
            if is_lost:
                await asyncio.sleep(WAIT_S)  # Its client ends it before.
            return answer

        monkeypatch.setattr(DecodeService, method, call)


class TestRetries:
    async def test_a_retry_reads_the_kv_that_its_lost_node_has_not_read(self, model: str) -> None:
        async with cluster(model, decodes=2, **PATIENT) as fake:
            prefill, d1, d2 = fake.nodes
            async with prefill.engine.turn:
                run = started(fake, PROMPT, PARAMS, seed=1)
                await fake.until(lambda: prefill.service.queued_prompts == 1)
                used, other = (d1, d2) if d1.leases else (d2, d1)
                await used.kill()
                await fake.until(lambda: fake.state(used.info.ref.node_id) is NodeState.LOST)
            (output,) = await run
            assert right(output, PROMPT, PARAMS, 1)
            assert output.receipt.decode_node == other.info.ref
            assert prefill.engine.prefilled == [PROMPT]

    async def test_samples_that_lost_their_node_compute_their_prompt_once_again_together(self, model: str) -> None:
        async with cluster(model, **PATIENT) as fake:
            prefill, decode = fake.nodes
            decode.engine.step_ms = 5
            run = started(fake, PROMPT, replace(LONG, n=4), seed=9)
            await fake.until(lambda: decode.drawn_tokens > 20)
            async with prefill.engine.turn:
                await decode.kill()
                await fake.add_decode("d2")
                await fake.until(lambda: prefill.service.queued_prompts == 4)
            assert all(right(output, PROMPT, LONG, output.seed) for output in await run)
            assert prefill.engine.prefilled == [PROMPT] * 2

    async def test_kv_that_its_reader_refused_is_not_read_again(self, model: str) -> None:
        """Though it is still there, for another sample that has not read it."""
        async with cluster(model, decodes=2, **PATIENT) as fake:
            prefill, d1, d2 = fake.nodes
            d2.engine.hanging, d1.engine.fail_after = True, 0
            async with prefill.engine.turn:
                run = started(fake, PROMPT, replace(PARAMS, n=2), seed=9)
                await fake.until(lambda: prefill.service.queued_prompts == 2)
            await fake.until(lambda: len(d2.service._running) == 2)
            assert prefill.engine.prefilled == [PROMPT] * 2
            d2.engine.hanging = False
            assert all(right(output, PROMPT, PARAMS, output.seed) for output in await run)

    @pytest.mark.parametrize("share_kv", [True, False])
    async def test_a_sample_that_cannot_be_run_again_leaves_no_kv(self, model: str, share_kv: bool) -> None:
        async with cluster(model, node_wait_s=0.1, share_kv=share_kv, **PATIENT) as fake:
            prefill, decode = fake.nodes
            async with prefill.engine.turn:
                run = started(fake, PROMPT, PARAMS, seed=1)
                await fake.until(lambda: prefill.service.queued_prompts == 1)
                await decode.kill()
            with pytest.raises(UnavailableError):
                await run
            ended = asyncio.get_running_loop().time()
            await fake.until(lambda: not fake.kv.held)
            assert asyncio.get_running_loop().time() - ended < prefill.engine.kv_ttl_s / 2, "it did not end by itself"
            assert prefill.engine.prefilled == [PROMPT]
