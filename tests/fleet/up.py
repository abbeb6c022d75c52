"""`python -m tests.fleet.up FILE RAY LOGS real|fake`: `corun up FILE --ray-address RAY`, over fake engines if wanted.

Tests only: users name no modules.
"""

from __future__ import annotations

import sys

from corun.config.cluster_file import NODES, read
from corun.launch import run
from corun.launch.members import MODULES

FAKES = dict.fromkeys(NODES, "tests.fleet.nodes")


def main(file: str, ray: str, logs: str, engines: str) -> int:
    modules = {**MODULES, **(FAKES if engines == "fake" else {})}
    return run(read(file), ray_address=ray, log_dir=logs, modules=modules)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
