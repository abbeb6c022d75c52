"""`python -m tests.fleet.prefill_node`: a prefill node around a fake engine. Tests only."""

from __future__ import annotations

from corun.config.fields import PrefillConfig
from corun.config.flags import parse
from corun.types import NodeRole
from tests.fleet.nodes import main

if __name__ == "__main__":
    main(parse(PrefillConfig), NodeRole.PREFILL)
