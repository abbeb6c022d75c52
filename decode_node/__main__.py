"""`python -m decode_node` runs one decode node process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from corun.config.extras import default_slots
from corun.config.fields import DecodeConfig
from corun.config.flags import parse
from corun.models import downloaded
from corun.node.life import live_and_leave, log_to_stderr, node_ref, start_tracing
from corun.node.vllm.start import nixl_endpoint
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.types import NodeRole
from decode_node.engine import VllmDecodeEngine
from decode_node.service import role


async def run(config: DecodeConfig, stop: asyncio.Event) -> None:
    """Run the node; its health and metrics can be observed before its engine has loaded."""
    async with observed(config) as observation:
        config = replace(config, model=downloaded(config.model), slots=config.slots or default_slots())
        ref = node_ref(config, NodeRole.DECODE)
        start_tracing(ref, "decode")
        engine = await VllmDecodeEngine.launch(config, nixl_endpoint(config, f"{ref.node_id}-{ref.generation}"))
        await live_and_leave(config, [role(config, ref, engine)], stop, observation)


def main() -> None:
    config = parse(DecodeConfig, prog="python -m decode_node")
    log_to_stderr()
    serve(lambda stop: run(config, stop))


if __name__ == "__main__":
    main()
