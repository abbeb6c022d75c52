"""The report: what its tables say, that it stands alone, and that nothing in a result file becomes markup."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tyro
from rich.console import Console

from corun.errors import InvalidArgumentError
from corun_bench.cli import Report
from corun_bench.report import page as report
from corun_bench.report import tables, views
from corun_bench.report.looks import looks
from corun_bench.report.tables import NOTHING, TIMES, Table
from corun_bench.systems import KINDS
from tests.bench.report.results import HOSTILE, document, kernel, results, run, system


class Page(HTMLParser):
    """Tags that are open, all tags and attributes seen, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def written(tmp_path: Path, found: views.Results, **options: str) -> tuple[Page, list[Path]]:
    paths = report.write(found, tmp_path / "report", **options)
    return Page(paths[0].read_text(encoding="utf-8")), paths


def cells(table: Table, name: str, at: int = 0) -> dict[str, str]:
    """The first row of a system, by column."""
    (row, *_) = [row for row in table.sections[at].rows if row.system == name]
    return dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))


def full() -> views.Results:
    again = {"system": "std", "workload": "in=8,out=4", "requests": 8, "different_tokens": 1, "different_bits": 3}
    handoff = {"count": 4, "bytes": 10, "failed": 0, "gb_per_s": 41.2, "mean_ms": 8.1}
    runs = [
        run("std", output_throughput=100.0),
        run("std", output_throughput=300.0, repeat=1),
        run("std", output_throughput=200.0, repeat=2),
        run("cluster:shared", output_throughput=320.0, slot_occupancy=0.75, failed=1),
    ]
    systems = [system("std"), system("cluster:shared", 2, handoff=handoff)]
    return results(*runs, systems=systems, mismatches=[again], kernels=[kernel("mean", "std")])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, list[Path]]:
    """The whole report, written once."""
    return written(tmp_path_factory.mktemp("page"), full())


def test_table_has_medians_ratios_and_bits() -> None:
    table = tables.throughputs(full(), "std")
    std, cluster = cells(table, "std"), cells(table, "cluster:shared")
    times = TIMES
    assert std["output tokens/s"] == "200"
    assert std["min … max"] == "100 … 300"
    assert (std[f"{times} std"], cluster[f"{times} std"]) == ("1.00", "1.60")
    assert (std["per GPU"], cluster["per GPU"]) == ("200", "160")
    assert (std["bits differ"], cluster["bits differ"]) == ("3 of 8", "not run again")
    assert (std["repeats"], std["failed"], cluster["failed"]) == ("3", "0", "1")
    assert (std["slots in use"], cluster["slots in use"]) == (NOTHING, "75.0%")
    assert table.sections[0].title == "in=8,out=4, 256 in flight"


def test_large_numbers_keep_their_digits() -> None:
    table = tables.throughputs(results(run("std", output_throughput=12345.6)), "std")
    assert cells(table, "std")["output tokens/s"] == "12,346"


def test_columns_that_nothing_has_are_left_out() -> None:
    assert "slots in use" in tables.throughputs(full(), "std").columns
    assert "slots in use" not in tables.throughputs(results(run("std")), "std").columns


def test_latencies() -> None:
    assert cells(tables.latencies(full(), "std"), "std") == {"TTFT median": "12.5"}


def test_systems_have_their_handoffs() -> None:
    table = tables.systems(full())
    std, cluster = cells(table, "std"), cells(table, "cluster:shared")
    names = ("handoffs", "failed", "handoff ms", "handoff GB/s")
    assert [cluster[name] for name in names] == ["4", "0", "8.1", "41.2"]
    assert {std[name] for name in names} == {NOTHING}
    assert "handoffs" not in tables.systems(results(run("std"), systems=[system("std")])).columns
    assert "GPU memory" not in table.columns, "nothing is known about it"


def test_the_printed_table_has_speed_and_bits() -> None:
    printed = Console(width=200, file=io.StringIO(), record=True)
    printed.print(tables.printed(full(), "std"))
    lines = [line.split() for line in printed.export_text().splitlines()]
    head = " ".join(lines[1])
    assert all(words in head for words in ("output tokens/s", f"{TIMES} std", "TTFT median ms", "bits differ"))
    std, cluster = (next(line for line in lines[2:] if name in line) for name in ("std", "cluster:shared"))
    assert std[:4] == ["in=8,out=4,", "256", "in", "flight"]
    assert {"200", "100", "300", "1.00", "12.5", "3", "of", "8"} <= set(std)
    assert cluster[:2] == ["cluster:shared", "320"], "the workload is named once"


