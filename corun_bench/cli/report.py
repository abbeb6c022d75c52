"""`corun bench report`: figures and one HTML page from result files. `corun_bench.report` does the work."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corun.config.extras import needs_extra
from corun.errors import InvalidArgumentError
from corun_bench import results


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write results up as one HTML page with figures.

    The figures are also written as files. Several result files are merged; they must have the same model, and each
    system must run on the same number of GPUs in all of them.

    examples:
      corun bench report results.json -o report                   report/report.html, report/figures/*.png and *.svg
      corun bench report one.json two.json kernels.json -o report
      corun bench report results.json -o report --baseline bi     ratios against another system than std
    """

    files: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")]]
    """Result files of corun bench, and of corun bench kernels."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Directory to write to; it is made if it does not exist."""
    baseline: str = ""
    """System that the others are compared with; by default std, or the first system where there is no std."""

    def run(self) -> int:
        if not self.files:
            raise InvalidArgumentError("files", "none", "must be at least one result file")
        with needs_extra("corun bench report", "bench"):
            views = importlib.import_module("corun_bench.report.views")
            page = importlib.import_module("corun_bench.report.page")
        read = {str(path): results.read(path, (results.SCHEMA, results.KERNELS_SCHEMA)) for path in self.files}
        for path in page.write(views.merge(read), self.output, baseline=self.baseline):
            print(path)
        return 0
