"""Random traces for scheduler tests, the record of how one was played, and the violations that no record may show.

Must not know vLLM: `tests.stepping` plays a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeAlias

from hypothesis import settings
from hypothesis import strategies as st

from corun.types import NodeRole

BLOCK_SIZE, MAX_LEN = 16, 512
ENDLESS = 0
"""A value of `Arrive.stops_after`: the request runs to max_tokens."""


@dataclass(frozen=True)
class Arrive:
    """A request arrives."""

    prompt: int
    """Its length in tokens."""
    max_tokens: int = 1
    stops_after: int = ENDLESS
    """The number, from 1, of the output token that is its stop token."""
    transfer_steps: int = 0
    """The number of steps that the read of its KV takes, by the other side or from it."""
    fails: bool = False
    """Whether the read of its KV fails."""
    common: int = ENDLESS
    """The number of its first tokens that all prompts have; ENDLESS: all of its tokens."""
    scope: str = ""
    """Whose cached KV it may use."""
    freedoms: tuple[str, ...] = ()
    """What it may make use of (`corun.node.kv.handle.FREEDOMS_PARAM`)."""
    reads: bool = False
    """Colocated: whether it is a sample, which reads its prompt's KV, and not a prompt."""
    own: bool = False
    """Colocated: whether the sample's prompt is one of this engine's own, whose KV is copied in the step that orders
    it."""
    with_prompt: int = 0
    """Colocated: how many such samples of an own prompt come with it. The prompt arrives right after them as a request
    of its own, with these `freedoms`."""
    group: int = 0
    """The number of the samples of one prompt that share its blocks; 0: it shares none. All have the same `prompt`."""
    mask_s: float = 0.0
    """The time that each of its masks takes, in seconds; 0: its output is free."""


@dataclass(frozen=True)
class Join:
    """Colocated: a sample of prompt `which`, modulo the number of prompts that the engine still has, comes after it."""

    which: int
    max_tokens: int = 1
    stops_after: int = ENDLESS


@dataclass(frozen=True)
class Abort:
    """Request `which`, modulo the number of requests so far, is aborted in whatever state it is."""

    which: int
    late: bool = False
    """Whether it is aborted when the next result of a step is there, and before its outputs are taken."""


@dataclass(frozen=True)
class Run:
    """The engine's loop runs `steps` iterations."""

    steps: int


Op: TypeAlias = "Arrive | Join | Abort | Run"


@dataclass(frozen=True)
class Trace:
    """A node's size, and the operations on it."""

    slots: int
    chunk: int
    """The most tokens of a prompt in a step."""
    blocks: int
    """The number of KV blocks that requests can use."""
    ops: tuple[Op, ...]
    budget: int = 0
    """The most tokens of a step; 0: a chunk."""


@dataclass(frozen=True)
class Platform:
    """The parts of the platform that a scheduler sees: steps in flight and model runner."""

    async_scheduling: bool
    v2_runner: bool


CPU = Platform(async_scheduling=False, v2_runner=False)
GPU = Platform(async_scheduling=True, v2_runner=True)
ANY_PLATFORM = st.sampled_from([CPU, GPU])


@dataclass(frozen=True)
class Engines:
    """The engines of one role, by one scheduler and on one platform. See `tests.stepping` for what they do."""

    stepping: ModuleType
    platform: Platform
    role: NodeRole | None
    scheduler: str

    def engine(self, trace: Trace, scheduler: str = "", **changes: Any) -> Any:
        return self.stepping.engine(scheduler or self.scheduler, trace, self.platform, role=self.role, **changes)

    def play(self, trace: Trace, scheduler: str = "", **changes: Any) -> Any:
        return self.stepping.play(scheduler or self.scheduler, trace, self.platform, role=self.role, **changes)


def examples(count: int) -> settings:
    """Always the same traces: a failure is one for everybody."""
    return settings(max_examples=count, derandomize=True, database=None)


