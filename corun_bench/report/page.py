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
from corun_bench.report.looks import looks, save, svg_of
from corun_bench.report.tables import flat
from corun_bench.report.views import STD, Results
from corun_bench.results import mapping

REPORT = "report.html"
FIGURES = "figures"
_TEMPLATE = "page.html.j2"
_FACTS = ("hardware", "versions")
"""The conditions that must be the same in all files whose numbers are compared."""

_AGAIN = "Hatched: running requests again in another crowd gave other bits; the counts are under the bars."

_CAPTIONS: dict[str, tuple[str, str]] = {
    "throughput": (
        "Throughput per workload and system",
        """Output tokens per second from the first request sent to the last one done, on the client's clock, without the
        warm-up. Bars are medians over repeats, whiskers the lowest and the highest repeat. """
        + _AGAIN,
    ),
    "throughput-per-gpu": (
        "Throughput per GPU",
        "The same, divided by all GPUs that the system has, those for prefill among them. " + _AGAIN,
    ),
    "timeline": (
        "Prefill and decode over time",
        """A prompt's tokens count when its first output token reaches the client, since nobody outside sees them
        earlier; output tokens count when they come, but for the first ones, which prefill computes. The first repeat
        of each system.""",
    ),
    "ttft": (
        "Time to first token",
        """Share of requests whose first token came within this time after they were sent, over all repeats. Waiting
        for a slot or for other prompts is part of it. Further left is better.""",
    ),
    "tpot": (
        "Time per output token",
        """Share of requests with at most this mean time per token after the first one, over all repeats. Further left
        is better.""",
    ),
    "scaling": (
        "Scaling with concurrency",
        """Output throughput of the same workload with more and more requests in flight; medians over repeats, whiskers
        the lowest and the highest.""",
    ),
    "padding": (
        "What padding costs a single request",
        """One request at a time, in decode steps of a fixed number of rows: all rows but one are padding. Systems that
        do not pad are level lines. Both axes are logarithmic. This is the worst case of a fixed shape.""",
    ),
    "ablation": (
        "What each constraint costs",
        """Output throughput as a share of std's: std+nosplit is std without split-KV in decode attention, std+isolated
        is std with each prompt's prefill by itself, and colocated has both and decode steps of a fixed shape. Medians
        over repeats, whiskers the lowest and the highest.""",
    ),
    "kernels": (
        "Kernels by themselves",
        """Median latency of a call, a line from the fastest to the slowest one, and how many times std's median it is.
        Whether bits depend on the batch or on the place in it was measured, with the same rows in other batches and
        other places. The smallest and the largest number of rows are drawn; the table below has all.""",
    ),
}


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
    figures = [path for chart in made for path in save(chart.figure, directory / FIGURES, chart.name)]
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
            title, caption = _CAPTIONS[kind]
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
