"""`python -m router`: one router process, until SIGTERM or SIGINT; then it drains."""

from __future__ import annotations

import asyncio
import logging

import uvloop

from corun.config import RouterConfig, parse
from corun.server import run
from router.app import Router


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Starts, serves until `stop` is set, drains, stops."""
    router = Router(config)
    await router.start()
    try:
        await stop.wait()
        await router.drain()
    finally:
        await router.stop()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = parse(RouterConfig, prog="python -m router")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
