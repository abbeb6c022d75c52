"""Answer a request of OpenAI's API with an SDK client: its prompts as one stream of chunks, or its whole answer.

This module must not know HTTP: `corun batch` answers the lines of a file with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Any

from corun.client.client import AsyncClient, all_or_none
from corun.completion import Assembler, Chunk
from corun.errors import renaming
from corun.gateway.echoes import Echo, scored
from corun.gateway.errors import naming
from corun.gateway.requests import CompletionRequest
from corun.gateway.responses import Shape, echoed, with_echoes
from corun.types import Tokens

QUEUED_CHUNKS = 64
"""The most chunks of several prompts that wait to be written."""

Chunks = AsyncGenerator[Chunk, None]
Numbered = AsyncGenerator[tuple[int, Chunk], None]


async def whole(asked: CompletionRequest, client: AsyncClient, shape: Shape, model: str) -> dict[str, Any]:
    """Run a request and return its whole answer. What is large in it is made when it is sent (`responses.parts`).

    model: the name that the answer gives the model. A completion must have been `translated`.
    """
    echoes = await _echoes_of(asked, client) if asked.scores else ()
    begun = shape.head(asked, model)
    if not asked.draws:
        return await asyncio.to_thread(echoed, begun, asked, echoes)
    found = [Assembler(asked.params.n, () if isinstance(each, str) else each) for each in asked.prompts]
    async with aclosing(chunks_of(asked, client)) as chunks:
        async for index, chunk in chunks:
            found[index].add(chunk)

    def made() -> dict[str, Any]:
        answer = shape.completion(begun, asked, [each.finish() for each in found])
        return with_echoes(answer, asked, echoes) if echoes else answer

    # A million tokens take half a second, and a character in which calls may be takes about a microsecond.
    return await asyncio.to_thread(made)


def chunks_of(asked: CompletionRequest, client: AsyncClient) -> Numbered:
    """Yield the chunks of all prompts as they come, each with the number of its prompt."""
    return merged([_one(asked, client, index) for index in range(len(asked.prompts))])


async def translated(asked: CompletionRequest, client: AsyncClient) -> CompletionRequest:
    """Return a request with the token ids of prompts whose text is scored or gets no special tokens, and the texts of
    prompts that are echoed."""
    prompts, texts = list(asked.prompts), list(asked.texts)
    for index, prompt in enumerate(asked.prompts):
        with _of_prompt(asked, index):
            if asked.echo:
                texts.append(prompt if isinstance(prompt, str) else await client.detokenize(prompt))
            if isinstance(prompt, str) and (asked.scores or not asked.add_special_tokens):
                found = await client.tokenize(prompt, add_special_tokens=asked.add_special_tokens)
                prompts[index] = found.token_ids
    return replace(asked, prompts=tuple(prompts), texts=tuple(texts))


async def tokens_of_chat(text: str, client: AsyncClient, with_spellings: bool = False) -> Tokens:
    """Return the tokens of a chat that was rendered. The client knows its text as messages only."""
    with naming("prompt", "messages", whole=True):
        return await client.tokenize(text, add_special_tokens=False, with_spellings=with_spellings)


async def _echoes_of(asked: CompletionRequest, client: AsyncClient) -> list[Echo]:
    """Return the prompts of a request, scored. The first error ends the others."""

    async def one(index: int) -> Echo:
        with _of_prompt(asked, index):
            return await scored(asked, client, index)

    return await all_or_none(one(index) for index in range(len(asked.prompts)))


async def _one(asked: CompletionRequest, client: AsyncClient, index: int) -> Chunks:
    """Yield the chunks of one prompt."""
    with _of_prompt(asked, index):
        chunks = client.stream(
            asked.prompts[index], asked.params, seed=asked.seed, request_id=asked.id_of(index), priority=asked.priority
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk


def _of_prompt(asked: CompletionRequest, index: int) -> AbstractContextManager[None]:
    """Name fields in errors about one prompt as the client knows them, with the number of one of several prompts."""
    return renaming(lambda field: asked.named(field, index))


async def merged(streams: Sequence[Chunks]) -> Numbered:
    """Yield the chunks of several streams as they come, each with the number of its stream. The first error ends all
    streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(QUEUED_CHUNKS)
    tasks = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:  # Each stream ends, at the latest by its own deadline.
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: Chunks, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]) -> None:
    end: Exception | None = None
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await queue.put((index, chunk))
    except Exception as error:
        end = error
    await queue.put((index, end))
