"""`python -m prefill_node` runs one prefill node process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from corun.config.fields import PrefillConfig
from corun.config.flags import parse
from corun.models import downloaded
from corun.node.life import live_and_leave, log_to_stderr, node_ref, start_tracing
from corun.node.vllm.start import nixl_endpoint
from corun.observe.endpoints import observed
from corun.rpc.server import run as serve
from corun.types import NodeRole
from prefill_node.engine import VllmPrefillEngine
from prefill_node.service import role


async def run(config: PrefillConfig, stop: asyncio.Event) -> None:
    """Run the node; its health and metrics can be observed before its engine has loaded."""
    async with observed(config) as observation:
        config = replace(config, model=downloaded(config.model))
        ref = node_ref(config, NodeRole.PREFILL)
        start_tracing(ref, "prefill")
        endpoint = nixl_endpoint(config, f"{ref.node_id}-{ref.generation}")
        engine = await VllmPrefillEngine.launch(config, ref, endpoint)
        await live_and_leave(config, [role(config, ref, engine)], stop, observation)


def main() -> None:
    config = parse(PrefillConfig, prog="python -m prefill_node")
    log_to_stderr()
    serve(lambda stop: run(config, stop))


if __name__ == "__main__":
    main()
