"""A cluster in simulated time: the router's own choice of nodes, and engines that are only rates.

`simulate` is to a cluster that nobody has what `corun_bench.driver.drive` is to a system that is up: it takes a
workload and returns its run, so the same metrics come from both. The simulation has no clock and draws nothing, so the
same workload gives the same run, bit by bit.

The model. A step of an engine computes up to `STEP_TOKENS` tokens of the prompts that wait there, at a measured rate,
and one token for each of its rows, in the time measured for so many rows. A prefill node's steps have no rows, and a
decode node's no prompts. A colocated node's steps have both, and last as long as the two parts together, whether decode
rows ride in prefill steps or the two kinds of steps take turns. A sample whose prompt the same engine computes begins
in the step after it; a node whose certificate lets it begin in the prompt's own last step is faster. A decode node
reads the KV of one prompt at a time, in a time that is proportional to its length, and in none if both sides have the
same engine. Messages take no time, and nothing fails. The queue has one client of one class, so its order is that of
arrival; as in `router.queue`, the first that has to wait lets nobody pass. Under targets of latency, all nodes report
at once every `REPORT_S` simulated seconds, and the router looks at its colocated nodes then and when a prompt or a
sample ends, by `router.flexing`.

This module must not know where rates come from or what is made of a run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, TypeVar

from corun.errors import InvalidArgumentError
from corun.room import blocks_needed, places
from corun.types import NodeLoad
from corun_bench.driver import Outcome, Request, Run, Workload
from corun_bench.systems import NodeCounts
from router.flexing import Flexing
from router.placement import PREFILLS_IN_FLIGHT, STEPS_IN_FLIGHT, DecodeRoom, Need, PrefillRoom, choose_pair

STEP_TOKENS = {"prefill": 4096, "decode": 0, "colocated": 8192}
"""The most prompt tokens of a step of an engine of each kind, as in `corun.node.vllm.start`, without the part that a
colocated node's rows take."""
BLOCK_SIZE = 16
"""The tokens of a KV block, as in vLLM on a GPU."""
REPORT_S = 1.0
"""The time from one report of a node to the next, in seconds: the default of `heartbeat_interval_ms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one engine was measured to do."""

    prefill_tokens_per_s: float
    decode_steps: tuple[tuple[float, float], ...]
    """The measured decode steps: numbers of rows, rising, each with the seconds that a step takes."""
    handoff_s_per_token: float | None = None
    """The seconds that a decode node reads another engine's KV, for each prompt token; None: not known."""
    slots: int
    """The slots of a node that decodes."""
    kv_tokens: int = 0
    """The KV room of a node that decodes, in tokens; 0: enough for every sample that may have a lease."""
    step_tokens: int = 0
    """The most prompt tokens of a step, if that is less than `STEP_TOKENS`; 0: it is not."""

    def step_s(self, rows: int) -> float:
        """Return how long a decode step takes: on the line between the measured numbers of rows, and below the first as
        long as the first. Beyond the last it is on the line through the last two, or proportional if there is one."""
        steps = self.decode_steps
        if rows <= steps[0][0]:
            return steps[0][1]
        if len(steps) == 1:
            return steps[0][1] * rows / steps[0][0]
        pairs = itertools.pairwise(steps)
        (low, low_s), (high, high_s) = next((pair for pair in pairs if rows <= pair[1][0]), steps[-2:])
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    @property
    def decode_tokens_per_s(self) -> float:
        """The output tokens a second of a node whose slots are all in use."""
        return self.slots / self.step_s(self.slots)


@dataclass(kw_only=True, slots=True)
class _Sample:
    """A request on its way."""

    outcome: Outcome
    need: Need
    decode: str = ""
    prefill: str = ""


@dataclass(slots=True)
class _Prompt:
    """One computation of a prompt, and the samples that get its KV."""

    tokens: int
    tokens_left: int
    samples: list[_Sample]


class _Step(NamedTuple):
    """A step of an engine: how long it takes, and what is known when it ends."""

    duration_s: float
    computed: list[_Prompt]
    entered: list[_Sample]
    """The samples of which it draws the first token."""
    ending: list[_Sample]
    """The samples that have few tokens left when it ends (`router.placement.ENDING`)."""
    done: list[_Sample]
    """The samples of which it draws the last token."""


