"""`python -m router` runs one router process until SIGTERM or SIGINT. Then the router drains and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace

from corun.config.extras import needs_extra
from corun.config.fields import SEED_KEY_VARIABLE, RouterConfig
from corun.config.flags import parse
from corun.errors import CorunError, InvalidArgumentError

try:
    with needs_extra("python -m router", "router"):
        from corun.observe import tracing
        from corun.rpc.server import raise_file_limit, run
        from router import garbage
        from router.app import Router
except CorunError as error:
    raise SystemExit(str(error)) from None


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Start a router, serve until `stop` is set, then drain and stop it."""
    router = Router(config)
    tracing.start("corun-router", router.router_id)
    await router.start()
    garbage.begin(lambda: router.queue.waiting)
    try:
        await stop.wait()
        await router.drain()
    finally:
        await router.stop()
        await tracing.stop()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = parse(RouterConfig, prog="python -m router")
    if not config.seed_key_file:
        try:
            config = replace(config, seed_key=os.environ.get(SEED_KEY_VARIABLE, ""))
        except InvalidArgumentError as error:
            print(f"{SEED_KEY_VARIABLE}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    raise_file_limit()
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
