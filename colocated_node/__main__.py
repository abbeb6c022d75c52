"""`python -m colocated_node` runs one colocated node process: both sides, each a node of its own to routers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from colocated_node.engine import ColocatedEngine
from corun.config.extras import default_slots
from corun.config.fields import ColocatedConfig
from corun.config.flags import parse
from corun.models import downloaded
from corun.node.life import live_and_leave, log_to_stderr, side_refs, start_tracing
from corun.node.vllm.start import nixl_endpoint
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.types import NodeRole
from decode_node import service as decode
from prefill_node import service as prefill


async def run(config: ColocatedConfig, stop: asyncio.Event) -> None:
    """Run the node; its health and metrics can be observed before its engine has loaded."""
    async with observed(config) as observation:
        config = replace(config, model=downloaded(config.model), slots=config.slots or default_slots())
        refs = side_refs(config)
        of_prompts, of_samples = refs[NodeRole.PREFILL], refs[NodeRole.DECODE]
        start_tracing(of_samples, "colocated")
        endpoint = nixl_endpoint(config, f"{of_samples.node_id}-{of_samples.generation}")
        engine = await ColocatedEngine.launch(config, of_prompts, endpoint)
        decoding = decode.role(config, of_samples, engine.decode)
        computing = prefill.role(config, of_prompts, engine.prefill, decoding.service)
        await live_and_leave(config, [computing, decoding], stop, observation)


def main() -> None:
    config = parse(ColocatedConfig, prog="python -m colocated_node")
    log_to_stderr()
    serve(lambda stop: run(config, stop))


if __name__ == "__main__":
    main()
