"""The work that systems get: names of workloads, the files behind some of them, and the requests made from both."""

from corun_bench.workloads.requests import Prepared, Tokenize, make, prepare
from corun_bench.workloads.specs import PAPER, Spec, expand, parse

__all__ = ["PAPER", "Prepared", "Spec", "Tokenize", "expand", "make", "parse", "prepare"]
