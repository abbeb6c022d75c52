"""Figures say what the results say: numbers are read back from what was drawn."""

from __future__ import annotations

import re
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from corun_bench.report import plots
from corun_bench.report.looks import clean, compact, looks, save, svg_of, wrap
from corun_bench.report.views import Results
from tests.bench.report.results import HOSTILE, kernel, results, run, system

ALL = (
    plots.throughput,
    lambda found: plots.timeline(found, "in=8,out=4"),
    lambda found: plots.latency_cdf(found, "ttft"),
    lambda found: plots.latency_cdf(found, "tpot"),
    plots.scaling,
    plots.padding,
    plots.ablation,
    plots.kernels,
)


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bars(ax: Axes) -> dict[str, float]:
    """Heights by colour."""
    found = [bar for container in ax.containers if isinstance(container, BarContainer) for bar in container]
    return {to_hex(bar.get_facecolor()): bar.get_height() for bar in found}


def whiskers(ax: Axes) -> list[tuple[float, float]]:
    found = [container for container in ax.containers if isinstance(container, ErrorbarContainer)]
    segments = [segment for container in found for lines in container[2] for segment in lines.get_segments()]
    return [(segment[0][1], segment[1][1]) for segment in segments]


def colour(name: str) -> str:
    return to_hex(looks([name])[name].colour)


def line(ax: Axes, name: str) -> tuple[list[float], list[float]]:
    """What the line of a system shows."""
    found = [one for one in ax.get_lines() if to_hex(one.get_color()) == colour(name) and one.get_label()[0] == "_"]
    (only,) = [one for one in found if len(one.get_xdata()) > 1 and one.get_linestyle() != "None"]
    return list(only.get_xdata()), list(only.get_ydata())


def test_bars_are_medians_with_all_repeats_in_their_whiskers() -> None:
    values = {"std": (90.0, 120.0, 100.0), "bi": (40.0, 41.0, 45.0)}
    runs = [run(name, output_throughput=value) for name, of in values.items() for value in of]
    (ax,) = drawn(plots.throughput(results(*runs))).axes
    assert bars(ax) == {colour(name): statistics.median(of) for name, of in values.items()}
    assert whiskers(ax) == [(min(of), max(of)) for of in values.values()]


def test_one_repeat_has_no_whiskers() -> None:
    (ax,) = drawn(plots.throughput(results(run("std")))).axes
    assert whiskers(ax) == []


def test_a_panel_for_each_workload_and_none_for_a_padding_sweep_or_an_ablation() -> None:
    runs = [run("std", "in=8,out=4"), run("std", "rl=2x2"), run("std", "padding=8"), run("std+nosplit", "rl=2x2")]
    figure = drawn(plots.throughput(results(*runs)))
    assert [ax.get_title() for ax in figure.axes] == ["in=8,out=4", "rl=2x2"]
    assert legend(figure) == ["std"]


def test_bars_whose_bits_differ_are_hatched_and_counted() -> None:
    counts = {"std": 3, "bi": 0}
    found = [
        {"system": name, "workload": "in=8,out=4", "requests": 8, "different_tokens": 1, "different_bits": bits}
        for name, bits in counts.items()
    ]
    figure = drawn(plots.throughput(results(*map(run, ("std", "bi", "colocated")), mismatches=found)))
    patches = {to_hex(bar.get_facecolor()): bar.get_hatch() for bar in figure.axes[0].patches}
    assert [bool(patches[colour(name)]) for name in ("std", "bi", "colocated")] == [True, False, False]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["3/8", "0/8", ""]
    assert legend(figure)[-1] == "bits differ"


def test_nothing_is_said_about_bits_that_nobody_compared() -> None:
    figure = drawn(plots.throughput(results(run("std"))))
    assert legend(figure) == ["std"]
    assert not any(bar.get_hatch() for bar in figure.axes[0].patches)


def test_throughput_per_gpu_divides_by_all_gpus() -> None:
    found = results(run("std"), run("cluster:shared"), systems=[system("std", 1), system("cluster:shared", 2)])
    figure = drawn(plots.throughput(found, per_gpu=True))
    assert bars(figure.axes[0]) == {colour("std"): 100.0, colour("cluster:shared"): 50.0}
    assert legend(figure) == ["std (1 GPU)", "cluster:shared (2 GPUs)"]


def test_bars_stand_for_the_concurrency_that_most_systems_ran() -> None:
    runs = [run("std", max_concurrency=512, output_throughput=7.0), run("std"), run("bi", output_throughput=40.0)]
    (ax,) = drawn(plots.throughput(results(*runs))).axes
    assert bars(ax) == {colour("std"): 100.0, colour("bi"): 40.0}


