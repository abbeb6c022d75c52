"""Prompts that are echoed with log probabilities: their tokens are scored, and answered in vLLM's shape.

A prompt is scored as the continuation of its own first token, which nothing comes before: its log probability is null.
This module must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from corun.client.client import AsyncClient
from corun.completion import Score
from corun.gateway.requests import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """The tokens of one prompt, scored."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """The text that each token completes."""
    fingerprint: str
    score: Score | None
    """The score of all tokens but the first; None if there are no others."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def logprobs(self, *, with_tops: bool, as_ids: bool) -> dict[str, list[Any]]:
        """Return the columns of OpenAI's `logprobs`, one entry per token; the first token's are null.

        with_tops: whether the likeliest token is named beside each token. as_ids: name tokens by ids instead of texts.
        """
        names = [f"token_id:{token_id}" for token_id in self.token_ids] if as_ids else list(self.texts)
        values: list[float | None] = [None]
        tops: list[Mapping[str, float] | None] = [None]
        if self.score is not None:
            values += self.score.logprobs  # They are finite.
            tops += self._tops(names, self.score, with_tops=with_tops, as_ids=as_ids)
        offsets = list(accumulate(map(len, self.texts[:-1]), initial=0))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}

    def _tops(self, names: list[str], score: Score, *, with_tops: bool, as_ids: bool) -> list[Mapping[str, float]]:
        """Return for each token but the first its own log probability and, `with_tops`, that of the likeliest token. Of
        two tokens with one name, the likeliest one is kept: clients look whether a token is as likely as that."""
        found: list[Mapping[str, float]] = []
        for at, name in enumerate(names[1:]):
            own = score.logprobs[at]
            if not with_tops or score.top_token_ids[at] == score.token_ids[at]:
                found.append({name: own})
                continue
            top = f"token_id:{score.top_token_ids[at]}" if as_ids else score.top_token_texts[at]
            found.append({name: own, top: score.top_logprobs[at]})
        return found

    def facts(self) -> dict[str, Any]:
        """Return what OpenAI's API has no place for: the digest of the scores, who computed them, and what they are."""
        if self.score is None:
            return {}
        return {
            "output_digest": self.score.output_digest,
            "equals_generation": self.score.equals_generation,
            "prefill_node": str(self.score.prefill_node),
            "cached_tokens": self.score.cached_tokens,
        }


async def scored(asked: CompletionRequest, client: AsyncClient, index: int) -> Echo:
    """Return one prompt of a request, scored. The prompt must have been turned into token ids."""
    prompt = asked.prompts[index]
    assert not isinstance(prompt, str)
    ids = tuple(prompt)
    request_id = f"{asked.id_of(index)[-121:]}-echo"
    if len(ids) == 1:
        fingerprint = (await client.get_cluster(contracts=False)).fingerprint
        return Echo(token_ids=ids, texts=(await client.detokenize(ids),), fingerprint=fingerprint, score=None)
    found = await client.score(ids[:1], [ids[1:]], token_texts=True, request_id=request_id, priority=asked.priority)
    (score,) = found.scores
    texts = (*found.prompt_token_texts, *score.token_texts)
    return Echo(token_ids=ids, texts=texts, fingerprint=found.fingerprint, score=score)
