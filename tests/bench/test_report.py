"""The report: its text and its figures are the golden ones, and nothing in a result file becomes markup.

`python -m tests.bench.test_report` writes the golden files again: look at what changed.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from corun.errors import InvalidArgumentError
from corun_bench import figures, report, results, tables
from corun_bench.cli import Report
from corun_bench.results import Results, merge
from corun_bench.systems import KINDS

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = '</svg><script>alert("$x^$")</script><!-- & _\ud800\u4e2d\x00'


class Page(HTMLParser):
    """Tags that are open, all tags and attributes seen, and the text between them outside of figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += {"td": " | ", "th": " | ", "tr": "\n"}.get(tag, "")

    def handle_data(self, data: str) -> None:
        if "svg" not in self.open and "style" not in self.open:
            self.text += data.strip(" ")


def golden() -> Results:
    read = {
        name: results.read(GOLDEN / name, (results.SCHEMA, results.KERNELS_SCHEMA))
        for name in ("result.json", "kernels.json")
    }
    return merge(read)


def run(system: str, workload: str = "in=8,out=4", **values: Any) -> dict[str, Any]:
    found = {"output_throughput": 100.0, "duration": 2.0, "max_concurrency": 256}
    return {"system": system, "workload": workload, **found, **values}


def document(*runs: dict[str, Any], **values: Any) -> dict[str, Any]:
    conditions = {"hardware": {"gpu": "H200"}, "versions": {"vllm": "0.26.0"}, "model": "tiny"}
    empty = {"command": ["corun", "bench"], "systems": [], "mismatches": []}
    return {"schema": results.SCHEMA, "conditions": conditions, **empty, "runs": list(runs), **values}


def of(*runs: dict[str, Any], **values: Any) -> Results:
    return merge({"r.json": document(*runs, **values)})


def shown(directory: Path) -> tuple[str, list[Path]]:
    """The whole report as text: what the page says, and what `corun bench` prints."""
    pages = report.write(golden(), directory)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.printed(golden(), "std"))
    text = Page(pages[0].read_text(encoding="utf-8")).text + console.export_text()
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n", pages


def drawn(found: Results) -> Iterator[tuple[str, Figure]]:
    for kind, draw in figures._FIGURES.items():
        for workload in found.workloads if kind == "timeline" else [None]:
            figure = draw(found, workload) if workload else draw(found)
            if figure is not None:
                yield f"{kind} {workload or ''}".strip(), figure


def seen(figure: Figure) -> dict[str, Any]:
    """What a figure shows, by what is read back from it."""

    def rounded(values: Any) -> list[float]:
        return [round(float(value), 6) for value in values]

    axes = []
    for ax in figure.axes:
        bars = [[round(bar.get_x() + bar.get_width() / 2, 6), bar.get_height()] for bar in ax.patches]
        lines = [
            [line.get_color(), rounded(line.get_xdata()), rounded(line.get_ydata()), str(line.get_marker())]
            for line in ax.get_lines()
        ]
        ticks = [label.get_text() for label in (*ax.get_xticklabels(), *ax.get_yticklabels())]
        hatched = [bool(bar.get_hatch()) for bar in ax.patches]
        segments = [rounded(line.ravel()) for found in ax.collections for line in found.get_segments()]
        texts = [text.get_text() for text in ax.texts]
        axes.append([ax.get_title(), ax.get_xscale(), bars, hatched, lines, segments, texts, ticks])
    labels = [figure.get_supxlabel(), figure.get_supylabel()]
    return {"labels": labels, "legend": [text.get_text() for text in figure.legends[0].get_texts()], "axes": axes}


def all_seen() -> dict[str, Any]:
    return {name: seen(figure) for name, figure in drawn(golden())}


def test_the_report_is_the_golden_one_and_stands_alone(tmp_path: Path) -> None:
    text, paths = shown(tmp_path)
    assert text == (GOLDEN / "report.txt").read_text(encoding="utf-8")
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert page.open == []
    assert page.tags.count("svg") == sum(path.suffix == ".svg" for path in paths) == 9
    assert {"script", "link", "img", "iframe", "object", "base"}.isdisjoint(page.tags)
    links = [value for name, value in page.attributes if name in {"src", "href", "xlink:href", "action"}]
    used = {value[1:] for value in links}
    used |= {found for _, value in page.attributes for found in re.findall(r"url\(#([^)]*)\)", value)}
    assert all(link.startswith("#") for link in links)
    assert used <= {value for name, value in page.attributes if name == "id"}
    again = report.write(golden(), tmp_path / "again")
    for one, other in zip(paths, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), "files have the same bytes each time"
    assert max(path.stat().st_size for path in paths[1:]) < 150_000


