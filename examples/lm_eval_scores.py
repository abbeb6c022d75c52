"""Evaluate a task with lm-eval three times against a running gateway, and compare every log probability.

    corun up --http 8000                                     # one terminal
    pip install "lm-eval[api]" transformers                  # another one, in an environment of its own
    python examples/lm_eval_scores.py --tokenizer MODEL_DIR

lm-eval's `local-completions` sends each question with each of its answers to /v1/completions, with `echo` and log
probabilities.
The runs differ in how many requests are in flight. The task is made here, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

QUESTIONS = (
    ("The capital of France is", ["Paris", "Rome", "Berlin"], 0),
    ("Two and two make", ["three", "four", "five"], 1),
    ("Bees make", ["milk", "paper", "honey"], 2),
    ("The opposite of hot is", ["cold", "warm", "dry"], 0),
    ("A triangle has this many sides:", ["two", "three", "four"], 1),
    ("Once upon a time there was a little", ["girl", "integral", "verdict"], 0),
)
IN_FLIGHT = (1, 8, 4)
"""The most requests in flight, for each run."""


def task(folder: Path) -> dict[str, Any]:
    """Return the configuration of a multiple-choice task whose questions are written to `folder`."""
    rows = [{"question": question, "choices": choices, "answer": right} for question, choices, right in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": "corun_scores",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }


def evaluate(base_url: str, model: str, tokenizer: str, in_flight: int, config: dict[str, Any]) -> tuple[float, Any]:
    """Return the accuracy of one run, and each answer's log probability with whether it is greedy."""
    import lm_eval  # noqa: PLC0415  # `--help` works without it.

    arguments = {
        "base_url": f"{base_url}/v1/completions",
        "model": model,
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": in_flight,
    }
    found = lm_eval.simple_evaluate("local-completions", model_args=arguments, tasks=[config], bootstrap_iters=0)
    samples = sorted(found["samples"]["corun_scores"], key=lambda sample: sample["doc_id"])
    return found["results"]["corun_scores"]["acc,none"], [sample["filtered_resps"] for sample in samples]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the gateway's address")
    parser.add_argument("--tokenizer", required=True, help="the model's directory, or its id on the hub")
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.base_url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        config = task(Path(folder))
        runs = [evaluate(args.base_url, model, args.tokenizer, each, dict(config)) for each in IN_FLIGHT]
    answers = sum(len(choices) for _, choices, _ in QUESTIONS)
    same = all(run == runs[0] for run in runs)
    verdict = "the same bits each time" if same else "DIFFERENT BITS"
    print(f"accuracy {runs[0][0]:.3f}; {answers} answers scored {len(runs)} times: {verdict}")
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
