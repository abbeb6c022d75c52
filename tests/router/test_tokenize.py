"""What clients ask a router of the model's text: tokens of a text, text of tokens, and the template of chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.chat import ChatTemplate, read_template
from corun.client.client import AsyncClient
from corun.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from corun.params import SamplingParams
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE
from corun.testing.model import write_tokenizer
from router import service
from router.prompts import SHORT
from router.text import Tokenizer
from tests.clusters import cluster
from tests.over_fakes import CHAT_TEMPLATE, SPECIAL
from tests.secrets import Secrets

TEXT = "<|im_start|>user\n\N{GRINNING FACE}<|im_end|>"


async def test_tokens_are_those_of_a_prompt_and_none_are_added_to_a_rendered_chat(chat_model: str) -> None:
    async with cluster(chat_model) as fake, AsyncClient(fake.address) as client:
        found = await client.tokenize(TEXT, with_spellings=True)
        done = await client.generate(TEXT, SamplingParams(max_tokens=1))
        plain = await client.tokenize(TEXT, add_special_tokens=False)
        text = await client.detokenize(found.token_ids)
    assert found.token_ids == done.prompt_token_ids == (SPECIAL["<s>"], *plain.token_ids)
    assert (plain.token_ids[0], plain.token_ids[-1]) == (SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"])
    assert (found.tokens[0], found.tokens[1], found.tokens[-1]) == ("<s>", "<|im_start|>", "<|im_end|>")
    assert len(found.tokens) == len(found.token_ids)
    assert text == "<s>" + TEXT


async def test_long_texts_go_through_the_threads(chat_model: str) -> None:
    text = "<|im_start|>ab" * 100
    assert len(text) > SHORT
    async with cluster(chat_model) as fake, AsyncClient(fake.address) as client:
        found = await client.tokenize(text, add_special_tokens=False)
        assert len(found.token_ids) == 300
        assert await client.detokenize(found.token_ids) == text


async def test_limits_are_named(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        for text, field in (("", "prompt.text"), ("a" * MAX_MODEL_LEN, "prompt.text")):
            with pytest.raises(InvalidArgumentError) as refused:
                await client.tokenize(text)
            assert refused.value.field == field
        for ids, field, limit in (
            ([], "token_ids", "empty"),
            ([1] * (MAX_MODEL_LEN + 1), "token_ids", str(MAX_MODEL_LEN)),
            ([1, VOCAB_SIZE], "token_ids[1]", str(VOCAB_SIZE)),
        ):
            with pytest.raises(InvalidArgumentError) as refused:
                await client.detokenize(ids)
            assert refused.value.field == field
            assert limit in refused.value.limit


async def test_a_client_renders_chats_with_the_models_template(chat_model: str) -> None:
    async with cluster(chat_model) as fake, AsyncClient(fake.address) as client:
        source = await client.get_chat_template()
    assert source.source == CHAT_TEMPLATE
    messages = [{"role": "user", "content": "a"}]
    assert ChatTemplate(source).render(messages) == ChatTemplate(read_template(chat_model)).render(messages)
    assert ChatTemplate(source).render(messages).startswith("<s><|im_start|>user\na<|im_end|>")


async def test_a_template_is_read_when_it_is_asked_for_and_then_stays(tmp_path: Path) -> None:
    folder = Path(write_tokenizer(tmp_path))
    config = folder / "tokenizer_config.json"
    async with cluster(str(folder)) as fake, AsyncClient(fake.address) as client:
        config.write_text("{", encoding="utf-8")
        with pytest.raises(UnavailableError, match=r"tokenizer_config\.json cannot be read") as refused:
            await client.get_chat_template()
        assert str(folder) not in str(refused.value)
        assert (await client.generate("a", SamplingParams(max_tokens=1))).text is not None, "prompts need no template"
        config.unlink()
        assert (await client.get_chat_template()).source == ""
        (folder / "chat_template.jinja").write_text("later", encoding="utf-8")
        assert (await client.get_chat_template()).source == ""
        service._template.cache_clear()
        assert (await client.get_chat_template()).source == "later"


async def test_only_known_clients_may_ask(model: str, secrets: Secrets) -> None:
    async with cluster(model, client=secrets.client, **secrets.settings) as fake:
        async with AsyncClient(fake.address, tls=secrets.client.tls) as stranger:
            for asking in (stranger.tokenize("a"), stranger.detokenize([1]), stranger.get_chat_template()):
                with pytest.raises(UnauthenticatedError):
                    await asking
        async with AsyncClient(fake.address, tls=secrets.client.tls, token=secrets.client.token) as client:
            assert len((await client.tokenize("a")).token_ids) == 1


def test_spellings_of_unknown_ids_are_empty(model: str) -> None:
    assert Tokenizer.load(model).spellings([VOCAB_SIZE + 5]) == ("",)