def test_figures_show_the_golden_numbers() -> None:
    found = json.loads(json.dumps(all_seen()))
    expected = json.loads((GOLDEN / "figures.json").read_text(encoding="utf-8"))
    assert list(found) == list(expected)
    for name, figure in found.items():
        assert figure == expected[name], name


@pytest.mark.parametrize(
    "found",
    [
        Results(),
        of(),
        of({"system": "std", "workload": "in=8,out=4"}),
        of(run("std", output_throughput=None, timeline=None, ttfts=None, tpots="x", max_concurrency=None)),
        of(run("std", output_throughput=float("nan"), timeline={"bin_s": 0}, ttfts=[], tpots=[None])),
        of(run("std", output_throughput=True, timeline={"bin_s": 1, "prefill_tokens_per_s": [None]})),
        of(kernels=[{"kernel": "mean", "variant": "std"}]),
        of(run("std+nosplit"), run("std", "padding=1")),
    ],
)
def test_nothing_is_drawn_or_said_from_nothing(found: Results, tmp_path: Path) -> None:
    assert dict(drawn(found)) == {}
    page, *others = report.write(found, tmp_path)
    assert others == []
    assert "Throughput per workload" not in page.read_text()


def test_odd_numbers_and_names_are_drawn() -> None:
    figure = dict(drawn(of(run("_mine", output_throughput=0))))["throughput"]
    assert (seen(figure)["axes"][0][2], seen(figure)["legend"]) == ([[0.0, 0.0]], ["_mine"])
    many = [float(i) for i in range(1, 1001)]
    (line,) = seen(dict(drawn(of(run("std", ttfts=many))))["ttft"])["axes"][0][4]
    assert len(line[1]) == figures.MAX_POINTS + 1
    assert (line[1][1], line[1][-1], line[2][-1]) == (0.001, 1.0, 1.0)
    wide = dict(drawn(of(run("std", ttfts=[0.5, 1.0, 900.0]))))["ttft"]
    assert (wide.get_supxlabel(), wide.axes[0].get_xscale()) == ("time to first token (ms, 256 in flight)", "log")
    assert figures.wrap("word " * 30, 20).count("\n") == 2
    assert figures.wrap("in=512,out=256", 10) == "in=512,\nout=256"
    assert [tables.compact(x) for x in (0.53, 7.25, 12.34, 9999, 12345, 2e6)] == [
        "0.53", "7.2", "12.3", "9999", "12.3k", "2M"
    ]  # fmt: skip


def test_good_requests_are_drawn_over_arrival_rates() -> None:
    def at(system: str, rate: float, good: float | None, name: str = "") -> dict[str, Any]:
        name = name or f"in=8,out=4,rate={rate:g}"
        return run(system, name, request_rate=rate, request_goodput=good, completed=7, failed=1)

    runs = [at("std", 8, 4.0), at("std", 16, 3.0), at("std", 16, 1.0), at("pd-std", 16, 4.0)]
    named = [at("pd-std", 8, 2.0, "rate=8,in=8,out=4"), at("std", 4, 4.0, "burstgpt"), at("std", 8, 3.0, "burstgpt")]
    left_out = [at("std", 8, 4.0, "in=9,out=4,rate=8"), at("std", 8, None, "in=7"), at("std", 9, None, "in=7")]
    figure = dict(drawn(of(*runs, *named, *left_out, run("std"))))["goodput"]
    seen = {
        ax.get_title(): {
            str(line.get_color()): line.get_xydata().tolist() for line in ax.get_lines() if line.get_marker() in "sv"
        }
        for ax in figure.axes
    }
    std, pd_std = (figures.looks([])[name].colour for name in ("std", "pd-std"))
    assert seen == {
        "in=8,out=4": {std: [[8.0, 1.0], [16.0, 0.5]], pd_std: [[8.0, 0.5], [16.0, 1.0]]},
        "burstgpt": {std: [[4.0, 1.0], [8.0, 0.75]]},
    }, "One rate is no curve, and without limits no request is good or bad."
    assert "goodput" not in dict(drawn(of(run("std"), *left_out)))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    facts = {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    timeline = {"bin_s": 1.0, "prefill_tokens_per_s": [1.0], "decode_tokens_per_s": [1.0]}
    entry = {"system": HOSTILE, "memory": {HOSTILE: 1.5}, "gpu_memory": facts, "fingerprint": HOSTILE}
    values = document(
        run(HOSTILE, HOSTILE, timeline=timeline, ttfts=[1.0]),
        command=[HOSTILE],
        conditions={"model": HOSTILE, "hardware": facts, HOSTILE: HOSTILE},
        systems=[{**entry, "settings": facts}],
        mismatches=[{"system": HOSTILE, "workload": HOSTILE, "requests": 1, "different_bits": 1}],
        kernels=[{"kernel": HOSTILE, "variant": HOSTILE, "rows": 1, "median_us": 1.0}],
    )
    assert "script" in Page(HOSTILE.removeprefix("</svg>")).tags, "it would be a tag if it were let"
    paths = report.write(merge({HOSTILE: values}), tmp_path)
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert page.open == []
    assert page.text.count("<script>alert") > 8, "it is there, as text"
    names = [path.relative_to(tmp_path).as_posix() for path in paths[1:]]
    assert all(re.fullmatch(r"figures/[a-z0-9-]+\.(png|svg)", name) for name in names)
    assert not any("alert" in path.read_text() for path in paths if path.suffix == ".svg")


def test_ratios_are_against_the_chosen_baseline() -> None:
    assert report.choose_baseline(golden(), "bi") == "bi"
    assert report.choose_baseline(of(run("other")), "") == "other"
    assert report.choose_baseline(of(), "") == ""
    with pytest.raises(InvalidArgumentError, match="baseline = 'x': must be a system with runs: std, bi"):
        report.choose_baseline(of(run("std"), run("bi")), "x")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (document(conditions={"model": "other"}), "b: model = 'other': must be the model of all files, and a has"),
        (document(systems=[{"system": "std", "gpus": {"total": 2}}]), "system std: gpus = 2: must be 1"),
    ],
)
def test_files_are_merged_unless_they_do_not_belong_together(other: dict[str, Any], message: str) -> None:
    first = document(run("std"), systems=[{"system": "std", "gpus": {"total": 1}}])
    found = merge({"a": first, "b": document(run("bi"), run("std"))})
    assert (found.names, len(found.runs_of("in=8,out=4", "std"))) == (["std", "bi"], 2)
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        merge({"a": first, "b": other})


