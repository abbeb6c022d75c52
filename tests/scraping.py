"""Reading a process's metrics as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(port: int) -> list[Metric]:
    """What GET /metrics on this machine answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def values(found: list[Metric]) -> dict[str, float]:
    """By name and labels, as they are written: `steps_total{rows="8"}`."""
    return {_written(sample.name, sample.labels): sample.value for metric in found for sample in metric.samples}


def _written(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    return f"{name}{{{','.join(f'{key}={value!r}' for key, value in labels.items())}}}".replace("'", '"')


async def scrape(port: int) -> dict[str, float]:
    """Beside the event loop, which makes the numbers."""
    return values(await asyncio.to_thread(families, port))
