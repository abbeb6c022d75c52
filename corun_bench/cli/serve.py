"""`corun bench serve`: vLLM's benchmark client. `corun_bench.serve` does the work; it needs vLLM."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import ClassVar

import tyro

from corun.config.extras import needs_extra


@dataclass(frozen=True)
class BenchServe:
    """Measure a gateway with vLLM's own client.

    The options are those of `vllm bench serve`; --help=all lists them. The command `vllm` itself does not start where
    vLLM is installed for CPUs, because that distribution has another name.

    examples:
      corun bench serve --base-url http://127.0.0.1:8000 --dataset-name random --random-output-len 64 --ignore-eos
    """

    PASSES_ON: ClassVar = True
    """The command line passes every word on unchanged, because the options are vLLM's."""

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of `vllm bench serve`, passed on unchanged."""

    def run(self) -> int:
        with needs_extra("corun bench serve", "cpu"):
            serve = importlib.import_module("corun_bench.serve")
        serve.run(self.words)
        return 0
