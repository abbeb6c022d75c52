"""Prefill steps: a prompt is computed alone, or with others where its request allows it (paper, Algorithms 1 and 2).

Owns: which prompts are in the next step, and that each gets a chunk that it may have. The stock scheduler sees only
these prompts and does the rest. What a prompt may do is in its own request (`FREEDOMS_PARAM`), so nothing here has to
be switched. Must not know: connectors, sampling, slots, why a freedom holds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.kv.handle import BEGAN_PARAM, CHECK_PARAM, FREEDOMS_PARAM, IDLE_PARAM, STEPS_PARAM
from corun.node.vllm.gpu_lock import PrefillTurn
from corun.node.vllm.scheduler import ReservingScheduler
from corun.node.vllm.structure import packs_contexts
from corun.types import Freedom
from prefill_node.prefix_cache import PrefixCache


class PrefillScheduler(ReservingScheduler):
    """Runs prompts first come, first served; the stock scheduler makes steps without prompt tokens.

    A step has at most vLLM's `max_num_scheduled_tokens`. A prompt gets at most `chunk` tokens of it, vLLM's
    `long_prefill_token_threshold`, or more if it may be cut anywhere and nobody else has a use for them. A prompt
    without freedoms runs alone, so that its chunks follow from its own length.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget: int = self.max_num_scheduled_tokens
        """The most prompt tokens of the next step."""
        self.chunk: int = self.scheduler_config.long_prefill_token_threshold or self.budget
        assert self.chunk <= self.budget, "the first prompt's chunk must fit the step"
        self.scheduler_config = copy.copy(self.scheduler_config)  # The worker reads the chunk in the engine's own.
        self.scheduler_config.long_prefill_token_threshold = 0
        self.need_mamba_block_aligned_split = True  # vLLM's hook to shorten a chunk, for models that nobody runs here.
        self._packs_contexts = packs_contexts(self.vllm_config)
        self._given: dict[str, int] = {}
        """The tokens that each prompt of the step that is being made may get."""
        self.prefix_cache = PrefixCache(self.kv_cache_manager, chunk_size=self.chunk, block_size=self.block_size)
        path = self.gpu_lock()
        self.turn = None if path is None else PrefillTurn(path)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Run the prompts that `choose` returns, or a decode step without admitting anything (Algorithm 2).

        Raises RuntimeError if the stock scheduler made another step.
        """
        chosen = self.choose()
        self._hold_gpu([*chosen, *self.running])
        with self._showing(chosen):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        if chosen:
            self.check_prompts(output.num_scheduled_tokens, chosen)
        return output

    def choose(self) -> list[Request]:
        """Return the prompts of the next step: the head of the line, and those behind it that may share its step.

        The line is never reordered: whoever cannot join ends the step, and is nearer to the head of the next one. A
        prompt without `packed` joins nobody, and nobody joins it. A prompt without `chunks` joins only if the rest of
        the step has room for its next chunk as the contract cuts it.

        What is left of a step without rows goes to the prompts that may be cut anywhere. Rows would wait for it.

        The choice holds if a waiting prompt turns out to have cached KV: it then needs fewer tokens than counted here.
        """
        chosen: list[Request] = []
        self._given = {}
        left = self.budget
        for request in self._line():
            chunk = self._next_chunk(request, request.num_computed_tokens)
            may = freedoms(request)
            if chosen and not (self._may_share(request) and self._may_share(chosen[0])):
                break
            if chunk > left and Freedom.CHUNKS not in may:
                break
            chosen.append(request)
            left = self._give(request, chunk, left)
            if left <= 0:
                break
        for request in chosen if left > 0 and not self.has_rows else ():
            if Freedom.CHUNKS in freedoms(request) and (rest := self._left_of(request)):
                left = self._give(request, rest, left)
        return chosen

    def _may_share(self, request: Request) -> bool:
        """Return whether a prompt may be in the next step together with others.

        Where contexts must not be packed, it must have none: no part of it was computed before, and none can be found
        in the cache, which the stock scheduler asks only while it makes the step.
        """
        if Freedom.PACKED not in freedoms(request):
            return False
        return self._packs_contexts or not (request.num_computed_tokens or self.prefix_cache.may_find(request))

    def _give(self, request: Request, tokens: int, left: int) -> int:
        """Give a prompt so many more tokens of the step, of which these are left. Return how many then are."""
        given = min(tokens, left)
        self._given[request.request_id] = self._given.get(request.request_id, 0) + given
        left -= given
        return left if self._left_of(request) else left - self.beside(request, left)

    def _left_of(self, request: Request) -> int:
        """Return how many tokens of a prompt are left to later steps."""
        given = self._given.get(request.request_id, 0)
        return int(request.num_prompt_tokens) - int(request.num_computed_tokens) - given

    def beside(self, request: Request, left: int) -> int:
        """Return how many of the tokens that are left others take because this step is the prompt's last."""
        return 0

    @property
    def has_rows(self) -> bool:
        """Whether there are samples whose next tokens wait for this step."""
        return False

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *_: int) -> int:
        """Return the tokens that a request gets of those that vLLM would give it; `choose` has decided for prompts."""
        return min(num_new_tokens, self._given.get(request.request_id, num_new_tokens))

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._hold_gpu([*self.running, *self.waiting])
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._hold_gpu([*self.running, *self.waiting])
        return finished

    def _line(self) -> Iterator[Request]:
        """Yield the prompts with tokens to compute, in the order of their arrival: the unfinished ones, then those that
        wait, while there is KV room for whole sequences (Algorithm 1)."""
        started = self.started()
        for request in started:
            if request.num_computed_tokens < request.num_prompt_tokens:
                yield request
        room: int | None = None
        for request in islice(self.unstarted(), max(0, self.places - len(started))):
            if room is None:  # It is counted for prompts that wait only: samples may wait in every step.
                room = self.room(started)
            room -= self.blocks_of(request)
            if room < 0:
                return
            yield request

    @property
    def places(self) -> int:
        """The most prompts that have started and are not finished."""
        return int(self.max_num_running_reqs)

    def started(self) -> list[Request]:
        return self.running

    def unstarted(self) -> Iterable[Request]:
        waiting: Iterable[Request] = self.waiting
        return waiting

    def room(self, started: Sequence[Request]) -> int:
        """Return the number of KV blocks that are there for prompts that have not started."""
        return self.free_blocks(started)

    def _next_chunk(self, request: Request, start: int) -> int:
        """Return the tokens of the prompt's chunk that begins at `start`, if no other prompt limits it."""
        tokens: int = min(self.chunk, request.num_prompt_tokens - start)
        return tokens

    def check_prompts(self, counts: Mapping[str, int], chosen: Sequence[Request], samples: int = 0) -> None:
        """Refuse a step with a request that was not chosen, with a chunk that its request may not have, or with a
        context beside others where that must not be.

        Note for each checked prompt how large the step is: a difference that is found later names it.
        counts: the tokens of each prompt of the step. samples: how many samples are in it, too.
        """
        requests = {request.request_id: request for request in chosen}
        if counts.keys() - requests.keys():
            raise RuntimeError(f"the prefill step of {sorted(requests)} holds {sorted(counts)}")
        for name, count in counts.items():
            request = requests[name]
            start = request.num_computed_tokens - count  # `schedule` has counted the chunk already.
            as_alone = start % self.chunk == 0 and count == self._next_chunk(request, start)
            if not as_alone and Freedom.CHUNKS not in freedoms(request):
                raise RuntimeError(f"prompt {name} got tokens {start} to {start + count}: no chunk of the contract")
            if start and len(counts) > 1 and not self._packs_contexts:
                raise RuntimeError(
                    f"prompt {name} has {start} tokens of context, and shares the step of {sorted(counts)}"
                )
            if (params := request.kv_transfer_params or {}).get(CHECK_PARAM):
                params.setdefault(STEPS_PARAM, []).append([count, len(counts), sum(counts.values()), samples])

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Add to the request's output when its computation began, and in which steps it ran if it is checked."""
        delays, params = super()._connector_finished(request)
        if params is not None:
            kept = (BEGAN_PARAM, STEPS_PARAM)
            params.update({name: request.kv_transfer_params.get(name) for name in kept})
        return delays, params

    def _hold_gpu(self, requests: Iterable[Request]) -> None:
        """Hold the GPU while a request runs or waits that somebody waits for.

        Only `schedule` finds out whether a waiting prompt has room; if none has and no request runs, it gives the turn
        back.
        """
        if self.turn is not None:
            self.turn.hold(any(not (one.kv_transfer_params or {}).get(IDLE_PARAM) for one in requests))

    @contextmanager
    def _showing(self, chosen: Sequence[Request]) -> Iterator[None]:
        """Show the stock scheduler only `chosen`; if there are none, show only the requests that have started."""
        note_began(chosen)
        running = self.running
        unfinished = [request for request in chosen if request in running]
        if chosen:
            self.running = unfinished.copy()
        try:
            with self.showing_waiting(chosen[len(unfinished) :]):
                yield
        finally:
            if chosen:
                # The chosen prompts go first, because the line begins with the unfinished ones in this order.
                self.running.extend(request for request in running if request not in unfinished)


def note_began(prompts: Iterable[Request]) -> None:
    """Note when the first step of each prompt is made."""
    for request in prompts:
        if request.kv_transfer_params is not None:
            request.kv_transfer_params.setdefault(BEGAN_PARAM, time.monotonic())


def freedoms(request: Request) -> Collection[str]:
    """Return what the prompt's request allows (`corun.types.Freedom`); nothing if it does not say."""
    allowed: Collection[str] = (request.kv_transfer_params or {}).get(FREEDOMS_PARAM, ())
    return allowed
