"""The crowd of a verification: samples that only run beside the verified ones. They use idle slots and give way to
every client.

This module must not know what is verified.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from corun.params import SamplingParams
from corun.receipt import OutputDigest, prompt_digest
from corun.rpc.auth import Caller
from corun.seeds import MAX_SEED
from corun.types import Priority
from router.attempt import SampleTask
from router.audit.idle import SPARE_SLOTS, IdleRun, IdleRuns
from router.prompts import Model

MAX_FILLER_PROMPT = 48
"""The most prompt tokens of a filler."""
CLOSE_TIMEOUT_S = 5.0
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"top_p": 0.95, "top_k": 50, "presence_penalty": 0.5},
    {"min_p": 0.05, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.1},
)
"""The sampling filters of fillers, used in turn. Engines choose and compile the kernel of a step by what the samples of
the step ask for together, so every kind must occur."""

log = logging.getLogger(__name__)


class Fillers:
    """Draws samples with random prompts and parameters from a seeded generator."""

    def __init__(self, model: Model, rng: random.Random, deadline: float, caller: Caller) -> None:
        self._model = model
        self._rng = rng
        self._deadline = deadline
        self._caller = caller
        self._filters = itertools.cycle(FILTERS)

    def draw(self, num_tokens: int, *, endless: bool = False) -> SampleTask:
        """Return a sample of at most `num_tokens` tokens, prompt and output together. endless: the sample uses all of
        them."""
        rng, room = self._rng, min(num_tokens, self._model.max_model_len)
        num_prompt = rng.randint(1, max(1, min(MAX_FILLER_PROMPT, room // 4)))
        longest = max(1, room - num_prompt)
        filters = next(self._filters)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.6, 1.0)),
            max_tokens=longest if endless else rng.randint(max(1, longest // 2), longest),
            ignore_eos=True,
            **filters | ({"top_k": min(filters["top_k"], self._model.vocab_size)} if "top_k" in filters else {}),
        )
        prompt = tuple(rng.randrange(self._model.vocab_size) for _ in range(num_prompt))
        return SampleTask(
            request_id=f"filler-{rng.getrandbits(64):016x}",
            index=0,
            prompt_token_ids=prompt,
            prompt_digest=prompt_digest(prompt),
            params=params,
            seed=rng.randint(0, MAX_SEED),
            deadline=self._deadline,
            caller=self._caller,
            priority=Priority.LOW,
        )


class Unread:
    """An output that discards its tokens and only counts them (`router.attempt.Output`)."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.position = 0
        self._on_first = on_first
        self._digest = OutputDigest()

    @property
    def num_tokens(self) -> int:
        return self.position

    def take(self, token_id: int, logprob: float) -> bool:
        self.position += 1
        if self.position == 1:
            self._on_first()
        return False

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def tokens_hexdigest(self) -> str:
        return self._digest.tokens_hexdigest()


class Crowd:
    """Up to `size` running fillers. A filler that ends or gives way is replaced as soon as a slot is idle.

    `pump` has to be called when the registry changes. The caller must close the crowd in every case.
    """

    def __init__(
        self, idle: IdleRuns, draw: Callable[[], SampleTask], size: int, has_audits: Callable[[], bool]
    ) -> None:
        self.spare_slots = 1
        """The number of slots that stay free on each node, for the verified sample until it has its own slot."""
        self._idle = idle
        self._draw = draw
        self._size = size
        self._has_audits = has_audits
        self._running: dict[IdleRun, Unread] = {}
        self._leaving: set[IdleRun] = set()
        """The ended runs whose slot is not free yet."""
        self._has_turned = False
        """Whether a filler has come to its end. By then, other fillers are at every stage."""
        self._changed = asyncio.Event()
        self._next: SampleTask | None = None

    def pump(self) -> None:
        """Start the fillers that may start now."""
        self._leaving = {run for run in self._leaving if run.placement.holds_slot}
        while len(self._running) < self._size and self._start():
            pass
        self._changed.set()

    async def stand(self, timeout_s: float) -> None:
        """Wait until all fillers run, or as many as there are idle slots; at most `timeout_s` seconds."""
        self.pump()
        await self.until(lambda: self._stands, timeout_s)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds, at most `timeout_s` seconds. The condition must only change when the registry
        or a filler changes."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not condition() and (left := end - asyncio.get_running_loop().time()) > 0:
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def close(self) -> None:
        """End all fillers, and wait until their slots are free, at most `CLOSE_TIMEOUT_S` seconds."""
        self._size = 0
        self._idle.end(self._running)
        await self.until(lambda: not self._running and not self._leaving, CLOSE_TIMEOUT_S)

    @property
    def _stands(self) -> bool:
        begun = sum(output.position > 0 for output in self._running.values())
        nobody_moves = begun == len(self._running) and not self._leaving
        return begun >= self._size or nobody_moves or self._has_turned

    def _start(self) -> bool:
        # Audits are few and need no speed, but without this a crowd would keep them out for as long as it runs.
        spare = SPARE_SLOTS + 1 if self._has_audits() else self.spare_slots
        sample, output = self._next or self._draw(), Unread(self.pump)
        run = self._idle.start(sample, sample.need, output, self._ended, spare_slots=spare)
        if run is None:
            self._next = sample
            return False
        self._next = None
        self._running[run] = output
        return True

    def _ended(self, run: IdleRun) -> None:
        del self._running[run]
        self._leaving.add(run)
        self._has_turned = self._has_turned or run.reason is not None
        if run.error is not None:  # The crowd gets smaller. That is no problem, because the crowd is not compared.
            log.warning("a filler of a verification failed: %s", run.error)
            self._size -= 1
