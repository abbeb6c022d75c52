"""Fixtures of all tests over fake clusters; the `conftest` of each folder that has some imports them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from corun.node import membership
from corun.testing.model import write_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model that has a tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


SPECIAL = {"<s>": 185, "<|im_start|>": 186, "<|im_end|>": 187}
"""The special tokens of `chat_model`. Their ids are those of the bytes 253 to 255, which UTF-8 never has."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model with a chat template. Its tokenizer adds a first special token to every prompt, and the
    template writes that token, too."""
    folder = Path(write_tokenizer(tmp_path_factory.mktemp("chat-model")))
    made = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {token: number for token, number in made["model"]["vocab"].items() if number not in SPECIAL.values()}
    made["model"]["vocab"] = vocab | SPECIAL
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made["added_tokens"] = [
        {"id": number, "content": token, "special": True, **flags} for token, number in SPECIAL.items()
    ]
    first, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<s>": {"id": "<s>", "ids": [SPECIAL["<s>"]], "tokens": ["<s>"]}}
    processor = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, text]}
    made["post_processor"] = {**processor, "special_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def no_lost_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a task or future ended with an error that nobody looked at."""
    yield
    lost = [r.getMessage() for r in caplog.get_records("call") if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not lost


@pytest.fixture(autouse=True)
def nodes_come_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_S", 0.02)
