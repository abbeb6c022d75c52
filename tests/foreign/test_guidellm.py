"""guidellm measures a gateway as it is; only the engines are fakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from corun.testing.model import write_tokenizer
from tests.clusters import cluster
from tests.foreign.tools import environment, printed
from tests.gateway.serving import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture(scope="module")
def guidellm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own."""
    python = environment(tmp_path_factory.mktemp("guidellm"), "guidellm==0.8.1", borrows_torch=True)
    return python.with_name("guidellm")


CASES = {
    "completions": ("completions", 12, 20),
    "chats": ("chat/completions", 12, 20),
    "control": ("completions", 600, 0),
}
"""What is asked for, how many tokens, and how many of 20 requests succeed: the model's length is 512."""


@pytest.mark.parametrize(("path", "output_tokens", "ok"), CASES.values(), ids=CASES)
async def test_it_measures_completions_and_chats(
    guidellm: Path, tmp_path: Path, path: str, output_tokens: int, ok: int
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    model = write_tokenizer(tmp_path)
    async with cluster(model, slots=32) as fake, serving(fake) as http:
        words = {
            "--backend": f"kind=openai_http,target={http.gateway.url},request_format=/v1/{path}",
            "--profile": "kind=concurrent,streams=4",
            "--constraint": "kind=max_requests,count=20",
            "--tokenizer": f"kind=huggingface_auto,model={model}",
            "--data": f"kind=synthetic_text,prompt_tokens=16,output_tokens={output_tokens}",
            "--output": f"kind=json,path={tmp_path / 'result.json'}",
        }
        flags = [word for pair in words.items() for word in pair]
        code, _, errors = await printed(guidellm, "run", *flags, "--disable-console", where=tmp_path, env=ENV)
        assert code == 0, errors
        status = await fake.status()
    (result,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert (totals["successful"], totals["total"]) == (ok, 20)
    assert status.finished_samples == ok