@dataclass(frozen=True, slots=True)
class Row:
    """The part of one request that one step computes."""

    start: int
    """The position of its first token."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled step, and the KV right after it was scheduled, in blocks."""

    rows: dict[int, Row]
    """The rows by the request's number, which is its place in the order of arrival."""
    loads: tuple[int, ...]
    """The numbers of the requests whose KV begins to be read."""
    running: int
    """The number of requests that have a slot."""
    preempted: int
    free: int
    owed: int
    """The number of blocks that the admitted requests may still need up to their last token."""
    stale: int
    """The number of blocks given to requests as others had left them: neither zeroed, nor read, nor found."""
    wiped: int
    """The number of blocks zeroed although a request had them before, or while its KV is read into them."""
    wrong: int = 0
    """The number of prompt blocks of the step's rows that hold something else than that prompt's KV as it was read."""
    read_blocks: int = 0
    """The number of blocks whose read begins."""
    prompt_blocks: int = 0
    """Colocated: the number of blocks that prompts hold or may still need."""


@dataclass
class Record:
    """Everything that happened in one trace."""

    requests: list[Arrive] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    prompt_of: dict[int, int] = field(default_factory=dict)
    """Colocated: by sample that came with its prompt, before or after it, the prompt."""
    read: list[int] = field(default_factory=list)
    """The requests whose KV was told to have been read, in that order."""
    left_over: list[str] = field(default_factory=list)
    """Everything that is still held after the last request has ended."""
    stuck: bool = False
    """Whether requests that could run did not, with nothing in flight."""


LONGEST_PROMPT = 100
LONGEST_OUTPUT = 24
MOST_BLOCKS = 24


def prefill_traces(
    *,
    longest_output: int = 1,
    chunks: Sequence[int] = (8, 16, 40, 64),
    freedoms: Sequence[tuple[str, ...]] = ((),),
    **others: st.SearchStrategy[Any],
) -> st.SearchStrategy[Trace]:
    """Traces for a node that computes prompts; with more than one output token, for one that decodes as well. freedoms:
    what prompts have, one of these each."""
    stops = st.integers(ENDLESS, 3) if longest_output > 1 else st.just(ENDLESS)
    steps, may = st.integers(0, 30), st.sampled_from(freedoms)
    arrivals = _arrivals(longest_output, stops_after=stops, transfer_steps=steps, freedoms=may, **others)
    traces = _traces(arrivals, chunks=st.sampled_from(chunks))
    return st.builds(lambda trace, rest: replace(trace, budget=trace.chunk + rest), traces, st.integers(0, 100))


def decode_traces() -> st.SearchStrategy[Trace]:
    arrivals = _arrivals(
        LONGEST_OUTPUT,
        stops_after=st.integers(ENDLESS, 6),
        transfer_steps=st.integers(0, 6),
        fails=st.sampled_from([False, False, False, True]),
        mask_s=st.sampled_from([0.0, 0.0, 0.0003, 0.03]),
    )
    return _traces(arrivals, chunks=st.just(0))


def group_traces() -> st.SearchStrategy[Trace]:
    """Traces for a decode node with samples of few prompts, most of which share their blocks."""
    prompts = {0: 40, 1: 17, 2: 48, 3: 97}

    def member(group: int, max_tokens: int, transfer_steps: int, fails: bool) -> Arrive:
        return Arrive(prompts[group], max_tokens, transfer_steps=transfer_steps, fails=fails, group=group)

    fails = st.sampled_from([False, False, False, True])
    arrivals = st.builds(member, st.sampled_from([0, 1, 2, 2, 3, 3]), st.integers(1, 24), st.integers(0, 6), fails)
    return _traces(arrivals, chunks=st.just(0))


COLOCATED_BLOCKS = 2 * -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // BLOCK_SIZE), 2 * MOST_BLOCKS
"""The fewest and the most KV blocks of a colocated node: either half has room for the largest request."""


def colocated_traces(freedoms: Sequence[tuple[str, ...]]) -> st.SearchStrategy[Trace]:
    """Traces for a colocated node: those of a prefill node and of a decode node, one among the other. Some samples
    share their prompt's blocks, and all prompts begin alike."""
    prompts = st.builds(
        Arrive,
        prompt=st.integers(1, LONGEST_PROMPT),
        transfer_steps=st.integers(0, 30),
        freedoms=st.sampled_from(freedoms),
        scope=st.sampled_from(["", "a"]),
    )

    def node(trace: Trace, crowd: int, chunk: int, rest: int, blocks: int) -> Trace:
        """Return a trace in which `crowd` requests arrive where one did."""
        ops = itertools.chain(*([op] * (crowd if isinstance(op, Arrive) else 1) for op in trace.ops))
        return Trace(trace.slots, chunk, blocks, tuple(ops), chunk + rest)

    joins = st.builds(Join, st.integers(0, 99), st.integers(1, LONGEST_OUTPUT), st.integers(ENDLESS, 6))
    traces = _traces(prompts | _samples(freedoms), st.just(0), joins)
    chunks = st.sampled_from((8, 16, 40, 64))
    return st.builds(node, traces, st.integers(1, 6), chunks, st.integers(0, 100), st.integers(*COLOCATED_BLOCKS))


