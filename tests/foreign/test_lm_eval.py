"""lm-eval against a gateway, on tasks that are made here: log probabilities, and answers of chats."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from corun.testing.engines import expected_scores
from router.text import Tokenizer
from tests.clusters import cluster
from tests.foreign.tools import environment, printed
from tests.gateway.serving import Http, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_API_KEY": "EMPTY"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has lm-eval, and nothing of ours."""
    return environment(tmp_path_factory.mktemp("lm-eval"), "lm-eval[api]==0.4.13", "transformers==5.23.0")


def served(folder: str, at: Path) -> str:
    """Return a copy of a model that transformers can read the tokenizer of."""
    shutil.copytree(folder, at)
    file = at / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(at)


def best(tokenizer: Tokenizer, question: str, choices: list[str]) -> int:
    """Return the answer that the fakes' scores prefer."""
    sums = []
    for choice in choices:
        ids = tokenizer.encode(f"{question} {choice}", special=False)
        sums.append(sum(expected_scores(ids, len(ids) - len(tokenizer.encode(question, special=False))).logprobs))
    return sums.index(max(sums))


async def test_log_probabilities_are_the_clusters_and_the_same_three_times(
    model: str, python: Path, tmp_path: Path
) -> None:
    """With the example: local-completions with 1, 8 and 4 requests in flight."""
    model = served(model, tmp_path / "model")
    questions = runpy.run_path(str(ROOT / "examples" / "lm_eval_scores.py"))["QUESTIONS"]
    tokenizer = Tokenizer.load(model)
    right = [best(tokenizer, question, choices) == answer for question, choices, answer in questions]
    async with cluster(model) as fake, serving(fake) as http:
        words = (ROOT / "examples" / "lm_eval_scores.py", "--base-url", http.gateway.url, "--tokenizer", model)
        code, output, errors = await printed(python, *words, where=tmp_path, env=ENV)
    assert code == 0, errors
    scored = sum(len(choices) for _, choices, _ in questions)
    said = f"accuracy {sum(right) / len(right):.3f}; {scored} answers scored 3 times: the same bits each time"
    assert output.strip().endswith(said)


async def test_answers_of_chats_are_those_of_the_gateway_with_any_number_in_flight(
    chat_model: str, python: Path, tmp_path: Path
) -> None:
    async with cluster(chat_model) as fake, serving(fake) as http:
        _, models = await http.get("/v1/models")
        words = (Path(__file__).with_name("lm_eval_chat.py"), f"{http.gateway.url}{CHAT}", models["data"][0]["id"])
        runs = []
        for in_flight in (1, 6):
            code, output, errors = await printed(python, *words, str(in_flight), str(tmp_path), where=tmp_path, env=ENV)
            assert code == 0, errors
            runs.append(json.loads(output.strip().split("\n")[-1]))
        questions = [json.loads(line)["question"] for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
        answers = [[await answer(http, question, 1234)] for question in questions]
        others = [[await answer(http, question, 1235)] for question in questions]
    assert runs[0] == runs[1] == answers
    assert all(one != other for one, other in zip(answers, others, strict=True))


async def answer(http: Http, question: str, seed: int) -> Any:
    """Ask a question as lm-eval does, whose own seed is 1234."""
    messages = [{"role": "user", "content": question}]
    fields = {"messages": messages, "max_tokens": 40, "temperature": 0.7, "stop": ["\n\n"], "seed": seed}
    status, found, _ = await http.post(fields, CHAT)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]