@dataclass(slots=True)
class Engine:
    """One engine: the prompts and rows that it has, and how much it has computed."""

    name: str
    kind: str
    rates: Rates
    prompts: deque[_Prompt] = field(default_factory=deque)
    line: deque[_Sample] = field(default_factory=deque)
    """The samples whose KV is here, and that wait for a slot."""
    rows: int = 0
    ends: list[tuple[int, int, _Sample]] = field(default_factory=list)
    """A heap of the rows: the decode step that draws a sample's last token, and the sample."""
    continuing: list[tuple[int, int, _Sample]] = field(default_factory=list)
    """A heap of the rows with many tokens left: the decode step after which it has few, and the sample."""
    decode_steps: int = 0
    is_awake: bool = False
    """Whether an event of this engine is ahead."""
    reads_until: float = 0.0
    """When the last read of KV from another engine that has been ordered here will end."""
    prompt_tokens: int = 0
    whole_prompt_tokens: int = 0
    """The tokens of the prompts that are computed to their ends: what a node reports."""
    output_tokens: int = 0
    step: _Step | None = None
    """The step that it computes."""

    @property
    def used_slots(self) -> int:
        return self.rows + (len(self.step.done) if self.step else 0)

    def begin_step(self) -> _Step | None:
        """Take what the next step computes. Return the step, or None if there is nothing to compute."""
        entered = []
        while self.line and self.rows < self.rates.slots:
            sample = self.line.popleft()
            self.rows += 1
            request = sample.outcome.request
            heapq.heappush(self.ends, (self.decode_steps + request.max_tokens, request.index, sample))
            few_left = self.decode_steps + sample.need.tokens_before_ending
            heapq.heappush(self.continuing, (few_left, request.index, sample))
            entered.append(sample)
        if not self.rows and not self.prompts:
            return None
        room, computed = self.step_tokens, []
        while self.prompts and room >= min(1, self.prompts[0].tokens_left):
            taken = min(room, self.prompts[0].tokens_left)
            self.prompts[0].tokens_left -= taken
            room -= taken
            if not self.prompts[0].tokens_left:
                computed.append(self.prompts.popleft())
        self.prompt_tokens += self.step_tokens - room
        self.output_tokens += self.rows
        prefill_s = (self.step_tokens - room) / self.rates.prefill_tokens_per_s
        duration_s = prefill_s + (self.rates.step_s(self.rows) if self.rows else 0.0)
        self.decode_steps += bool(self.rows)
        ending, done = (self._due(heap) for heap in (self.continuing, self.ends))
        self.rows -= len(done)
        return _Step(duration_s, computed, entered, ending, done)

    def _due(self, heap: list[tuple[int, int, _Sample]]) -> list[_Sample]:
        """Take the samples from a heap whose decode step this is."""
        due = []
        while heap and heap[0][0] == self.decode_steps:
            due.append(heapq.heappop(heap)[2])
        return due

    @property
    def step_tokens(self) -> int:
        most = STEP_TOKENS[self.kind]
        return min(most, self.rates.step_tokens or most)

    def load(self, duration_s: float) -> float:
        """Return the share of its best speed that it worked at: 1 if it computed without a gap and with full slots."""
        work_s = self.prompt_tokens / self.rates.prefill_tokens_per_s
        work_s += self.output_tokens / self.rates.decode_tokens_per_s
        return work_s / duration_s if duration_s > 0 else 0.0


R = TypeVar("R", PrefillRoom, DecodeRoom)


@dataclass(eq=False)
class _Node(Generic[R]):
    """A node as the router sees it. A colocated engine has two, one for each role."""

    node_id: str
    engine: Engine
    room: R
    load: NodeLoad = field(default_factory=NodeLoad)
    heard_at: float = 0.0


@dataclass(kw_only=True, slots=True)
class Flexed:
    """What targets of latency changed in a run."""

    times: int = 0
    """How often a colocated node began to take prompts only."""
    prompts_only_s: float = 0.0
    """For how long nodes took prompts only, all of them together."""
    prompts_last_s: float = 0.0
    """For how long nodes got prompts last, because their steps were too slow, all of them together."""
    until_s: float = 0.0
    """Up to when these times count."""


