"""What a client learns of the cluster that is no operator: nothing of other clients, paths, environment, machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.contract import Contract
from corun.errors import UnavailableError
from corun.params import SamplingParams
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.types import ClusterStatus, NodeState
from router import views
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import MEMBER, PROMPT, token_of, with_tokens

OPERATOR, ALICE = token_of("ops"), token_of("alice")
ENVIRONMENT = ("NCCL_IB_HCA=mlx5_7", "VLLM_SECRET=hunter2")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return with_tokens(tmp_path, "ops operator", "alice")


async def seen_by(fake: FakeCluster, token: str) -> ClusterStatus:
    async with AsyncClient(fake.address, token=token, timeout_s=WAIT_S) as client:
        return await client.get_cluster()


async def with_nodes(fake: FakeCluster) -> None:
    """Nodes whose contract has an environment; d2 is out, for what it did with bob's request, and d3 is refused."""
    await fake.add_prefill("p1", environment=ENVIRONMENT)
    for name in ("d1", "d2"):
        await fake.add_decode(name, environment=ENVIRONMENT)
    await fake.ready("p1", "d1", "d2")
    fake.router.registry.quarantine([fake.nodes[2].info.ref], "sample 0 of request 'bobs'")
    fake.router.auditor._last_mismatch = "today: sample 0 of request 'bobs' differs"
    await fake.add_decode("d3", slots=16, environment=("VLLM_SECRET=hunter3",))
    await fake.until(lambda: fake.state("d3") is NodeState.REFUSED)


def private(fake: FakeCluster) -> list[str]:
    addresses = [node.info.address for node in fake.nodes]
    return [
        "bobs",
        "mlx5_7",
        "hunter",
        str(Path(fake.model).parent),
        *addresses,
        fake.nodes[0].engine.endpoint.engine_id,
    ]


async def test_a_client_sees_what_it_is_served_by_and_no_more(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, prefills=0, decodes=0, client=Access(token=ALICE), **settings) as fake:
        await with_nodes(fake)
        status = await seen_by(fake, ALICE)
        assert [text for text in private(fake) if text in str(status)] == []
        states = {each.node.ref.node_id: each.state.value for each in status.nodes}
        assert states == {"p1": "ready", "d1": "ready", "d2": "refused", "d3": "refused"}
        assert status.fingerprint == fake.router.registry.contract.fingerprint
        d1 = next(each for each in status.nodes if each.node.ref.node_id == "d1")
        contract = Contract.from_json(d1.node.contract_json)
        assert contract.model.environment == ("NCCL_IB_HCA=(hidden)", "VLLM_SECRET=(hidden)")
        assert contract.model.weights_digest == "w" * 64
        assert (d1.node.slots, d1.node.vocab_size, d1.node.model) == (8, 256, Path(model).name)


async def test_contracts_are_read_once_for_clients(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client may ask as often as it likes, and each contract takes some of the router's time."""
    async with cluster(model, client=Access(token=ALICE), **settings) as fake:
        first = await seen_by(fake, ALICE)
        monkeypatch.setattr(views, "Contract", None)
        again = await seen_by(fake, ALICE)
    assert [each.node.contract_json for each in again.nodes] == [each.node.contract_json for each in first.nodes]


@pytest.mark.parametrize("token", [OPERATOR, MEMBER, ""])
async def test_operators_and_members_see_all(model: str, settings: dict[str, Any], token: str) -> None:
    """And everybody, where clients have no tokens."""
    async with cluster(model, prefills=0, decodes=0, client=Access(token=token), **settings if token else {}) as fake:
        await with_nodes(fake)
        text = str(await seen_by(fake, token))
        assert [each for each in private(fake) if each not in text] == []


async def test_errors_tell_clients_no_more_than_the_status_does(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, prefills=0, decodes=0, client=Access(token=ALICE), node_wait_s=0.05, **settings) as fake:
        await with_nodes(fake)
        fake.router.registry.quarantine([fake.nodes[1].info.ref], "sample 0 of request 'bobs'")
        assert "bobs" in fake.detail("d2")
        with pytest.raises(UnavailableError, match="d2 is refused") as caught:
            await generate(fake, PROMPT, SamplingParams(max_tokens=4), seed=1)
        assert [text for text in private(fake) if text in str(caught.value)] == []


async def test_what_cannot_be_read_is_not_shown(model: str, settings: dict[str, Any]) -> None:
    async with cluster(model, prefills=0, decodes=0, client=Access(token=ALICE), **settings) as fake:
        node = await fake.add_decode("d1", join=False)
        node.agent.info = replace(node.info, contract_json='{"hunter": 2}')
        node.join()
        await fake.until(lambda: fake.state("d1") is NodeState.REFUSED)
        (status,) = (await seen_by(fake, ALICE)).nodes
        assert status.node.contract_json == ""