def test_aggregate_is_weighted_by_time_over_workloads_that_all_systems_ran() -> None:
    runs = [
        run("std", "a", output_throughput=100.0, duration=1.0),
        run("std", "b", output_throughput=10.0, duration=9.0),
    ]
    runs += [run("bi", "a", output_throughput=50.0, duration=2.0), run("bi", "b", output_throughput=5.0, duration=18.0)]
    found = results(*runs, run("std", "only here", output_throughput=9999.0))
    assert tables.aggregate(found, "std", ["a", "b"]) == pytest.approx((100 * 1 + 10 * 9) / 10)
    assert tables.aggregate(found, "bi", ["a", "only here"]) is None
    summary = tables.summary(found, "std")
    assert cells(summary, "std")["output tokens/s"] == "19"
    assert cells(summary, "bi")[f"{TIMES} std"] == "0.50"


def test_ratios_are_against_the_chosen_baseline() -> None:
    assert report.choose_baseline(full(), "") == "std"
    assert report.choose_baseline(full(), "cluster:shared") == "cluster:shared"
    assert report.choose_baseline(results(run("other")), "") == "other"
    assert report.choose_baseline(results(), "") == ""
    with pytest.raises(InvalidArgumentError, match="baseline = 'bi': must be a system with runs: std, cluster:shared"):
        report.choose_baseline(full(), "bi")


def test_report_stands_alone(page: tuple[Page, list[Path]]) -> None:
    text, paths = page
    assert text.open == []
    assert text.tags.count("svg") == sum(path.suffix == ".svg" for path in paths) == 3
    assert {"script", "link", "img", "iframe", "object", "base"}.isdisjoint(text.tags)
    links = [value for name, value in text.attributes if name in {"src", "href", "xlink:href", "action"}]
    assert all(link.startswith("#") for link in links)
    assert all("url(#" in value for _, value in text.attributes if "url(" in value)
    assert "prefers-color-scheme: dark" in text.text


def test_references_within_figures_hold(page: tuple[Page, list[Path]]) -> None:
    attributes = page[0].attributes
    ids = {value for name, value in attributes if name == "id"}
    used = {value[1:] for name, value in attributes if name == "xlink:href"}
    used |= {found for _, value in attributes for found in re.findall(r"url\(#([^)]*)\)", value)}
    assert used
    assert used <= ids


def test_report_says_what_was_measured_where(page: tuple[Page, list[Path]]) -> None:
    for words in ("H200", "0.26.0", "corun bench", "3 of 8", "engine 3000.5", "41.5", "Kernels", "results.json"):
        assert words in page[0].text


