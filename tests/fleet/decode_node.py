"""`python -m tests.fleet.decode_node`: a decode node around a fake engine. Tests only."""

from __future__ import annotations

from corun.config.fields import DecodeConfig
from corun.config.flags import parse
from corun.types import NodeRole
from tests.fleet.nodes import main

if __name__ == "__main__":
    main(parse(DecodeConfig), NodeRole.DECODE)
