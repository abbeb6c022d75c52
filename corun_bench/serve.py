"""vLLM's benchmark client without vLLM's command line, which needs a distribution with the name vllm."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run(words: Sequence[str]) -> None:
    """Measure a server as `vllm bench serve` does with these options, and print what it prints.

    Raises:
        SystemExit: an option is wrong, or help was asked for; as argparse does.
    """
    parser = FlexibleArgumentParser(prog="corun bench serve")
    add_cli_args(parser)
    main(parser.parse_args(list(words)))