def test_the_aggregate_is_weighted_by_time() -> None:
    found = of(
        run("std", "a", output_throughput=100.0, duration=1.0), run("std", "b", output_throughput=10.0, duration=9.0)
    )
    assert tables.aggregate(found, "std", ["a", "b"]) == pytest.approx(19.0)
    assert tables.aggregate(found, "std", ["a", "c"]) is tables.aggregate(found, "std", []) is None


def test_other_conditions_are_told() -> None:
    other = {"model": "tiny", "hardware": {"gpu": "L4"}, "versions": {"vllm": "0.26.0"}}
    assert list(report.notices(merge({"a": document(), "b": document(conditions=other)}))) == [
        "These files were not measured under the same conditions: hardware (gpu)."
    ]
    assert list(report.notices(of(run("std")))) == []


def test_systems_are_in_one_order_and_have_a_colour_each() -> None:
    kinds = ["std", "std+isolated", "bi", "colocated", "colocated+ladder"]
    expected = [*kinds, "cluster", "cluster:shared", "cluster:2p1d", "http://x:1"]
    assert results.in_order(sorted(expected, reverse=True)) == expected
    assert not results.is_ablation("colocated+ladder")
    many = figures.looks([*KINDS, "cluster:2p2d", "a", "b", "c"])
    assert len({many[name].colour for name in (*KINDS, "cluster:2p2d", "a", "b", "c")}) == len(KINDS) + 4


def command(*args: str) -> Report:
    return tyro.cli(Report, args=args, config=(tyro.conf.FlagCreatePairsOff,))


def test_the_command_writes_files_and_prints_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, name in zip(paths, ("std", "bi"), strict=True):
        path.write_text(json.dumps(document(run(name))))
    out = tmp_path / "out"
    assert command(*map(str, paths), "-o", str(out), "--baseline", "bi").run() == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(out / name) for name in ("report.html", "figures/throughput.png", "figures/throughput.svg")]
    assert all(Path(path).is_file() for path in printed)
    with pytest.raises(InvalidArgumentError, match="files"):
        command("-o", str(tmp_path)).run()


def test_template_and_samples_are_in_the_wheel(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    root = Path(report.__file__).parents[1]
    wheel = next(iter(builder(str(root)).build(directory=str(tmp_path), versions=["standard"])))
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith(".py")}
    samples = ("blazedit.jsonl", "burstgpt.csv", "sharegpt.json")
    assert {
        "corun_bench/page.html.j2",
        "corun_bench/figures.mplstyle",
        *(f"corun_bench/samples/{name}" for name in samples),
    } <= found


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        (GOLDEN / "report.txt").write_text(shown(Path(directory))[0], encoding="utf-8")
    lines = (f'"{name}": {json.dumps(figure)}' for name, figure in all_seen().items())
    (GOLDEN / "figures.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
