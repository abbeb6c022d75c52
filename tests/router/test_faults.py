"""Which nodes a router uses, and what comes of a node that fails, dies, hangs or lies while requests run.

Every `cluster` block ends with the check that nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    InternalError,
    OverloadedError,
    UnavailableError,
)
from corun.types import FinishReason, NodeState
from router import sample
from router.text import VERSION
from tests.clusters import FakeCluster, cluster, generate, retries
from tests.router.asking import LONG, PARAMS, PROMPT, check, started


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

    async def test_slots_are_the_nodes_own_business(self, model: str) -> None:
        """Another router holds slots; a refused Reserve waits for a change and keeps its turn."""
        async with cluster(model, slots=2) as fake:
            table = fake.nodes[1].service._table
            leases = [table.reserve("another router", 1, 1) for _ in range(2)]
            runs = []
            for i in range(3):
                runs.append(started(fake, (i,)))
                await fake.until(lambda i=i: fake.router.queue.waiting == i + 1)  # type: ignore[misc]
            # None of them is on its way to the node, where one could find the slots that were held for those before it.
            await fake.until(lambda: table._waiting and fake.router.queue.waiting == 3)
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
    "decode draws too many tokens": Fault(victim="d1", settings=TWO, engine={"overdraws": 3}, retries="fault"),
    "decode draws too many tokens again and again": Fault(
        victim="d1", engine={"overdraws": 3}, retries="fault", error=UnavailableError, says="failed 3 runs"
    ),
    # As when a constraint was not tried in time, because those of others came first.
    "decode has too much else to do, again and again": Fault(
        victim="d1",
        engine={"start_errors": [OverloadedError("others came first", 0.0) for _ in range(7)]},
        retries="fault",
    ),
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
    async def test_a_handle_that_is_refused_is_the_fault_of_who_made_it(self, model: str) -> None:
        """The next run avoids that prefill node, not the decode node that refused to read it."""
        async with cluster(model, prefills=2) as fake:
            engine = fake.node("p1").engine
            made = engine._handle
            engine._handle = lambda prompt: replace(made(prompt), num_tokens=1)
            (output,) = await started(fake, (7, 1), LONG, seed=7)
            check(output, (7, 1), LONG, 7)
            assert output.receipt.prefill_node.node_id == "p2"
            assert retries(fake) == {"fault": 1}

    @pytest.mark.parametrize("name", FAULTS)
    async def test_a_fault_changes_no_bit_or_ends_the_request_with_its_name(self, model: str, name: str) -> None:
        fault = FAULTS[name]
        async with cluster(model, **fault.settings) as fake:
            victim = fake.node(fault.victim)
            for what, value in fault.engine.items():
                setattr(victim.engine, what, value)
            runs = [started(fake, (i, 1), LONG, seed=i) for i in range(1 if fault.error else 2)]
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
