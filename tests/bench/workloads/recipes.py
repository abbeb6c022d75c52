"""The recipes of the benchmark's sample files. A test makes the files again, as proof that they are our own.

`python -m tests.bench.workloads.recipes` writes them. This module must not know the readers.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from statistics import NormalDist

from corun_bench.workloads.datasets import SAMPLES
from corun_bench.workloads.draws import generator, pick

SEED = 20260
GOOD_ROWS, FAILED_ROWS = 300, 6
EDITS, EDIT_CHARS = 8, 5000


def burstgpt() -> str:
    """Return 300 requests and 6 that failed, in v1.1's columns, in bursts.

    Lengths are the quantiles of log-normal distributions, in random pairs. The medians are 400 and 180 tokens, and in
    the tails 3 prompts and 2 responses exceed 8K, following the paper's words on BurstGPT (Section V). Nothing is
    fitted to the real trace.
    """
    prompts = _quantiles(median=400, sigma=1.3, label="prompt")
    responses = _quantiles(median=180, sigma=1.5, label="response")
    for row in pick(SEED, "failed", GOOD_ROWS, FAILED_ROWS):
        prompts.insert(row, prompts[row])
        responses.insert(row, 0)
    draw, at = generator(SEED, "gaps"), 5.0
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"])
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        model, log = ("GPT-4", "API log") if i % 4 == 0 else ("ChatGPT", "Conversation log")
        out.writerow([round(at), model, prompt, response, prompt + response, log])
        at += draw.gammavariate(0.3, 20.0)
    return text.getvalue()


def sharegpt() -> str:
    """Return conversations on mixed topics; the last three are too short or have no answer, and are left out."""
    entries = [_conversation(f"own_{i}", ("human", asked), ("gpt", said)) for i, (asked, said) in enumerate(_TALKS)]
    greeting = _conversation("own_greeting", ("gpt", "Welcome back."), ("human", _TALKS[0][0]), ("gpt", _TALKS[0][1]))
    short = _conversation("own_short", ("human", "Hi"), ("gpt", "Hello."))
    silent = _conversation("own_silent", ("human", "Is anybody there to answer this question?"))
    two_humans = _conversation("own_two", ("human", "First of two."), ("human", "Second of two."))
    return json.dumps([*entries, greeting, short, silent, two_humans], indent=1) + "\n"


def blazedit() -> str:
    """Return modules of about 5,000 characters, as in Blazedit's smaller set, with one requested change each."""
    lines = [
        json.dumps(
            {
                "code": _module(_TOPICS[i]),
                "change_request": _WISHES[i % len(_WISHES)].format(topic=_TOPICS[i]),
                "norm_distance": round(0.05 + 0.03 * i, 2),
            }
        )
        for i in range(EDITS)
    ]
    return "\n".join(lines) + "\n"


FILES: dict[str, Callable[[], str]] = {
    "burstgpt.csv": burstgpt,
    "sharegpt.json": sharegpt,
    "blazedit.jsonl": blazedit,
}


def _quantiles(*, median: float, sigma: float, label: str) -> list[int]:
    normal = NormalDist()
    lengths = [
        max(4, round(median * math.exp(sigma * normal.inv_cdf((i + 0.5) / GOOD_ROWS)))) for i in range(GOOD_ROWS)
    ]
    return [lengths[i] for i in pick(SEED, label, GOOD_ROWS, GOOD_ROWS)]


def _conversation(name: str, *turns: tuple[str, str]) -> dict[str, object]:
    return {"id": name, "conversations": [{"from": who, "value": said} for who, said in turns]}


def _module(topic: str) -> str:
    parts = [f'"""Records of {topic}: adding, counting, totals."""\n']
    number = 0
    while len("\n".join(parts)) < EDIT_CHARS:
        number += 1
        parts.append(_FUNCTION.format(topic=topic, number=number, limit=7 * number + len(topic)))
    return "\n".join(parts)


_FUNCTION = '''
def add_{topic}_{number}(records, name, amount):
    """Adds an amount to a name; at most {limit} names are kept."""
    if amount < 0:
        raise ValueError(f"amount of {topic} must not be negative: {{amount}}")
    if name not in records and len(records) >= {limit}:
        smallest = min(records, key=records.get)
        records.pop(smallest)
    records[name] = records.get(name, 0) + amount
    return records


def total_{topic}_{number}(records):
    total = 0
    for name in sorted(records):
        total = total + records[name]
    return total
'''
_TOPICS = ("apples", "bridges", "clouds", "drums", "engines", "forests", "glasses", "harbours")
_WISHES = (
    "Give every function type hints, and let the totals of {topic} use sum().",
    "Rename the argument 'records' to 'ledger' everywhere, in the texts too.",
    "Make one class of the functions about {topic}, with the limit as an argument of its constructor.",
)
_TALKS = (
    (
        "Why can the sum of the same floating point numbers differ from run to run?",
        (
            "Because addition of rounded numbers is not associative. Each addition rounds its result, so another "
            "order of the same additions rounds in other places, and the last bits of the sum change. A program "
            "that splits the work by how many threads happen to be free has another order each time."
        ),
    ),
    (
        "Give me three names for a cat that belongs to a numerical analyst, and say why each fits.",
        (
            "Epsilon, because it is small and everybody forgets it until something breaks. Pivot, because it "
            "always finds the one place that matters. Kahan, because it keeps carefully what others would have "
            "lost."
        ),
    ),
    (
        "Explain to a cook what a cache is.",
        (
            "It is the counter next to your stove. The cellar holds everything, but each walk there takes "
            "minutes, so you keep on the counter what you are likely to need next. The counter is small: when it "
            "is full, something has to go back before something new fits, and a good cook puts back what will not"
            " be needed for longest."
        ),
    ),
    (
        "Write a short notice for the office kitchen: the dishwasher is started at six, and cups must be in by then.",
        (
            "Dear all, the dishwasher starts at six o'clock every evening. Cups that are in it by then are clean "
            "in the morning; cups that are not stay as they are. Thank you for putting yours in."
        ),
    ),
    (
        "What is the difference between latency and throughput? Use a ferry as the example.",
        (
            "Latency is how long one passenger takes from shore to shore. Throughput is how many passengers "
            "arrive per hour. A larger ferry carries more per hour and may still be slower for each of them, "
            "because it waits until it is full. Two ferries double the throughput and change nothing about the "
            "latency of a crossing."
        ),
    ),
    (
        "List the steps to repot a plant.",
        (
            "1. Water it the day before. 2. Choose a pot two fingers wider than the old one. 3. Put a layer of "
            "new soil in. 4. Loosen the plant and take it out by the root ball, not by the stem. 5. Set it in at "
            "the same height as before. 6. Fill up with soil and press it lightly. 7. Water it, and keep it out "
            "of the sun for a week."
        ),
    ),
    (
        "Can you make this sentence friendlier: your report is late again and nobody could work with it anyway?",
        (
            "Perhaps so: thank you for the report. We would love to have it a little earlier next time, and it "
            "would help us a lot if we went through its layout together, so that everybody can work with it at "
            "once."
        ),
    ),
    (
        "How would I check that two programs print exactly the same, without reading all of it?",
        (
            "Let each write to a file and compare the files byte by byte, for example with cmp, which is silent "
            "if they are equal and names the first place where they are not. If the files are on two machines, "
            "compare their SHA-256 sums instead. Do not compare with your eyes: the difference is always in the "
            "line you skipped."
        ),
    ),
)


def main() -> None:
    for name, recipe in FILES.items():
        (SAMPLES / name).write_text(recipe(), encoding="utf-8")


if __name__ == "__main__":
    main()
