"""Run a local generation task of lm-eval's local-chat-completions, and print its answers. Runs where lm-eval is.

python lm_eval_chat.py CHAT_COMPLETIONS_URL MODEL REQUESTS_IN_FLIGHT FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval

QUESTIONS = ("Hello", "Two and two make", "What is photosynthesis?", "Bees make", "Once upon a time", "Why?")


def main(url: str, model: str, in_flight: str, folder: str) -> None:
    file = Path(folder) / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": ""}) + "\n" for text in QUESTIONS))
    task = {
        "task": "corun_chat",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 40, "do_sample": True, "temperature": 0.7},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = lm_eval.simple_evaluate(
        "local-chat-completions",
        model_args={"base_url": url, "model": model, "num_concurrent": int(in_flight)},
        tasks=[task],
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["corun_chat"], key=lambda sample: sample["doc_id"])
    print(json.dumps([sample["filtered_resps"] for sample in samples]))


if __name__ == "__main__":
    main(*sys.argv[1:])
