"""What is given back when a client leaves, a deadline passes, or a router is told to end.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import pytest

from corun.errors import CorunError, DeadlineError, UnavailableError
from corun.params import SamplingParams
from corun.rpc import codec
from corun.testing.cluster import WAIT_S
from decode_node.service import DecodeService
from router.request import Request
from tests.clusters import cluster, generate, short_calls
from tests.fuzz import http2
from tests.router.asking import PARAMS, PROMPT, check, started


class TestCancellation:
    @pytest.mark.parametrize("way", ["call", "connection", "deadline"])
    @pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
    async def test_what_a_client_leaves_is_given_back(self, model: str, stage: str, way: str) -> None:
        async with cluster(model, slots=1) as fake:
            p1, d1 = fake.nodes
            d1.engine.step_ms = 20
            d1.engine.hanging, p1.engine.hanging = stage == "waiting", stage == "prefilling"
            first = started(fake, (1,)) if stage == "waiting" else None
            await fake.until(lambda: d1.leases == (stage == "waiting"))
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
                    with short_calls(3.0) if way == "deadline" else contextlib.nullcontext():
                        reading = asyncio.ensure_future(drained(call := stub.Generate(request, timeout=WAIT_S)))
                        await fake.until(reached)
                    if way == "call":
                        call.cancel()
                        await asyncio.wait((reading,))
                    elif stage == "waiting":
                        assert "no room became free" in await reading
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
        async with cluster(model) as fake:
            with short_calls(), pytest.raises(DeadlineError):
                await generate(fake, PROMPT, PARAMS)
            assert fake.nodes[1].leases == 1
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
            await fake.until(lambda: fake.nodes[1].leases == 1)
            drain = asyncio.ensure_future(fake.router.drain())
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="shutting down"):
                await generate(fake, PROMPT, PARAMS)
            check((await run)[0], PROMPT, PARAMS, 9)
            await drain

    async def test_what_takes_too_long_is_cancelled_and_given_back(self, model: str) -> None:
        async with cluster(model, drain_grace_s=0.05) as fake:
            run = started(fake, params=SamplingParams(max_tokens=500))
            await fake.until(lambda: fake.nodes[1].leases == 1)
            await fake.router.drain()
            await fake.router.stop()
            with pytest.raises(CorunError):
                await run
            assert fake.nodes[1].leases == 0
            assert fake.kv.held == {}
