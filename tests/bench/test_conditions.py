from __future__ import annotations

import json
from pathlib import Path

import pytest

from corun.errors import InvalidArgumentError
from corun_bench import conditions

H200 = {"name": "NVIDIA H200", "driver": "580.1", "memory": "143771"}


def test_conditions_are_said_in_lines() -> None:
    found = {
        "hardware": {"cpu": "A CPU", "cores": 8, "gpus": [H200, H200]},
        "versions": {"vllm": "0.26.0"},
        "clocks": {"before": [], "after": [{"clocks.sm": "1860", "clocks.max.sm": "1980"}]},
        "model": {"name": "m"},
        "sampling": "temperature 0.6",
    }
    systems = [{"system": "std", "fingerprint": ""}, {"system": "cluster", "fingerprint": "ab12"}]
    assert list(conditions.lines(found, systems)) == [
        "A CPU, 8 cores; 2 x NVIDIA H200, driver 580.1",
        "vllm 0.26.0",
        "model {'name': 'm'}; temperature 0.6",
        "clocks at the end: 1860 of 1980 MHz",
        "cluster: fingerprint ab12",
    ]


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a directory with a config\.json"):
        conditions.model_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "hidden_size": 4}))
    config = conditions.model_config(str(tmp_path))
    assert conditions.model_summary(str(tmp_path), config) == {
        "name": tmp_path.name,
        "hidden_size": 4,
        "vocab_size": 9,
    }
