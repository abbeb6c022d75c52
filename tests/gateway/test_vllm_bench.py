"""The real `vllm bench serve` measures a gateway, with every option of its conventions; only the engines are fakes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from corun.testing.model import write_tokenizer
from tests.clusters import cluster
from tests.gateway.serving import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
OPTIONS = {
    "--backend": "openai",
    "--endpoint": "/v1/completions",
    "--dataset-name": "random",
    "--random-input-len": "16",
    "--random-output-len": "12",
    "--num-prompts": "40",
    "--num-warmups": "2",
    "--request-rate": "200",
    "--burstiness": "0.5",
    "--max-concurrency": "16",
    "--percentile-metrics": "ttft,tpot,itl,e2el",
    "--metric-percentiles": "50,90,99",
    "--seed": "3",
    "--temperature": "0.8",
    "--top-p": "0.95",
    "--logprobs": "0",
    "--ready-check-timeout-sec": "30",
}
TIMEOUT_S = 240.0


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model whose tokenizer vLLM can load, too."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return write_tokenizer(tmp_path)


def pairs(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


async def printed(*words: str) -> str:
    """What a command of ours prints; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "corun", *words),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode("utf-8", "replace")
    assert process.returncode == 0, text
    return text


async def bench(url: str, directory: Path, **options: str) -> tuple[Any, str]:
    """The saved result, and what was printed."""
    flags = ["--ignore-eos", "--save-result", "--save-detailed", "--goodput", "ttft:10000", "e2el:20000"]
    saved = ["--result-dir", str(directory), "--result-filename", "result.json"]
    text = await printed("bench", "serve", *pairs(OPTIONS | {"--base-url": url} | options), *saved, *flags)
    return json.loads((directory / "result.json").read_text()), text


async def test_vllm_bench_serve_measures_a_gateway(model: str, tmp_path: Path) -> None:
    async with cluster(model, slots=32) as fake, serving(fake) as http:
        result, text = await bench(http.gateway.url, tmp_path)
        status = await fake.status()
    assert "skipping alignment" not in text, "its /tokenize names the model by its root"
    assert result["errors"] == [""] * 40, text
    assert (result["completed"], result["failed"], result["num_prompts"]) == (40, 0, 40)
    assert result["output_lens"] == [12] * 40
    assert result["total_input_tokens"] == sum(result["input_lens"]) > 0
    assert status.finished_samples == 43  # With the warm-ups and the ready check.
    assert result["model_id"] == model
    # Each token but the first has a time of its own, unless tokens came together.
    assert all(0 < len(itls) <= 11 for itls in result["itls"])


async def test_vllm_bench_serve_measures_chats(model: str, tmp_path: Path) -> None:
    async with cluster(model, slots=32) as fake, serving(fake) as http:
        options = {"--backend": "openai-chat", "--endpoint": "/v1/chat/completions"}
        result, text = await bench(http.gateway.url, tmp_path, **options)
    assert result["errors"] == [""] * 40, text
    assert (result["completed"], result["failed"], result["output_lens"]) == (40, 0, [12] * 40)


async def test_the_line_of_the_page_on_benchmarks(model: str, tmp_path: Path) -> None:
    """As it stands there, but for the address and how much it asks for."""
    (line,) = re.findall(r"^corun (bench serve .*?[^\\])$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = shlex.split(line.replace("\\\n", " "))
    options = dict(zip(words[2::2], words[3::2], strict=False))
    less = {"--random-input-len": "16", "--random-output-len": "8", "--num-prompts": "5"}
    assert set(options) > {"--base-url", *less}
    assert words[-1] == "--ignore-eos"
    async with cluster(model, slots=32) as fake, serving(fake) as http:
        text = await printed(*words[:2], *pairs(options | less | {"--base-url": http.gateway.url}), "--ignore-eos")
    assert "Successful requests:                     5 " in text


async def test_requests_that_fail_are_counted(model: str, tmp_path: Path) -> None:
    """The control: a benchmark that could only say "completed" would prove nothing."""
    async with cluster(model, slots=32) as fake, serving(fake) as http:
        options = {"--random-output-len": "600", "--ready-check-timeout-sec": "0", "--num-warmups": "0"}
        result, _ = await bench(http.gateway.url, tmp_path, **options)
    assert (result["completed"], result["failed"]) == (0, 40)
    assert set(result["errors"]) == {"Bad Request"}