@dataclass(kw_only=True)
class Simulated:
    """A simulated run, and what the engines did in it."""

    run: Run
    engines: list[Engine]
    handoffs: int
    """The number of prompts whose KV went from one engine to another."""
    flexed: Flexed | None = None
    """What targets changed; None without targets, or without colocated nodes."""

    def load(self, kind: str) -> float | None:
        """Return the mean load of the engines of a kind; None if there are none."""
        loads = [engine.load(self.run.duration_s) for engine in self.engines if engine.kind == kind]
        return sum(loads) / len(loads) if loads else None


def simulate(
    counts: NodeCounts,
    rates: Rates,
    workload: Workload,
    *,
    samples: int = 1,
    ttft_target_ms: int = 0,
    tpot_target_ms: int = 0,
) -> Simulated:
    """Run a workload once on a cluster with these nodes.

    samples: how many neighbours in the workload have one prompt.
    ttft_target_ms, tpot_target_ms: the router's targets of latency; 0: none.

    Raises InvalidArgumentError if a request has no room on an empty node, or if KV must go between engines and nobody
    knows how long that takes.
    """
    if counts.engines > 1 and rates.handoff_s_per_token is None:
        limit = f"must be known for {counts.name}: its KV goes from engine to engine"
        raise InvalidArgumentError("handoff_us_per_token", None, limit)
    flexing = Flexing(ttft_target_ms=ttft_target_ms, tpot_target_ms=tpot_target_ms)
    return _Cluster(counts, rates, workload, samples, flexing).run()


