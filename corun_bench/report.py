"""The report of a benchmark: one HTML page that needs no other file, and its figures as files.

Owns what the page says beside tables and figures. This module must not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2

from corun.errors import InvalidArgumentError
from corun_bench import figures, tables
from corun_bench.results import STD, Results, mapping
from corun_bench.tables import flat

REPORT = "report.html"
FIGURES = "figures"


def write(results: Results, directory: Path, *, baseline: str = "") -> list[Path]:
    """Write the page and its figures, and return their paths, the page first.

    Raises InvalidArgumentError if the baseline has no runs.
    """
    base = choose_baseline(results, baseline)
    charts = figures.write(results, directory / FIGURES)
    page = directory / REPORT
    directory.mkdir(parents=True, exist_ok=True)
    page.write_bytes(render(results, charts, base).encode("utf-8", "replace"))
    return [page, *(path for chart in charts for path in chart.paths)]


def choose_baseline(results: Results, wanted: str) -> str:
    """Return the system that ratios are relative to: the wanted one, else STD, else the first."""
    ran = {run["system"] for run in results.runs}
    names = [name for name in results.names if name in ran]
    if wanted and wanted not in names:
        raise InvalidArgumentError("baseline", wanted, f"must be a system with runs: {', '.join(names) or 'none'}")
    return wanted or (STD if STD in names else next(iter(names), ""))


def render(results: Results, charts: list[figures.Chart], baseline: str) -> str:
    """Return the page. The content of a result file is always text in it, never markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    models = [mapping(document, "conditions").get("model") for document in results.documents]
    model = next((model for model in models if model is not None), "")
    conditions = []
    for document in results.documents:
        command = document.get("command")
        words = " ".join(map(str, command)) if isinstance(command, list) else ""
        conditions.append((document["file"], flat({"command": words, **mapping(document, "conditions")})))
    settings = [(entry["system"], flat(mapping(entry, "settings"))) for entry in results.systems]
    return environment.get_template("page.html.j2").render(
        model=str(model.get("name") or model.get("id") or "") if isinstance(model, dict) else str(model),
        baseline=baseline,
        notices=list(notices(results)),
        conditions=conditions,
        settings=[(name, facts) for name, facts in settings if facts],
        summary=tables.summary(results, baseline),
        throughputs=tables.throughputs(results, baseline),
        latencies=tables.latencies(results, baseline),
        systems=tables.systems(results),
        kernels=tables.kernels(results.kernels),
        columns_of=tables.columns,
        charts=charts,
        colours={name: look.colour for name, look in figures.looks(results.names).items() if name in results.names},
    )


def notices(results: Results) -> Iterator[str]:
    """Yield what a reader has to know before comparing any two numbers."""
    for fact in ("hardware", "versions"):
        told = [dict(flat(mapping(mapping(document, "conditions"), fact))) for document in results.documents]
        known = [facts for facts in told if facts]
        names = sorted({name for facts in known for name in facts})
        if differing := [name for name in names if len({facts.get(name) for facts in known}) > 1]:
            yield f"These files were not measured under the same conditions: {fact} ({', '.join(differing)})."
    if failed := sorted({run["system"] for run in results.runs if run.get("failed")}):
        yield f"Requests failed: {', '.join(failed)}. Their throughput counts finished requests only."
    unchecked = [name for name in results.names if results.mismatch(name) is None]
    if results.mismatches and unchecked:
        yield f"Not run again, so nothing is known about their bits: {', '.join(unchecked)}."
