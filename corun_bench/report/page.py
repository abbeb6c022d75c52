"""The report of a benchmark: one HTML page that needs no other file, and its figures as files.

Owns which figures and tables there are, and the words about them. This module must not know how they are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from corun.errors import InvalidArgumentError
from corun_bench.report import plots, tables
from corun_bench.report.captions import CAPTIONS
from corun_bench.report.cells import flat
from corun_bench.report.plot_kit import looks, svg_of
from corun_bench.report.views import STD, Results
from corun_bench.results import mapping

REPORT = "report.html"
FIGURES = "figures"
_TEMPLATE = "page.html.j2"
_FACTS = ("hardware", "versions")
"""The conditions that must be the same in all files whose numbers are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure with its title and caption."""

    name: str
    """The name of the figure's files, without a suffix."""
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> str:
        """The figure as part of a page, without ids of groups: all figures share these and nothing refers to them."""
        drawing = svg_of(self.figure)
        return re.sub(r'<g id="[^"]*"', "<g", drawing[drawing.index("<svg") :])


def write(results: Results, directory: Path, *, baseline: str = "") -> list[Path]:
    """Write the page and its figures, and return their paths, the page first.

    Raises InvalidArgumentError if the baseline has no runs.
    """
    base = choose_baseline(results, baseline)
    made = list(charts(results))
    figures = [path for chart in made for path in plots.save(chart.figure, directory / FIGURES, chart.name)]
    page = directory / REPORT
    directory.mkdir(parents=True, exist_ok=True)
    page.write_bytes(render(results, made, base).encode("utf-8", "replace"))
    return [page, *figures]


def choose_baseline(results: Results, wanted: str) -> str:
    """Return the system that ratios are relative to: the wanted one, else STD, else the first."""
    ran = {run["system"] for run in results.runs}
    names = [name for name in results.names if name in ran]
    if wanted and wanted not in names:
        raise InvalidArgumentError("baseline", wanted, f"must be a system with runs: {', '.join(names) or 'none'}")
    return wanted or (STD if STD in names else next(iter(names), ""))


def render(results: Results, made: list[Chart], baseline: str) -> str:
    """Return the page. The content of a result file is always text in it, never markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        results=results,
        model=_model(results),
        baseline=baseline,
        notices=list(notices(results)),
        conditions=_conditions(results),
        settings=_settings(results),
        summary=tables.summary(results, baseline),
        throughputs=tables.throughputs(results, baseline),
        latencies=tables.latencies(results, baseline),
        systems=tables.systems(results),
        kernels=tables.kernels(results),
        charts=made,
        colours={name: look.colour for name, look in looks(results.names).items()},
    )


def charts(results: Results) -> Iterator[Chart]:
    """Yield all figures for which the results have data."""
    for kind, of, name, figure in _figures(results):
        if figure is not None:
            title, caption = CAPTIONS[kind]
            about = f": {of}" if of else ""
            yield Chart(name=name, title=title + about, caption=caption, figure=figure)


def _figures(results: Results) -> Iterator[tuple[str, str, str, Figure | None]]:
    """Yield the kind of each figure, its workload if it has one, the name of its files, and the figure."""
    yield "throughput", "", "throughput", plots.throughput(results)
    yield "throughput-per-gpu", "", "throughput-per-gpu", _per_gpu(results)
    for number, workload in enumerate(results.workloads, start=1):
        yield "timeline", workload, f"timeline-{number}-{_slug(workload)}", plots.timeline(results, workload)
    yield "ttft", "", "ttft", plots.latency_cdf(results, "ttft")
    yield "tpot", "", "tpot", plots.latency_cdf(results, "tpot")
    yield "scaling", "", "scaling", plots.scaling(results)
    yield "padding", "", "padding", plots.padding(results)
    yield "ablation", "", "ablation", plots.ablation(results)
    yield "kernels", "", "kernels", plots.kernels(results)


def _per_gpu(results: Results) -> Figure | None:
    """Draw the throughput per GPU if systems have different numbers of GPUs and cannot be compared directly."""
    several = len({results.gpus(name) for name in results.names} - {0}) > 1
    return plots.throughput(results, per_gpu=True) if several else None


def _slug(workload: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", workload.lower()).strip("-")[:40] or "workload"


def notices(results: Results) -> Iterator[str]:
    """Yield what a reader has to know before comparing any two numbers."""
    for fact in _FACTS:
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


def _model(results: Results) -> str:
    models = (mapping(document, "conditions").get("model") for document in results.documents)
    model = next((model for model in models if model is not None), "")
    return str(model.get("name") or model.get("id") or "") if isinstance(model, dict) else str(model)


def _conditions(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return, for each file, the command line and all recorded conditions."""
    found = []
    for document in results.documents:
        command = document.get("command")
        words = " ".join(map(str, command)) if isinstance(command, list) else ""
        facts = flat({"command": words, **mapping(document, "conditions")})
        found.append((document["file"], facts))
    return found


def _settings(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    return [(entry["system"], facts) for entry in results.systems if (facts := flat(mapping(entry, "settings")))]