class _Cluster:
    """A router, its nodes, and the events that are ahead.

    A colocated node is two nodes with one engine.
    """

    def __init__(self, counts: NodeCounts, rates: Rates, workload: Workload, samples: int, flexing: Flexing) -> None:
        self._rates, self._workload = rates, workload
        self._now = 0.0
        self._events: list[tuple[float, int, Request | _Sample | Engine | None]] = []
        """When a request is sent, a sample's KV has been read, or an engine's step ends; or an engine wakes. None: the
        nodes report."""
        self._numbers = itertools.count()
        self._engines: list[Engine] = []
        self._engine_of: dict[str, Engine] = {}
        self._prefills: dict[str, PrefillRoom] = {}
        self._decodes: dict[str, DecodeRoom] = {}
        self._queue: deque[_Sample] = deque()
        self._waiting_for: Counter[str] = Counter()
        """The samples in the queue, by KV key."""
        self._tokens_to_compute = 0
        """The prompt tokens of the samples in the queue, those that share their KV once."""
        self._shared: dict[tuple[str, str], _Prompt] = {}
        """What is being computed for several samples, by prefill node and KV key."""
        self._read_at: dict[tuple[str, str], float] = {}
        """When a decode node has KV that several samples share, by decode node and KV key."""
        self._handoffs = 0
        longest = max((len(one.prompt_token_ids) + one.max_tokens for one in workload.requests), default=1)
        if rates.kv_tokens and longest > rates.kv_tokens // BLOCK_SIZE * BLOCK_SIZE:
            raise InvalidArgumentError("kv_tokens", rates.kv_tokens, f"must hold the longest request, {longest} tokens")
        kv_blocks = rates.kv_tokens // BLOCK_SIZE or places(rates.slots) * blocks_needed(longest, BLOCK_SIZE)
        for kind, count in asdict(counts).items():
            for number in range(count):
                self._add(Engine(f"{kind[0]}{number}", kind, rates), kv_blocks)
        self._flexing = flexing
        self._flexed = Flexed() if counts.colocated and flexing.has_target else None
        self._prefill_nodes = [_Node(name, self._engine_of[name], one) for name, one in sorted(self._prefills.items())]
        self._decode_nodes = [_Node(name, self._engine_of[name], one) for name, one in sorted(self._decodes.items())]
        if self._flexed:
            self._at(REPORT_S, None)
        self._samples = [
            _Sample(
                outcome=Outcome(request=request),
                need=Need(
                    num_prompt=len(request.prompt_token_ids),
                    max_tokens=request.max_tokens,
                    kv_key=str(request.index // samples) if samples > 1 else "",
                ),
            )
            for request in workload.requests
        ]

    def _add(self, engine: Engine, kv_blocks: int) -> None:
        self._engines.append(engine)
        roles = ("prefill", "decode") if engine.kind == "colocated" else (engine.kind,)
        for role in roles:
            node_id = f"{engine.name}-{role}" if engine.kind == "colocated" else engine.name
            self._engine_of[node_id] = engine
            if role == "prefill":
                most = STEPS_IN_FLIGHT * engine.step_tokens
                self._prefills[node_id] = PrefillRoom(
                    max_in_flight=PREFILLS_IN_FLIGHT, max_tokens=most, engine_id=engine.name
                )
            else:
                self._decodes[node_id] = DecodeRoom(
                    slots=self._rates.slots, kv_blocks=kv_blocks, block_size=BLOCK_SIZE, engine_id=engine.name
                )

    def run(self) -> Simulated:
        requests = self._workload.requests
        self._unsent = iter(() if self._workload.is_open else requests[self._workload.max_concurrency :])
        for request in requests if self._workload.is_open else requests[: self._workload.max_concurrency]:
            self._at(request.arrival_s if self._workload.is_open else 0.0, request)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            if isinstance(event, Engine):
                self._step(event)
            elif isinstance(event, _Sample):
                self._receive(event)
            elif isinstance(event, Request):
                self._send(event)
            else:
                self._report()
        outcomes = [sample.outcome for sample in self._samples]
        duration_s = max((outcome.done_s for outcome in outcomes), default=0.0)
        run = Run(outcomes=outcomes, duration_s=duration_s)
        return Simulated(run=run, engines=self._engines, handoffs=self._handoffs, flexed=self._flexed)

    def _at(self, time: float, event: Request | _Sample | Engine | None) -> None:
        """Let something happen; what is to happen at the same time happens in the order of these calls."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _wake(self, engine: Engine) -> None:
        """Let an idle engine begin a step when everything else that happens at this time has happened."""
        if not engine.is_awake:
            engine.is_awake = True
            self._at(self._now, engine)

    def _send(self, request: Request) -> None:
        sample = self._samples[request.index]
        sample.outcome.sent_s = self._now
        self._queue.append(sample)
        self._count(sample.need, 1)
        if len(self._queue) == 1:
            self._pump()

    def _pump(self) -> None:
        """Place samples in their order, until the first one has to wait."""
        while self._queue:
            sample = self._queue[0]
            pair = choose_pair(sample.need, self._decodes, self._prefills, lambda decode, prefill: True)
            if pair is None:
                return
            sample.decode, sample.prefill = pair
            self._count(sample.need, -1)
            self._place(self._queue.popleft())

    def _count(self, need: Need, sign: int) -> None:
        """Count a sample that begins or ends to wait in the queue."""
        if need.kv_key:
            self._waiting_for[need.kv_key] += sign
        if not need.kv_key or self._waiting_for[need.kv_key] == (sign > 0):  # It is the first, or was the last one.
            self._tokens_to_compute += sign * need.num_prompt

    def _place(self, sample: _Sample) -> None:
        need, room, engine = sample.need, self._prefills[sample.prefill], self._engine_of[sample.prefill]
        joins, knows = room.computes(need.kv_key), room.may_have(need.kv_key)
        self._decodes[sample.decode].take(need)
        room.take(need.num_prompt, need.kv_key)
        if joins:
            self._shared[sample.prefill, need.kv_key].samples.append(sample)
            return
        tokens = 0 if knows else need.num_prompt
        prompt = _Prompt(tokens, tokens, [sample])
        if need.kv_key:
            self._shared[sample.prefill, need.kv_key] = prompt
        engine.prompts.append(prompt)
        self._wake(engine)

    def _step(self, engine: Engine) -> None:
        """End an engine's step and begin its next one, before the router knows of it. Samples that came with a prompt
        of the engine are in it: they begin in the step after the prompt's last one."""
        ended = engine.step
        for prompt in ended.computed if ended else ():
            engine.line += [sample for sample in prompt.samples if self._engine_of[sample.decode] is engine]
        engine.step = engine.begin_step()
        engine.is_awake = engine.step is not None
        if engine.step is not None:
            self._at(self._now + engine.step.duration_s, engine)
        if ended is None:
            return
        for sample in ended.entered:
            sample.outcome.arrivals.append((self._now, 1))
        for prompt in ended.computed:
            engine.whole_prompt_tokens += prompt.tokens
            for sample in prompt.samples:
                self._hand_over(sample)
        for sample in ended.ending:
            self._decodes[sample.decode].note_ending()
        for sample in ended.done:
            self._finish(sample)
        if ended.computed or ended.done:
            self._change()

    def _report(self) -> None:
        """Let all nodes report what they do, now and while anything is ahead."""
        if not self._events:
            return
        for prefill in self._prefill_nodes:
            tokens = prefill.engine.whole_prompt_tokens
            prefill.load = NodeLoad(queued_prompt_tokens=prefill.room.queued_tokens, tokens=tokens)
            prefill.heard_at = self._now
        for decode in self._decode_nodes:
            decode.load = NodeLoad(used_slots=decode.engine.used_slots, steps=decode.engine.decode_steps)
            decode.heard_at = self._now
        self._change()
        self._at(self._now + REPORT_S, None)

    def _change(self) -> None:
        """Let the router do what it does after a change of the nodes: place samples, and look at its nodes again."""
        self._pump()
        if (flexed := self._flexed) is None:
            return
        seconds, flexed.until_s = self._now - flexed.until_s, self._now
        flexed.prompts_only_s += seconds * self._flexing.num_prompts_only
        flexed.prompts_last_s += seconds * sum(room.is_slow for room in self._prefills.values())
        head, prefills = self._queue[0].need if self._queue else None, self._prefill_nodes
        if changed := self._flexing.review(self._decode_nodes, prefills, head, self._tokens_to_compute, self._now):
            flexed.times += sum(node.room.prompts_only for node in changed)
            self._pump()

    def _hand_over(self, sample: _Sample) -> None:
        """Let the decode node read a computed prompt; what several samples share is read once."""
        need = sample.need
        self._prefills[sample.prefill].give(need.num_prompt, need.kv_key, is_computed=True)
        reader, key = self._engine_of[sample.decode], (sample.decode, need.kv_key)
        if reader is self._engine_of[sample.prefill]:
            return  # It has the sample already.
        if not need.kv_key or key not in self._read_at:
            assert self._rates.handoff_s_per_token is not None
            reader.reads_until = max(self._now, reader.reads_until)
            reader.reads_until += need.num_prompt * self._rates.handoff_s_per_token
            self._read_at[key] = reader.reads_until
            self._handoffs += 1
        self._at(max(self._now, self._read_at[key]), sample)

    def _receive(self, sample: _Sample) -> None:
        engine = self._engine_of[sample.decode]
        engine.line.append(sample)
        self._wake(engine)

    def _finish(self, sample: _Sample) -> None:
        outcome = sample.outcome
        if outcome.request.max_tokens > 1:
            outcome.arrivals.append((self._now, outcome.request.max_tokens - 1))
        outcome.done_s = self._now
        self._decodes[sample.decode].give(sample.need, was_ending=True)
        if (following := next(self._unsent, None)) is not None:
            self._at(self._now, following)


def work_s(rates: Rates, requests: Sequence[Request], samples: int = 1) -> tuple[float, float]:
    """Return the mean seconds that a request takes of an engine for its prompt and for its output, at best: prompts
    without a gap, output with full slots, and shared prompts once."""
    count = max(1, len(requests))
    prompts = sum(len(one.prompt_token_ids) for one in requests) / samples
    outputs = sum(one.max_tokens for one in requests)
    return prompts / count / rates.prefill_tokens_per_s, outputs / count / rates.decode_tokens_per_s


def at_best(counts: NodeCounts, prefill_s: float, decode_s: float) -> float:
    """Return the requests a second that a cluster could finish at most, from the work of one request."""
    return min(
        counts.engines / (prefill_s + decode_s),
        (counts.prefill + counts.colocated) / prefill_s,
        (counts.decode + counts.colocated) / decode_s,
    )
