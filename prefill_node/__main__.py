"""`python -m prefill_node`: one prefill node process."""

from __future__ import annotations

import asyncio

from corun.cluster import NodeInfo, NodeRole
from corun.config import PrefillConfig, parse
from corun.node.engine import nixl_endpoint
from corun.node.main import Role, live, log_to_stderr, node_ref
from corun.server import run as serve
from corun.v1 import prefill_service_pb2_grpc
from prefill_node.engine import VllmPrefillEngine
from prefill_node.service import SERVICE_NAME, PrefillService


async def run(config: PrefillConfig, stop: asyncio.Event) -> None:
    ref = node_ref(config, NodeRole.PREFILL)
    endpoint = nixl_endpoint(config, f"{ref.node_id}-{ref.generation}")
    engine = await VllmPrefillEngine.launch(config, ref, endpoint)
    service = PrefillService(ref, engine)

    def info(address: str) -> NodeInfo:
        return NodeInfo(
            ref=ref,
            role=NodeRole.PREFILL,
            address=address,
            contract_json=engine.contract.canonical_json(),
            slots=0,
            kv_blocks=engine.facts.kv_blocks,
            block_size=engine.facts.block_size,
            max_model_len=engine.facts.max_model_len,
            vocab_size=engine.facts.vocab_size,
            nixl=endpoint,
            model=config.model,
        )

    await live(
        config,
        Role(
            engine=engine,
            service=service,
            service_name=SERVICE_NAME,
            register=prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
            info=info,
        ),
        stop,
    )


def main() -> None:
    config = parse(PrefillConfig, prog="prefill_node")
    log_to_stderr()
    serve(lambda stop: run(config, stop))


if __name__ == "__main__":
    main()
