"""The table that `corun bench` prints: a row per workload and system. Must not know what is in it."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from corun_bench.report import tables
from corun_bench.report.page import choose_baseline
from corun_bench.report.views import Results

STYLES = {"good": "green", "bad": "red", "dim": "dim"}


def table(results: Results) -> Table:
    """Return the table of `tables.overview`; only the first row of a workload names it."""
    content = tables.overview(results, choose_baseline(results, ""))
    made = Table("workload", "system", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in content.columns:
        made.add_column(column, justify="right")
    for section in content.sections:
        for i, row in enumerate(section.rows):
            cells = (Text(cell.text, STYLES.get(cell.kind, "")) for cell in row.cells)
            made.add_row(Text("" if i else section.title), Text(row.system), *cells)
    return made