def test_timeline_shows_both_phases_of_the_first_repeat() -> None:
    first = {"bin_s": 0.5, "prefill_tokens_per_s": [10, 20, 0], "decode_tokens_per_s": [0, 5, 7]}
    second = {"bin_s": 0.5, "prefill_tokens_per_s": [1], "decode_tokens_per_s": [1]}
    prefill, decode = drawn(
        plots.timeline(results(run("bi", timeline=first), run("bi", timeline=second)), "in=8,out=4")
    ).axes
    assert line(prefill, "bi") == ([0.25, 0.75, 1.25], [10, 20, 0])
    assert line(decode, "bi") == ([0.25, 0.75, 1.25], [0, 5, 7])


def test_bins_of_a_long_timeline_are_averaged() -> None:
    long = {"bin_s": 1.0, "prefill_tokens_per_s": [0.0, 10.0] * plots.MAX_BINS, "decode_tokens_per_s": [1.0]}
    prefill, _ = drawn(plots.timeline(results(run("std", timeline=long)), "in=8,out=4")).axes
    times, values = line(prefill, "std")
    assert values == [5.0] * plots.MAX_BINS
    assert times[:2] == [1.0, 3.0]


def test_cdf_is_over_the_requests_of_all_repeats() -> None:
    runs = [run("std", ttfts=[3000.0, 1000.0], tpots=[5.0]), run("std", ttfts=[2000.0, 4000.0], tpots=[7.0])]
    (ttft,) = drawn(plots.latency_cdf(results(*runs), "ttft")).axes
    (tpot,) = drawn(plots.latency_cdf(results(*runs), "tpot")).axes
    assert line(ttft, "std") == ([1.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    assert line(tpot, "std") == ([5.0, 5.0, 7.0], [0.0, 0.5, 1.0])


def test_cdf_of_many_samples_keeps_its_ends() -> None:
    samples = [float(i) for i in range(1, 1001)]
    (ax,) = drawn(plots.latency_cdf(results(run("std", ttfts=samples)), "ttft")).axes
    times, shares = line(ax, "std")
    assert len(times) == plots.MAX_QUANTILES + 1
    assert (times[1], times[-1], shares[-1]) == (0.001, 1.0, 1.0)
    assert all(share == pytest.approx(time) for time, share in zip(times[1:], shares[1:], strict=True))


def test_short_times_are_shown_in_ms() -> None:
    figure = drawn(plots.latency_cdf(results(run("std", ttfts=[3.0, 5.0])), "ttft"))
    assert "(ms," in figure.get_supxlabel()
    assert line(figure.axes[0], "std")[0] == [3.0, 3.0, 5.0]


def test_scaling_is_throughput_over_concurrency() -> None:
    runs = [run("std", max_concurrency=c, output_throughput=10.0 * c + i) for c in (1, 4, 16) for i in (0, 1, 2)]
    (ax,) = drawn(plots.scaling(results(*runs, run("std", "rl=2x2")))).axes
    assert line(ax, "std") == ([1, 4, 16], [11.0, 41.0, 161.0])
    assert whiskers(ax) == [(10.0, 12.0), (40.0, 42.0), (160.0, 162.0)]
    assert ax.xaxis.get_transform().base == 2


def test_padding_sweep_has_level_lines_for_systems_that_do_not_pad() -> None:
    runs = [run("colocated", f"padding={n}", output_throughput=64.0 / n) for n in (1, 2, 4)]
    runs += [run("std", "padding=1", output_throughput=70.0), run("bi", "padding=1", output_throughput=30.0)]
    (ax,) = drawn(plots.padding(results(*runs))).axes
    assert line(ax, "colocated") == ([1, 2, 4], [64.0, 32.0, 16.0])
    assert [line(ax, name)[1] for name in ("std", "bi")] == [[70.0, 70.0], [30.0, 30.0]]


def test_ablation_is_relative_to_std() -> None:
    values = {"std": 200.0, "std+nosplit": 180.0, "std+isolated": 150.0, "colocated": 140.0, "bi": 80.0}
    found = results(*(run(name, output_throughput=value) for name, value in values.items()))
    (ax,) = drawn(plots.ablation(found)).axes
    assert bars(ax) == {colour(name): values[name] / 200 for name in values if name != "bi"}
    assert plots.ablation(results(run("std+nosplit"))) is None, "nothing to compare with"
    assert plots.ablation(results(run("std"), run("colocated"))) is None, "no ablation"


def test_kernels_show_latency_slowdown_and_measured_bits() -> None:
    found = [
        kernel("matmul", "std", median_us=10.0, batch_invariant=False),
        kernel("matmul", "bi", median_us=25.0),
        kernel("mean", "std", median_us=3.0, batch_invariant=False, position_invariant=False),
        kernel("failed", "std", median_us=None),
    ]
    figure = drawn(plots.kernels(results(kernels=found)))
    (ax,) = figure.axes
    dots = [one for one in ax.get_lines() if one.get_linestyle() == "None"]
    assert [one.get_xdata()[0] for one in dots] == [10.0, 25.0, 3.0]
    assert [text.get_text() for text in ax.texts] == ["2.50\N{MULTIPLICATION SIGN}"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["matmul", "mean"]
    assert legend(figure) == ["std", "bi", "batch-invariant", "position-invariant only", "neither"]


def test_kernels_are_drawn_for_the_fewest_and_the_most_rows() -> None:
    found = [kernel("mean", variant, rows) for rows, variant in product((1, 8, 256), ("std", "bi"))]
    figure = drawn(plots.kernels(results(kernels=found)))
    assert [ax.get_title() for ax in figure.axes] == ["1 row", "256 rows"]


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize(
    "found",
    [
        Results(),
        results(),
        results({"system": "std", "workload": "in=8,out=4"}),
        results(run("std", output_throughput=None, timeline=None, ttfts=None, tpots="x", max_concurrency=None)),
        results(run("std", output_throughput=float("nan"), timeline={"bin_s": 0}, ttfts=[], tpots=[None])),
        results(run("std", output_throughput=True, timeline={"bin_s": 1, "prefill_tokens_per_s": [None]})),
        results(kernels=[{"kernel": "mean", "variant": "std"}]),
    ],
)
def test_nothing_is_drawn_from_nothing(draw: Any, found: Results) -> None:
    assert draw(found) is None


def test_throughput_of_zero_is_drawn() -> None:
    assert bars(drawn(plots.throughput(results(run("std", output_throughput=0)))).axes[0]) == {colour("std"): 0.0}


def test_colours_are_fixed_for_known_systems_and_stable_for_others() -> None:
    alone, together = looks(["foreign"]), looks(["foreign", "std", "bi"])
    assert alone["foreign"] == together["foreign"]
    assert looks(["std"])["std"] == together["std"]
    names = ["std", "bi", "colocated", "pd-std", "cluster", "cluster:1p1d", "cluster:shared", "std+nosplit"]
    many = looks([*names, "std+isolated", "cluster:2p2d", "cluster:4p4d", "a", "b", "c", "d"])
    assert len({look.colour for look in many.values()}) == len(many)
    assert looks(sorted(many, reverse=True)) == many


def test_files_are_the_same_bytes_each_time_and_small(tmp_path: Path) -> None:
    runs = [run("std", ttfts=[1.0, 2.0]), run("bi", output_throughput=50.0)]
    for name in ("a", "b"):
        save(drawn(plots.throughput(results(*runs))), tmp_path / name, "throughput")
    paths = [tmp_path / name / f"throughput.{kind}" for kind in ("svg", "png") for name in ("a", "b")]
    svg, svg_again, png, png_again = (path.read_bytes() for path in paths)
    assert svg == svg_again
    assert png == png_again
    assert max(len(svg), len(png)) < 150_000
    assert png.startswith(b"\x89PNG")
    assert b"<image" not in svg, "nothing is a picture in a picture"
    assert not re.search(rb"<!--|<metadata|dc:date", svg)
    assert svg_of(drawn(plots.throughput(results(*runs)))).encode() == svg, "with no PNG before it"
    other = svg_of(drawn(plots.throughput(results(*runs, run("colocated")))))
    assert other.encode() != svg, "and it is the figure that decides"


def test_hostile_names_are_drawn_as_text() -> None:
    found = results(run(HOSTILE, HOSTILE), kernels=[kernel(HOSTILE, HOSTILE)])
    for figure in (plots.throughput(found), plots.kernels(found)):
        text = svg_of(drawn(figure))
        assert "script" not in text
        assert "alert" not in text
    assert legend(drawn(plots.throughput(found)))[0].startswith("</svg>")


def test_a_name_that_starts_with_an_underscore_has_a_legend() -> None:
    assert legend(drawn(plots.throughput(results(run("_mine"))))) == ["\u200a_mine"]


def test_words_fit() -> None:
    assert wrap("in=512,out=256", 10) == "in=512,\nout=256"
    assert wrap("in=512,out=256", 20) == "in=512,out=256"
    assert wrap("word " * 30, 20).count("\n") == 2
    assert wrap("") == "(no name)"
    assert clean("a\n\tb\ud800", 10) == "a b\N{REPLACEMENT CHARACTER}"
    assert [compact(x) for x in (0.53, 7, 7.25, 12.34, 128.4, 9999, 12345, 2e6)] == [
        "0.53", "7", "7.2", "12.3", "128", "9999", "12.3k", "2M"
    ]  # fmt: skip


def test_pyplot_is_not_there() -> None:
    for path in Path(plots.__file__).parent.glob("*.py"):
        assert "pyplot as" not in path.read_text()
        assert "import pyplot" not in path.read_text()
