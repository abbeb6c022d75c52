"""`python -m colocated_node` runs one colocated node process: both sides, each a node of its own to routers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from colocated_node.engine import ColocatedEngine
from corun.config.extras import default_slots
from corun.config.fields import ColocatedConfig
from corun.config.flags import parse
from corun.models import downloaded
from corun.node.life import Role, live_and_leave, log_to_stderr, node_info, side_refs, start_tracing
from corun.node.vllm.start import nixl_endpoint
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.types import NodeRole
from corun.v1 import decode_service_pb2_grpc, prefill_service_pb2_grpc
from decode_node import service as decode
from decode_node.slots import SlotTable
from prefill_node import service as prefill


async def run(config: ColocatedConfig, stop: asyncio.Event) -> None:
    """Run the node; its health and metrics can be observed before its engine has loaded."""
    async with observed(config) as observation:
        config = replace(config, model=downloaded(config.model), slots=config.slots or default_slots())
        refs = side_refs(config)
        start_tracing(refs[NodeRole.DECODE], "colocated")
        endpoint = nixl_endpoint(config, "-".join((refs[NodeRole.DECODE].node_id, refs[NodeRole.DECODE].generation)))
        engine = await ColocatedEngine.launch(config, refs[NodeRole.PREFILL], endpoint)

        facts = engine.prefill.facts
        prompts = prefill.PrefillService(
            refs[NodeRole.PREFILL], engine.prefill, kv_tokens=facts.kv_blocks * facts.block_size
        )
        prompts.metrics.show_engine(engine.prefill, facts.kv_blocks)

        facts = engine.decode.facts
        table = SlotTable(
            slots=config.slots, kv_blocks=facts.kv_blocks, block_size=facts.block_size, shares=engine.decode.shares
        )
        samples = decode.DecodeService(
            refs[NodeRole.DECODE],
            engine.decode,
            table,
            lease_ttl_ms=config.lease_ttl_ms,
            kv_reads=lambda: engine.decode.kv_reads,
        )
        samples.step_sizes = engine.decode.step_sizes
        engine.decode.on_step, engine.decode.on_read = samples.on_step, samples.on_read

        await live_and_leave(
            config,
            [
                Role(
                    engine=engine.prefill,
                    service=prompts,
                    service_name=prefill.SERVICE_NAME,
                    register=prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
                    info=node_info(
                        config, refs[NodeRole.PREFILL], NodeRole.PREFILL, engine.prefill, nixl=engine.prefill.endpoint
                    ),
                    metrics=prompts.metrics,
                ),
                Role(
                    engine=engine.decode,
                    service=samples,
                    service_name=decode.SERVICE_NAME,
                    register=decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
                    info=node_info(config, refs[NodeRole.DECODE], NodeRole.DECODE, engine.decode, slots=config.slots),
                    metrics=samples.metrics,
                ),
            ],
            stop,
            observation,
        )


def main() -> None:
    config = parse(ColocatedConfig, prog="colocated_node")
    log_to_stderr()
    serve(lambda stop: run(config, stop))


if __name__ == "__main__":
    main()