def _samples(freedoms: Sequence[tuple[str, ...]]) -> st.SearchStrategy[Arrive]:
    """Samples for a colocated node."""
    prompts = {1: 17, 2: 48, 3: 97}

    def sample(prompt: int, group: int, own: bool, fails: bool, with_prompt: int, **others: Any) -> Arrive:
        length = prompts.get(group, prompt)
        if with_prompt:
            return Arrive(length, reads=True, group=group, own=True, with_prompt=with_prompt, **others)
        # Of a prompt whose last block holds one token a sample may find all that it needs, and then no copy can fail.
        fails = fails and not (own and length % BLOCK_SIZE == 1)
        return Arrive(length, reads=True, group=group, own=own, fails=fails, **others)

    return st.builds(
        sample,
        st.integers(1, LONGEST_PROMPT),
        st.sampled_from([0, 0, 0, 1, 2, 3]),
        max_tokens=st.integers(1, LONGEST_OUTPUT),
        stops_after=st.integers(ENDLESS, 6),
        transfer_steps=st.integers(0, 6),
        own=st.booleans(),
        with_prompt=st.sampled_from([1, 2, 4, *[0] * 9]),
        freedoms=st.sampled_from(freedoms),
        fails=st.sampled_from([False, False, False, True]),
    )


def _arrivals(longest_output: int, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Arrive]:
    prompt, max_tokens = st.integers(1, LONGEST_PROMPT), st.integers(1, longest_output)
    return st.builds(Arrive, prompt=prompt, max_tokens=max_tokens, **others)


def _traces(
    arrivals: st.SearchStrategy[Arrive],
    chunks: st.SearchStrategy[int],
    joins: st.SearchStrategy[Join] = st.nothing(),  # noqa: B008
) -> st.SearchStrategy[Trace]:
    """Traces of these arrivals. A chunk of 0 stands for a decode step, which has one token for each slot."""
    aborts, runs = st.builds(Abort, st.integers(0, 99), st.booleans()), st.builds(Run, st.integers(1, 8))
    op = arrivals | arrivals | aborts | runs | joins
    ops = st.lists(op, min_size=12, max_size=60)  # A short trace never fills a node.
    # The largest request always fits: engines and services refuse a request that never can.
    blocks = st.integers(-(-(LONGEST_PROMPT + LONGEST_OUTPUT) // BLOCK_SIZE), MOST_BLOCKS)
    return st.builds(lambda n, c, b, o: Trace(n, c or n, b, tuple(o)), st.integers(1, 8), chunks, blocks, ops)


def violations(record: Record) -> Iterator[str]:
    """Yield each thing that no scheduler of ours may do, whatever its role."""
    steps = record.steps
    facts = {
        "stuck": record.stuck,
        "left over": bool(record.left_over),
        "preempted": any(step.preempted for step in steps),
        "more KV promised than exists": any(step.owed > step.free for step in steps),
        "KV of others behind a sequence": any(step.stale for step in steps),
        "KV is zeroed that somebody needs": any(step.wiped for step in steps),
        "decodes from another KV than its prompt's": any(step.wrong for step in steps),
    }
    yield from (name for name, is_found in facts.items() if is_found)
    for number, request in enumerate(record.requests):
        outcome = len(record.outputs.get(number, ())), record.finished.get(number, "")
        if number not in record.aborted and outcome != _expected(request):
            yield "wrong output"


def in_order(numbers: list[int]) -> bool:
    """Return whether the numbers ascend; requests are numbered as they arrive."""
    return numbers == sorted(numbers)


def _expected(request: Arrive) -> tuple[int, str]:
    """Return the number of output tokens and the finish reason that a request must have."""
    if request.fails:
        return 0, "error"
    if ENDLESS < request.stops_after <= request.max_tokens:
        return request.stops_after, "stop"
    return request.max_tokens, "length"
