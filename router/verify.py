"""Runs cases again under chosen conditions and compares every bit of their output.

Each condition changes what must not matter: who runs beside a sample, which slot it gets, in which order samples
arrive. The samples take the same way as every other. This module must not know gRPC messages.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from corun.auth import Caller
from corun.cluster import Condition, NodeInfo, VerifyCase, VerifyResult
from corun.errors import CorunError, InvalidArgumentError, OverloadedError, UnavailableError
from corun.params import SamplingParams, check_seed
from corun.receipt import Receipt, prompt_digest
from corun.seeds import MAX_SEED
from router.failover import Sample
from router.generations import Generation, Generator
from router.registry import Model, Registry

BUSY_RETRY_S = 5.0
MAX_FILLER_PROMPT = 48
"""Tokens."""
CROWD_TOKENS = 64
"""Prompt and output of one sample of a crowd: enough to meet others at every stage, few enough to come and go."""
MAX_HELD_SLOTS = 16
"""Slots per node that are held ahead of a case; more would test nothing new and take longer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of one case."""

    case_index: int
    receipt: Receipt | None = None
    error: str = ""


class Fillers:
    """Samples that only keep others company: random prompts and parameters, drawn from a seed."""

    def __init__(self, generator: Generator, model: Model, rng: random.Random, deadline: float, caller: Caller) -> None:
        self._generator = generator
        self._model = model
        self._rng = rng
        self._deadline = deadline
        self._caller = caller

    @asynccontextmanager
    async def crowd(self, size: int) -> AsyncIterator[None]:
        """Keeps `size` samples queued or running; one that ends is replaced by another."""
        running: list[Generation] = []
        renewals: list[asyncio.Task[None]] = []
        try:
            for place in range(size):
                running.append(self._start(CROWD_TOKENS))
                renewals.append(asyncio.ensure_future(self._renew(running, place)))
            yield
        finally:
            for renewal in renewals:
                renewal.cancel()
            await asyncio.gather(*renewals, return_exceptions=True)
            for generation in running:
                await generation.close()

    @asynccontextmanager
    async def holding(self, count: int, num_tokens: int) -> AsyncIterator[None]:
        """Holds `count` slots with samples of up to `num_tokens` prompt and output tokens."""
        async with AsyncExitStack() as stack:
            holders = []
            for _ in range(count):
                holders.append(self._start(num_tokens, endless=True))
                stack.push_async_callback(holders[-1].close)
            for holder in holders:
                await holder.first_token()
            yield

    async def _renew(self, running: list[Generation], place: int) -> None:
        try:
            while True:
                await running[place].receipt()
                await running[place].close()
                running[place] = self._start(CROWD_TOKENS)
        except CorunError as error:  # The crowd gets thinner; what is compared is not the crowd.
            log.warning("a filler of a verification failed: %s", error)

    def _start(self, num_tokens: int, *, endless: bool = False) -> Generation:
        return self._generator.start([self._draw(num_tokens, endless=endless)])

    def _draw(self, num_tokens: int, *, endless: bool) -> Sample:
        rng = self._rng
        room = self._model.max_model_len
        num_prompt = rng.randint(1, max(1, min(MAX_FILLER_PROMPT, room // 4, num_tokens // 2)))
        longest = max(1, min(num_tokens, room) - num_prompt)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.6, 1.0)),
            max_tokens=longest if endless else rng.randint(max(1, longest // 2), longest),
            ignore_eos=True,
        )
        prompt = tuple(rng.randrange(self._model.vocab_size) for _ in range(num_prompt))
        return Sample(
            request_id=f"filler-{rng.getrandbits(64):016x}",
            index=0,
            prompt_token_ids=prompt,
            prompt_digest=prompt_digest(prompt),
            params=params,
            seed=rng.randint(0, MAX_SEED),
            deadline=self._deadline,
            caller=self._caller,
        )


class Verifier:
    """Runs verifications, one at a time."""

    def __init__(self, generator: Generator, registry: Registry, *, max_cases: int) -> None:
        self._generator = generator
        self._registry = registry
        self._max_cases = max_cases
        self._is_busy = False

    async def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition],
        *,
        order_seed: int,
        deadline: float,
        caller: Caller,
    ) -> AsyncGenerator[VerifyResult, None]:
        """One result per case and condition, as they come.

        Raises InvalidArgumentError, before anything runs, for a case that cannot be run, and OverloadedError while
        another verification runs.
        """
        if self._is_busy:
            raise OverloadedError("another verification is running", BUSY_RETRY_S)
        self._is_busy = True
        try:
            model = await self._generator.model(deadline)
            self._check(cases, model)
            judge = Judge(cases)
            for condition in conditions or tuple(Condition):
                rng = random.Random(f"{order_seed} {condition.value}")  # Text seeds are stable across processes.
                fillers = Fillers(self._generator, model, rng, deadline, caller)
                samples = [_sample(case, index, deadline, caller) for index, case in enumerate(cases)]
                async with aclosing(self._under(condition, samples, fillers, rng)) as outcomes:
                    async for outcome in outcomes:
                        yield judge.result(condition, outcome)
        finally:
            self._is_busy = False

    def _under(
        self, condition: Condition, samples: Sequence[Sample], fillers: Fillers, rng: random.Random
    ) -> AsyncGenerator[Outcome, None]:
        runs: dict[Condition, Callable[[], AsyncGenerator[Outcome, None]]] = {
            Condition.ALONE: lambda: self._alone(samples),
            Condition.CROWDED: lambda: self._crowded(samples, fillers),
            Condition.OTHER_SLOTS: lambda: self._in_other_slots(samples, fillers, rng),
            Condition.SHUFFLED: lambda: self._shuffled(samples, rng),
        }
        return runs[condition]()

    async def _alone(self, samples: Sequence[Sample]) -> AsyncGenerator[Outcome, None]:
        for index, sample in enumerate(samples):
            yield await self._run(index, sample)

    async def _crowded(self, samples: Sequence[Sample], fillers: Fillers) -> AsyncGenerator[Outcome, None]:
        size = sum(node.slots for node in self._registry.decode_nodes())
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(fillers.crowd(size))
            except CorunError as error:
                for index, _ in enumerate(samples):
                    yield Outcome(case_index=index, error=f"no crowd: {error}")
                return
            for index, sample in enumerate(samples):
                yield await self._run(index, sample)

    async def _in_other_slots(
        self, samples: Sequence[Sample], fillers: Fillers, rng: random.Random
    ) -> AsyncGenerator[Outcome, None]:
        for index, sample in enumerate(samples):
            nodes = self._registry.decode_nodes()
            held = rng.randint(1, MAX_HELD_SLOTS)
            try:
                async with fillers.holding(*_holding(nodes, sample, held)):
                    outcome = await self._run(index, sample)
            except CorunError as error:
                outcome = Outcome(case_index=index, error=str(error))
            yield outcome

    async def _shuffled(self, samples: Sequence[Sample], rng: random.Random) -> AsyncGenerator[Outcome, None]:
        order = list(enumerate(samples))
        rng.shuffle(order)
        tasks = [asyncio.ensure_future(self._run(index, sample)) for index, sample in order]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, index: int, sample: Sample) -> Outcome:
        try:
            generation = self._generator.start([sample])
        except CorunError as error:
            return Outcome(case_index=index, error=str(error))
        try:
            return Outcome(case_index=index, receipt=await generation.receipt())
        except CorunError as error:
            return Outcome(case_index=index, error=str(error))
        finally:
            await generation.close()

    def _check(self, cases: Sequence[VerifyCase], model: Model) -> None:
        if not 1 <= len(cases) <= self._max_cases:
            raise InvalidArgumentError("cases", len(cases), f"must be 1 to {self._max_cases} cases")
        for index, case in enumerate(cases):
            with naming_case(index):
                self._check_case(case, model)

    def _check_case(self, case: VerifyCase, model: Model) -> None:
        if case.sampling_params.n != 1:
            raise InvalidArgumentError("sampling_params.n", case.sampling_params.n, "must be 1")
        check_seed(case.seed)
        self._generator.check(case.prompt_token_ids, case.sampling_params, model)


class Judge:
    """Compares what came out with what had to: the digest given with a case, else that of its first run."""

    def __init__(self, cases: Sequence[VerifyCase]) -> None:
        self._expected = [case.output_digest for case in cases]

    def result(self, condition: Condition, outcome: Outcome) -> VerifyResult:
        index, receipt = outcome.case_index, outcome.receipt
        if receipt is not None and not self._expected[index]:
            self._expected[index] = receipt.output_digest
        expected = self._expected[index]
        return VerifyResult(
            case_index=index,
            condition=condition,
            match=receipt is not None and receipt.output_digest == expected,
            expected_digest=expected,
            receipt=receipt,
            error=outcome.error,
        )


@contextmanager
def naming_case(index: int) -> Iterator[None]:
    """Says in the field of a refusal which case it is about."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"cases[{index}].{error.field}", error.value, error.limit) from None


def _sample(case: VerifyCase, index: int, deadline: float, caller: Caller) -> Sample:
    return Sample(
        request_id=f"verify-{index}",
        index=0,
        prompt_token_ids=case.prompt_token_ids,
        prompt_digest=prompt_digest(case.prompt_token_ids),
        params=case.sampling_params,
        seed=case.seed,
        deadline=deadline,
        caller=caller,
    )


def _holding(nodes: Sequence[NodeInfo], sample: Sample, held: int) -> tuple[int, int]:
    """How many samples hold slots ahead of `sample` on all nodes, and the tokens each may have.

    Beside them, every node keeps a slot and the KV for the sample itself.
    """
    if not nodes:
        raise UnavailableError("no decode node is in use")
    per_node = [min(held, node.slots - 1, _blocks_left(node, sample)) for node in nodes]
    count = sum(per_node)
    if count == 0:
        return 0, 0
    room = min(
        _blocks_left(node, sample) // number * node.block_size
        for node, number in zip(nodes, per_node, strict=True)
        if number
    )
    return count, room


def _blocks_left(node: NodeInfo, sample: Sample) -> int:
    return max(0, node.kv_blocks - -(-sample.need.total // node.block_size))
