"""Run cases again under chosen conditions and compare every bit of their output.

Each condition changes something that must not matter: which samples run beside a sample, which slot it gets, in which
order samples arrive. Cases run in the same way as every other sample, at the lowest priority, and leave slots free for
others, except that their prompts are isolated: what a case gives rests on no node's certificate. Their crowd takes only
idle slots (`router.audit.idle`). This module must not know gRPC messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from corun.errors import CorunError, DeadlineError, InvalidArgumentError, OverloadedError, renaming
from corun.params import check_seed
from corun.receipt import Receipt, alternatives_digest, prompt_digest, text_digest
from corun.records.verification import Condition, VerifyCase, VerifyResult, all_if_none
from corun.rpc.auth import Caller
from corun.types import Alternatives, NodeInfo, Priority
from router.attempt import SampleTask
from router.audit.auditor import Auditor
from router.audit.idle import SPARE_SLOTS, Crowd, Fillers, IdleRuns
from router.clock import loop_time
from router.nodes.registry import Registry
from router.prompts import Model
from router.queue import MIN_RETRY_S
from router.request import RequestRunner

LONGEST_S = 900.0
"""The longest time of a verification. A caller with more to verify calls again, so that others get their turn."""
BUSY_RETRY_S = 5.0
CROWD_TOKENS = 64
"""The smallest limit on the prompt and output tokens of a sample of a crowd. It is enough to run beside others at every
stage, and small enough that samples come and go."""
CROWD_TOKENS_PER_SLOT = 2
"""The tokens per slot of a node that a sample of a crowd should have. Prompts may be computed one after the other, so
with more slots each sample has to stay longer until all slots are taken."""
CROWD_WAIT_S = 10.0
"""The longest wait for the crowd before a case runs."""
ROOM_WAIT_S = 1.0
"""The longest wait until a case of a crowd could have a slot. The last case may still be giving one back."""
MAX_HELD_SLOTS = 16
"""The most slots per node that are held ahead of a case. More would test nothing new and take longer."""


class Judge:
    """Compares each run with the expected one. The expected digest is the one given with the case, otherwise that of
    its first run. The expected text, alternatives and finish reason are those of the case's first run."""

    def __init__(self, cases: Sequence[VerifyCase]) -> None:
        self._expected = [case.output_digest for case in cases]
        self._endings: dict[int, tuple[object, str, str]] = {}
        """The finish reasons, and the digests of texts and alternatives, of first runs, by case."""

    def result(
        self, condition: Condition, index: int, receipt: Receipt, text: str, tops: Sequence[Alternatives]
    ) -> VerifyResult:
        """Return the result of a run of the case with this index."""
        expected = self._expected[index] = self._expected[index] or receipt.output_digest
        ending = receipt.finish_reason, text_digest(text), alternatives_digest(tops)
        return VerifyResult(
            case_index=index,
            condition=condition,
            match=receipt.output_digest == expected and self._endings.setdefault(index, ending) == ending,
            expected_digest=expected,
            receipt=receipt,
            text_digest=ending[1],
            alternatives_digest=ending[2],
        )

    def failure(self, condition: Condition, index: int, error: str) -> VerifyResult:
        """Return the result of a case that gave no output."""
        expected = self._expected[index]
        return VerifyResult(case_index=index, condition=condition, match=False, expected_digest=expected, error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The runs of one checked verification under one condition."""

    condition: Condition
    samples: Sequence[tuple[int, SampleTask]]
    """The samples to run, each with the index of its case."""
    judge: Judge
    fillers: Fillers
    rng: random.Random
    limit: int
    """The most samples that the caller may have at once: cases, and those of a crowd beside one."""


class Verifier:
    """Runs verifications, one at a time for each caller. `pump` has to be called when the registry changes."""

    def __init__(
        self, requests: RequestRunner, registry: Registry, idle: IdleRuns, auditor: Auditor, *, max_cases: int
    ) -> None:
        self._requests = requests
        self._registry = registry
        self._idle = idle
        self._auditor = auditor
        self._max_cases = max_cases
        self._callers: set[str] = set()
        self._crowds: set[Crowd] = set()
        self._runs: dict[Condition, Callable[[Job], AsyncGenerator[VerifyResult, None]]] = {
            Condition.ALONE: self._alone,
            Condition.CROWDED: self._crowded,
            Condition.OTHER_SLOTS: self._in_other_slots,
            Condition.SHUFFLED: self._shuffled,
        }

    def pump(self) -> None:
        """Start the fillers that may start now."""
        for crowd in tuple(self._crowds):
            crowd.pump()

    def check_size(self, num_cases: int, num_conditions: int) -> None:
        """Raise InvalidArgumentError if a call has no cases, or too many cases or conditions."""
        if not 1 <= num_cases <= self._max_cases:
            raise InvalidArgumentError("cases", num_cases, f"must be 1 to {self._max_cases} cases")
        if num_conditions > len(Condition):
            raise InvalidArgumentError("conditions", num_conditions, f"must be at most {len(Condition)} conditions")

    async def verify(
        self,
        cases: Sequence[VerifyCase],
        conditions: Sequence[Condition],
        *,
        order_seed: int,
        deadline: float,
        caller: Caller,
    ) -> AsyncGenerator[VerifyResult, None]:
        """Yield one result per case and condition, as they come.

        Raises:
            InvalidArgumentError: a case cannot be run. This is raised before anything runs.
            OverloadedError: another verification of this caller is running.
            DeadlineError: the time of the call, or LONGEST_S, was over before all cases were run.
        """
        with self._only_one_of(caller):
            deadline = min(deadline, loop_time() + LONGEST_S)
            model = await self._requests.model(deadline)
            conditions = all_if_none(conditions)
            changed, samples = await self._check(cases, model, deadline, caller)
            judge, done = Judge(cases), 0
            for condition in conditions:
                for index in changed:
                    yield judge.failure(condition, index, "its prompt's text gives other token ids than its own")
                done += len(changed)
                rng = random.Random(f"{order_seed} {condition.value}")  # A seed of text is stable across processes.
                job = Job(
                    condition=condition,
                    samples=samples,
                    judge=judge,
                    fillers=Fillers(model, rng, deadline, caller),
                    rng=rng,
                    limit=caller.max_requests or self._num_slots,
                )
                try:
                    async with aclosing(self._runs[condition](job)) as results:
                        async for result in results:
                            done += 1
                            yield result
                except DeadlineError as error:
                    runs = f"{done} of {len(cases) * len(conditions)} runs"
                    raise DeadlineError(f"the time of the verification is over, with {runs} done") from error

    @contextmanager
    def _only_one_of(self, caller: Caller) -> Iterator[None]:
        if caller.name in self._callers:
            who = f"client {caller.name}: " if caller.name else ""
            raise OverloadedError(f"{who}another verification is running", BUSY_RETRY_S)
        self._callers.add(caller.name)
        try:
            yield
        finally:
            self._callers.discard(caller.name)

    async def _check(
        self, cases: Sequence[VerifyCase], model: Model, deadline: float, caller: Caller
    ) -> tuple[list[int], list[tuple[int, SampleTask]]]:
        """Return the indices of the cases whose text gives other token ids than their prompt, and the samples of the
        others, each with the index of its case. Raises InvalidArgumentError for a case that cannot be run."""
        changed, samples = [], []
        for index, case in enumerate(cases):
            with naming_case(index):
                if case.sampling_params.n != 1:
                    raise InvalidArgumentError("sampling_params.n", case.sampling_params.n, "must be 1")
                check_seed(case.seed)
                prompt = case.prompt_token_ids
                self._requests.check(prompt, case.sampling_params, model)
                if case.text and not await self._requests.is_text_of(case.text, prompt, model, deadline, caller):
                    changed.append(index)
                else:
                    samples.append((index, _sample(case, index, deadline, caller)))
            await asyncio.sleep(0)  # Let the streams of other requests go on.
        return changed, samples

    @property
    def _num_slots(self) -> int:
        return sum(node.slots for node in self._registry.decode_nodes())

    async def _alone(self, job: Job) -> AsyncGenerator[VerifyResult, None]:
        for index, sample in job.samples:
            yield await self._run(job, index, sample)

    async def _crowded(self, job: Job) -> AsyncGenerator[VerifyResult, None]:
        nodes = self._registry.decode_nodes()
        wanted = max((CROWD_TOKENS_PER_SLOT * node.slots for node in nodes), default=0)
        num_tokens = max(CROWD_TOKENS, min(wanted, _tokens_beside(nodes, (sample for _, sample in job.samples))))
        left_free = 0
        draw = partial(job.fillers.draw, num_tokens)
        async with self._crowd(job, self._num_slots - 1, draw, spare_slots=lambda: left_free):
            for index, sample in job.samples:
                # Fillers leave a slot free until the case could have it: a case that had to wait would end its crowd.
                left_free = 1
                await self._registry.until(partial(self._registry.has_slot, sample.need), loop_time() + ROOM_WAIT_S)
                left_free = 0
                yield await self._run(job, index, sample)

    async def _in_other_slots(self, job: Job) -> AsyncGenerator[VerifyResult, None]:
        for index, sample in job.samples:
            held, nodes = job.rng.randint(1, MAX_HELD_SLOTS), self._registry.decode_nodes()
            size = sum(min(held, node.slots - 1) for node in nodes)  # Every node keeps a slot for the sample itself.
            draw = partial(job.fillers.draw, _tokens_beside(nodes, [sample]), endless=True)
            async with self._crowd(job, size, draw, spare_slots=lambda: 1):
                result = await self._run(job, index, sample)
            yield result

    async def _shuffled(self, job: Job) -> AsyncGenerator[VerifyResult, None]:
        order = list(job.samples)
        job.rng.shuffle(order)
        left_free = sum(min(SPARE_SLOTS, node.slots - 1) for node in self._registry.decode_nodes())
        gate = asyncio.Semaphore(max(1, min(job.limit, self._num_slots - left_free)))

        async def run(index: int, sample: SampleTask) -> VerifyResult:
            async with gate:
                return await self._run(job, index, sample)

        tasks = [asyncio.ensure_future(run(index, sample)) for index, sample in order]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _crowd(
        self, job: Job, size: int, draw: Callable[[], SampleTask], *, spare_slots: Callable[[], int]
    ) -> AsyncIterator[None]:
        """Let up to `size` fillers run beside the cases, and leave `spare_slots()` slots free on each node."""

        def spare() -> int:
            # Audits are few and need no speed, but without this a crowd would keep them out for as long as it runs.
            return SPARE_SLOTS + 1 if self._auditor.waiting else spare_slots()

        crowd = Crowd(self._registry, self._idle, draw, min(size, job.limit - 1), spare)
        self._crowds.add(crowd)
        try:
            await crowd.stand(CROWD_WAIT_S)
            yield
        finally:
            await crowd.close()
            self._crowds.discard(crowd)

    async def _run(self, job: Job, index: int, sample: SampleTask) -> VerifyResult:
        """Run a case once. If the queue has no room for the lowest priority, try again until the time is over. Raises
        DeadlineError when it is over."""
        while True:
            try:
                text, tops, receipt = await self._requests.start([sample]).to_end()
                return job.judge.result(job.condition, index, receipt, text, tops)
            except OverloadedError as error:
                if loop_time() + error.retry_after_s >= sample.deadline:
                    raise DeadlineError(str(error)) from error
                await asyncio.sleep(max(MIN_RETRY_S, error.retry_after_s))
            except DeadlineError:
                raise
            except CorunError as error:
                return job.judge.failure(job.condition, index, str(error))


def naming_case(index: int) -> AbstractContextManager[None]:
    """Add the index of the case to the field of an InvalidArgumentError."""
    return renaming(lambda field: f"cases[{index}].{field}")


def _sample(case: VerifyCase, index: int, deadline: float, caller: Caller) -> SampleTask:
    params = case.sampling_params
    return SampleTask(
        request_id=f"verify-{index}",
        index=0,
        prompt_token_ids=case.prompt_token_ids,
        prompt_digest=prompt_digest(case.prompt_token_ids),
        params=params,
        params_digest=params.digest(),
        seed=case.seed,
        deadline=deadline,
        caller=caller,
        priority=Priority.LOW,  # Every caller may ask for this priority.
        isolated=True,
    )


def _tokens_beside(nodes: Sequence[NodeInfo], samples: Iterable[SampleTask]) -> int:
    """Return the tokens that each of so many other samples as a node has slots may have, if the node is to have KV for
    all and for any of these."""
    needed = max((sample.need.total for sample in samples), default=0)
    free = ((node.kv_blocks - -(-needed // node.block_size)) // node.slots * node.block_size for node in nodes)
    return max(0, min(free, default=0))
