"""Many prompts at once: their order, their bound, their errors, and the bar on a terminal."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from corun import Client, InvalidArgumentError, OverloadedError, SamplingParams, UnavailableError
from corun.client.progress import LABEL_WIDTH, ProgressBar, in_figures, new_bar
from tests.corun.fake_router import WAIT_S, FakeRouter, sample_output

PARAMS = SamplingParams(max_tokens=6, logprobs=True)


def test_generate_many_keeps_the_order_and_the_bound(client: Client, fake: FakeRouter) -> None:
    fake.errors += [OverloadedError("queue full", 0.1), OverloadedError("queue full", 0.1)]  # It comes back.
    prompts = [f"prompt {i}" for i in range(30)]
    done = client.generate_many(prompts, PARAMS, seeds=list(range(30)), concurrency=4)
    assert [g.seed for g in done] == list(range(30))
    assert [g.token_ids for g in done] == [
        tuple(t for t, _ in sample_output(tuple(p.encode()), i, 6)) for i, p in enumerate(prompts)
    ]
    assert (fake.most_running <= 4, len(fake.requests)) == (True, 32)
    done = client.generate_many(["a", [1]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [len(g.token_ids) for g in done] == [2, 3]
    assert client.generate_many([]) == []


def test_who_is_told_to_come_back_too_late_or_at_once_does_not_wait(client: Client, fake: FakeRouter) -> None:
    fake.errors.append(OverloadedError("queue full", 60))
    with pytest.raises(OverloadedError, match="queue full"):
        client.generate_many(["a"], PARAMS, timeout_s=5)
    fake.errors.append(UnavailableError("shutting down", 60))
    with pytest.raises(UnavailableError, match="shutting down"):
        client.generate("a", PARAMS, timeout_s=5)
    fake.errors.append(OverloadedError("queue full", 0.1))
    with pytest.raises(OverloadedError) as caught:
        client.generate("a")
    assert caught.value.retry_after_s == 0.1


def test_the_first_error_ends_a_batch(client: Client, fake: FakeRouter) -> None:
    fake.gate.clear()
    fake.refused_prompts["bad"] = InvalidArgumentError("prompt.text", "bad", "must be good")
    fake.refused_beside = 1  # So that there is a call to cancel.
    with pytest.raises(InvalidArgumentError, match=r"prompts\[1\]\.prompt\.text = 'bad': must be good"):
        client.generate_many(["a", "bad", "c", "d"], PARAMS, concurrency=2)
    assert fake.cancelled.wait(WAIT_S)
    assert len(fake.requests) < 4


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompts": "text"}, "prompts"),
        ({"prompts": b"text"}, "prompts"),
        ({"prompts": None}, "prompts"),
        ({"prompts": ["a", ""]}, "prompts[1].prompt.text"),
        ({"prompts": ["a"], "seeds": 1}, "seeds"),
        ({"prompts": ["a"], "seeds": [1, 2]}, "seeds"),
        ({"prompts": ["a"], "params": []}, "params"),
        ({"prompts": ["a"], "params": {"max_tokens": 4}}, "params"),
        ({"prompts": ["a"], "concurrency": 0}, "concurrency"),
    ],
)
def test_a_bad_batch_is_refused_before_anything_is_sent(
    client: Client, fake: FakeRouter, arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate_many(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not fake.requests


def test_only_long_work_shows_a_bar(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # As on a terminal.
    client.generate_many(["a", "b"], PARAMS, progress=True)
    assert capsys.readouterr().err == ""
    shown, deadline = "", time.monotonic() + WAIT_S
    with ProgressBar(2, "prompts", shown=True, delay_s=0.01) as bar:
        bar.advance()
        while "0:00:0" not in shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert "prompts" in shown
    assert " left" in shown


def test_a_process_without_stderr_shows_no_bar(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none in a process that began with it closed, as some daemons do."""
    monkeypatch.setattr("sys.stderr", None)
    assert len(client.generate_many(["a"], PARAMS)) == 1


def test_what_is_left_goes_by_the_pace_of_the_whole() -> None:
    """Runs of 40 s each, of which none ends within half a minute after another."""
    bar, now = new_bar(), 0.0
    bar.get_time = lambda: now
    task = bar.add_task("runs", total=40)
    for _ in range(12):
        now += 40
        bar.advance(task)
    assert bar.tasks[0].time_remaining == 28 * 40
    shown = [column(bar.tasks[0]) for column in bar.columns if not isinstance(column, str)]
    assert "0.025/s" in [getattr(each, "plain", "") for each in shown]


@pytest.mark.parametrize(
    ("unit", "label", "total"),
    [
        ("items", "placements", 123_456),
        ("bytes", "converting smollm2", 92_871_040),
        ("share", "15 of 16 nodes ready", 1),
    ],
)
def test_a_bar_is_one_line_of_80_columns_with_what_is_left(unit: Any, label: str, total: int) -> None:
    bar, now = new_bar(unit=unit), 0.0
    bar.get_time = lambda: now
    task = bar.add_task(label, total=total)
    for part in (0.1, 0.4):
        now += 3600
        bar.update(task, completed=total * part)
    shown = io.StringIO()
    Console(file=shown, width=80, force_terminal=True, color_system=None).print(bar.get_renderable())
    (line,) = shown.getvalue().splitlines()
    assert line.startswith(label if len(label) <= LABEL_WIDTH else label[: LABEL_WIDTH - 1])
    assert line.rstrip().endswith("2:00:00 2:00:00 left" if unit != "share" else "2:00:00 about 2:00:00 left"), line
    assert ("/s " in line) == (unit != "share")


def test_rates_have_figures_and_no_exponents() -> None:
    found = {value: in_figures(value) for value in (0, 0.0001, 0.025, 1.5, 99.96, 1234567.8)}
    assert list(found.values()) == ["0", "<0.001", "0.025", "1.5", "100", "1,234,568"]
