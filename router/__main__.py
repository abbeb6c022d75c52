"""`python -m router`: one router process, until SIGTERM or SIGINT; then it drains."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace

import uvloop

from corun.config import SEED_KEY_VARIABLE, RouterConfig, parse
from corun.errors import InvalidArgumentError
from corun.server import raise_file_limit, run
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


def _with_seed_key(config: RouterConfig) -> RouterConfig:
    if config.seed_key_file:
        return config
    try:
        return replace(config, seed_key=os.environ.get(SEED_KEY_VARIABLE, ""))
    except InvalidArgumentError as error:
        print(f"{SEED_KEY_VARIABLE}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = _with_seed_key(parse(RouterConfig, prog="python -m router"))
    raise_file_limit()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