def test_nothing_is_said_about_what_is_not_there(tmp_path: Path) -> None:
    page, paths = written(tmp_path, results(run("std")))
    assert [path.name for path in paths] == ["report.html", "throughput.png", "throughput.svg"]
    for words in ("Kernels", "Memory", "Scaling", "padding costs", "Time to first"):
        assert words not in page.text
    page, paths = written(tmp_path, views.Results())
    assert [path.name for path in paths] == ["report.html"]
    assert "Throughput and determinism" not in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    facts = {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    timeline = {"bin_s": 1.0, "prefill_tokens_per_s": [1.0], "decode_tokens_per_s": [1.0]}
    entry = system(HOSTILE, memory={HOSTILE: 1.5}, gpu_memory=facts, fingerprint=HOSTILE, settings=facts)
    again = {"system": HOSTILE, "workload": HOSTILE, "requests": 1, "different_bits": 1}
    found = views.merge(
        {
            HOSTILE: document(
                command=[HOSTILE],
                conditions={"model": HOSTILE, "hardware": facts, HOSTILE: HOSTILE},
                systems=[entry],
                runs=[run(HOSTILE, HOSTILE, timeline=timeline, ttfts=[1.0])],
                mismatches=[again],
                kernels=[kernel(HOSTILE, HOSTILE)],
            )
        }
    )
    assert "script" in Page(HOSTILE.removeprefix("</svg>")).tags, "it would be a tag if it were let"
    page, paths = written(tmp_path, found)
    assert "script" not in page.tags
    assert page.open == []
    assert page.text.count("<script>alert") > 8, "it is there, as text"
    inside = [path.relative_to(tmp_path / "report").as_posix() for path in paths[1:]]
    assert all(re.fullmatch(r"figures/[a-z0-9-]+\.(png|svg)", name) for name in inside)


def test_captions_are_there_for_every_figure() -> None:
    runs = [run("std", max_concurrency=c, ttfts=[1.0], tpots=[1.0]) for c in (1, 2)]
    made = {chart.name: chart for chart in report.charts(results(*runs))}
    assert list(made) == ["throughput", "ttft", "tpot", "scaling"]
    assert all(chart.title and len(chart.caption) > 60 for chart in made.values())


def test_files_are_merged() -> None:
    found = views.merge(
        {
            "a": document(runs=[run("std")], systems=[system("std")]),
            "b": document(runs=[run("bi"), run("std", repeat=1)], systems=[system("std")]),
            "k": {
                "schema": "corun-bench-kernels-1",
                "conditions": {"model": "a path"},
                "kernels": [kernel("mean", "std")],
            },
        }
    )
    assert found.names == ["std", "bi"]
    assert len(found.runs_of("in=8,out=4", "std")) == 2
    assert len(found.kernels) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            document(conditions={"model": "other"}),
            "b: model = 'other': must be the model of all files, and a has 'tiny'",
        ),
        (document(systems=[system("std", 2)]), "system std: gpus = 2: must be 1"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(other: dict[str, Any], message: str) -> None:
    files = {"a": document(systems=[system("std")]), "b": other}
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        views.merge(files)


def test_other_conditions_are_told(page: tuple[Page, list[Path]]) -> None:
    conditions = {**document()["conditions"], "hardware": {"gpu": "L4"}, "versions": {"vllm": "0.26.0"}}
    files = {"a": document(), "b": document(conditions=conditions)}
    assert list(report.notices(views.merge(files))) == [
        "These files were not measured under the same conditions: hardware (gpu)."
    ]
    assert list(report.notices(results(run("std")))) == []
    assert "Requests failed: cluster:shared" in page[0].text
    assert "nothing is known about their bits: cluster:shared" in page[0].text


def test_systems_are_in_one_order() -> None:
    names = [
        "http://x:1",
        "cluster:2p1d",
        "cluster:shared",
        "colocated+ladder",
        "bi",
        "colocated::512",
        "cluster",
        "std",
    ]
    found = views.in_order([*names, "std+isolated", "colocated", "std"])
    kinds = ["std", "std+isolated", "bi", "colocated::512", "colocated", "colocated+ladder"]
    assert found == [*kinds, "cluster", "cluster:shared", "cluster:2p1d", "http://x:1"]
    assert set(KINDS) == set(views.ORDER)
    assert not views.is_ablation("colocated+ladder")
    known = looks(list(KINDS))
    assert len({look.colour for look in known.values()}) == len(KINDS), "each has its own"


def command(*args: str) -> Report:
    return tyro.cli(Report, args=args, config=(tyro.conf.FlagCreatePairsOff,))


def test_command_writes_files_and_prints_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, name in zip(paths, ("std", "bi"), strict=True):
        path.write_text(json.dumps(document(runs=[run(name)])))
    out = tmp_path / "out"
    assert command(*map(str, paths), "-o", str(out), "--baseline", "bi").run() == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(out / name) for name in ("report.html", "figures/throughput.png", "figures/throughput.svg")]
    assert all(Path(path).is_file() for path in printed)


def test_command_without_files_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="files"):
        command("-o", str(tmp_path)).run()


def test_command_is_light_until_it_runs() -> None:
    code = "import sys, corun_bench.cli; sys.exit(any(m in sys.modules for m in ('matplotlib', 'jinja2', 'PIL')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_template_and_samples_are_in_the_wheel(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    root = Path(report.__file__).parents[2]
    wheel = next(iter(builder(str(root)).build(directory=str(tmp_path), versions=["standard"])))
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith(".py")}
    samples = ("blazedit.jsonl", "burstgpt.csv", "sharegpt.json")
    assert {"corun_bench/report/page.html.j2", *(f"corun_bench/workloads/samples/{name}" for name in samples)} <= found
