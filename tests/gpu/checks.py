"""The checks of the suite: change a condition that must not matter, and compare every bit of the output.

Owns the cases and the conditions they run under. Sizes follow the cluster (slots, chunk, buckets, longest prompt), so
that the same checks run on the tiny model. Must not know how a cluster is started or results are shown.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from corun import Client, ClusterStatus, Generation, SamplingParams, Score
from corun.cli import verify_report
from corun.records.verification import Condition, VerifyCase
from corun.types import NodeRole
from prefill_node.engine import prefill_buckets
from tests.e2e.test_determinism import Case, bits, differing, run
from tests.e2e.test_structured import CONSTRAINTS
from tests.gpu.outputs import Outputs
from tests.gpu.report import Outcome
from tests.nodes import Nodes

PAPER = {"temperature": 0.6, "max_tokens": 8}
PAPER_SEED = 42
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"logit_bias": {40: 4.0}},
    {"min_tokens": 12},
)
PREFIX_LENGTHS = (40, 257, 600, 1000, 2049, 4100, 12_000, 30_000)
LONG = 8192
EACH, RAGGED = 4, 32
"""The numbers of prompts: for each style of sampling, and of ragged lengths."""
Found = Outcome | dict[str, Any]
"""A result, or facts that were measured."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Draws random prompts that a model can take."""

    vocab: int
    model_len: int

    def cases(self, count: int, low: int, high: int, seed: int, **params: Any) -> list[Case]:
        """Return prompts of `low` to `high` tokens, at most as many as the model takes, each with a seed of its own."""
        draw = random.Random(seed)
        settings = sampling(**params)
        longest = self.model_len - settings.max_tokens
        low, high = min(low, longest), min(high, longest)
        return [(self.draw(draw.randint(low, high), draw), settings, draw.randrange(2**63)) for _ in range(count)]

    def draw(self, length: int, draw: random.Random) -> list[int]:
        return [draw.randrange(3, self.vocab) for _ in range(length)]

    def paper(self) -> list[Case]:
        """Return the prompts of the paper's Section V-B: 32 prompts, temperature 0.6, one seed, 8 tokens."""
        return [(prompt, params, PAPER_SEED) for prompt, params, _ in self.cases(32, 64, 512, 0, **PAPER)]

    def styles(self, each: int) -> list[Case]:
        """Return so many prompts for each style of sampling."""
        styles = [{"temperature": 1.0, **style} for style in STYLES]
        return [case for i, style in enumerate(styles) for case in self.cases(each, 16, 700, 50 + i, **style)]

    def edges(self, chunk: int, buckets: Sequence[int]) -> list[Case]:
        """Return a prompt of every length around which a step changes its shape: buckets, chunks, KV blocks."""
        draw, params = random.Random(3), sampling(max_tokens=16)
        lengths = edge_lengths(chunk, buckets, self.model_len - 16)
        return [(self.draw(length, draw), params, draw.randrange(2**63)) for length in lengths]

    def ragged(self, count: int) -> list[Case]:
        return self.cases(count, 1, 4096, 11)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The cluster, client and limits that a check works with."""

    nodes: Nodes
    client: Client
    """The client of this check alone. It is closed when the check's time is over, which ends every call."""
    status: ClusterStatus
    deadline: float
    """The end of the check's time, on the monotonic clock."""
    scale: float = 1.0
    """A factor for the numbers of prompts."""
    long_output: int = 2048
    outputs: Outputs = field(default_factory=Outputs)
    """What all checks of this run have drawn."""

    @property
    def remaining_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    @property
    def slots(self) -> int:
        return sum(node.node.slots for node in self.status.nodes)

    @property
    def prompts(self) -> Prompts:
        nodes = [node.node for node in self.status.nodes]
        vocab, model_len = min(node.vocab_size for node in nodes), min(node.max_model_len for node in nodes)
        return Prompts(vocab=vocab, model_len=model_len)

    def cases(self, count: int, low: int, high: int, seed: int, **params: Any) -> list[Case]:
        return self.prompts.cases(count, low, high, seed, **params)

    def count(self, number: int) -> int:
        return max(2, round(number * self.scale))

    def run(self, cases: Sequence[Case], concurrency: int) -> list[Generation]:
        found = run(self.client, list(cases), concurrency)
        self.outputs.note(cases, found)
        return found

    def compare(self, name: str, cases: Sequence[Case], concurrency: int, alone: int = 1) -> Outcome:
        """Compare the outputs of the same cases, `alone` at a time and `concurrency` at a time."""
        return compared(name, self.run(cases, alone), self.run(cases, concurrency))


def sampling(**params: Any) -> SamplingParams:
    settings = {"logprobs": True, "ignore_eos": True, "max_tokens": 32, "temperature": 0.6, **params}
    return SamplingParams(**settings)


def compared(name: str, left: Sequence[Generation], right: Sequence[Generation], **detail: Any) -> Outcome:
    """Count the outputs that agree in every bit. The detail `distinct` is the number of different outputs in `left`."""
    wrong = differing(list(left), list(right))
    detail["distinct"] = len({bits(one) for one in left})
    if wrong:
        same_tokens = sum(a.token_ids == b.token_ids for a, b in zip(left, right, strict=True))
        detail |= {"differing": wrong[:16], "tokens_equal": same_tokens}
    return Outcome(name=name, total=len(left), equal=len(left) - len(wrong), detail=detail)


def paper(bench: Bench) -> Iterator[Found]:
    checked = bench.prompts.paper()
    alone = bench.run(checked, 1)
    logprobs = [value for one in alone for value in one.logprobs]
    detail: dict[str, Any] = {"mean_logprob": round(sum(logprobs) / len(logprobs), 3)}
    yield compared("paper: 32 prompts alone, in a batch of 32", alone, bench.run(checked, 32), **detail)


def verify_conditions(bench: Bench) -> Iterator[Found]:
    """Do what `corun verify` does."""
    cases = verify_report.built_in_cases(bench.client.get_cluster(), bench.count(verify_report.BUILT_IN_CASES))
    found = verify_report.Verification(cases).run(bench.client, timeout_s=bench.remaining_s)
    for condition in Condition:
        reasons = [str(one) for one in found.differences if one["condition"] == condition.value]
        detail = {"differences": reasons[:4]} if reasons else {}
        counts: dict[str, Any] = {"total": found.runs[condition], "equal": found.equal[condition]}
        yield Outcome(name=f"corun verify: {condition.value}", **counts, detail=detail)


def mixed(bench: Bench) -> Iterator[Found]:
    made = bench.prompts.styles(bench.count(EACH))
    yield bench.compare("greedy, seeded, filtered, penalised, biased mixed", made, len(made))


def edges(bench: Bench) -> Iterator[Found]:
    prefill = next(one.node for one in bench.status.nodes if one.node.role is NodeRole.PREFILL)
    part: dict[str, Any] = json.loads(prefill.contract_json)["prefill"]
    made = bench.prompts.edges(part["chunk_size"], part["buckets"])
    yield bench.compare(f"{len(made)} lengths around bucket and chunk edges", made, len(made))


def edge_lengths(chunk: int, buckets: Sequence[int], longest: int) -> list[int]:
    """Return C-1, C and C+1 of every edge. Without graphs there are no buckets, so a GPU's buckets are used."""
    around = {1, chunk, 2 * chunk, 3 * chunk, *(buckets or prefill_buckets(chunk))}
    return sorted(length for edge in around for length in (edge - 1, edge, edge + 1) if 0 < length <= longest)


def ragged(bench: Bench) -> Iterator[Found]:
    made = bench.prompts.ragged(bench.count(RAGGED))
    yield bench.compare("ragged lengths of 1 to 4096", made, len(made))


def arrivals(bench: Bench) -> Iterator[Found]:
    made = bench.cases(bench.count(24), 1, 1024, 12, max_tokens=24)
    alone = bench.run(made, 1)
    order = list(range(len(made)))
    random.Random(4).shuffle(order)
    shuffled = bench.run([made[i] for i in order], len(made))
    yield compared("shuffled order of arrival", [alone[i] for i in order], shuffled)
    yield compared("reversed order of arrival", alone[::-1], bench.run(made[::-1], len(made)))
    draw = random.Random(5)
    delays = [draw.uniform(0, 1.0) for _ in made]

    def late(case: Case, delay_s: float) -> Generation:
        time.sleep(delay_s)
        return bench.client.generate(case[0], case[1], seed=case[2])

    with ThreadPoolExecutor(len(made)) as pool:
        yield compared("staggered arrival", alone, list(pool.map(late, made, delays)))


def needle(bench: Bench) -> Iterator[Found]:
    """Run one prompt alone, then among as many as fill all slots."""
    for seed in range(bench.count(3)):
        target = bench.cases(1, 300, 300, 90 + seed, max_tokens=64)
        crowd = bench.cases(bench.slots - 1, 1, 800, 190 + seed, max_tokens=96)
        spot = (37 + 100 * seed) % bench.slots
        alone = bench.run(target, 1)
        together = bench.run([*crowd[:spot], *target, *crowd[spot:]], bench.slots)
        yield compared(f"needle {seed} among {bench.slots - 1}", alone, together[spot : spot + 1])


def all_slots(bench: Bench) -> Iterator[Found]:
    made = bench.cases(bench.slots, 1, 1024, 1, max_tokens=24)
    yield bench.compare(f"{bench.slots} prompts by fours, in all {bench.slots} slots", made, bench.slots, alone=4)


def pairs(bench: Bench) -> Iterator[Found]:
    """With several nodes, check that every pair gives in a crowd what the nodes give alone."""
    if len(bench.status.nodes) == 2:
        return
    made = bench.cases(bench.count(96), 1, 1024, 13, max_tokens=48)
    alone, crowd = bench.run(made, 1), bench.run(made, len(made))
    wrong = {*differing(alone, crowd)}

    def pair_of(generation: Generation) -> str:
        receipt = generation.receipt
        return f"{receipt.prefill_node.node_id} {receipt.decode_node.node_id}"

    ran = [pair_of(one) for one in crowd]
    first = Counter(pair_of(one) for one in alone)
    for pair, number in sorted(Counter(ran).items()):
        bad = sum(1 for i, other in enumerate(ran) if other == pair and i in wrong)
        yield Outcome(name=f"pair {pair}", total=number, equal=number - bad, detail={"alone ran on": dict(first)})
    roles = Counter(one.node.role for one in bench.status.nodes)
    yield {"pairs used": len({*ran}), "pairs": roles[NodeRole.PREFILL] * roles[NodeRole.DECODE]}


def restarts(bench: Bench) -> Iterator[Found]:
    """Kill -9 the first node that samples under load, then the first that prefills. Each gives the same bits again."""
    plans = bench.nodes.topology.nodes
    sampling, prefilling = (
        next(node.name for node in plans if node.module in (f"{side}_node", "colocated_node"))
        for side in ("decode", "prefill")
    )
    made = bench.cases(bench.count(16), 1, 1024, 14, max_tokens=min(256, bench.prompts.model_len // 4))
    alone = bench.run(made, len(made))
    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(bench.run, made, len(made))
        time.sleep(1.0)
        bench.nodes.restart(sampling, bench.remaining_s)
        yield compared("restarted decode node", alone, bench.run(made, len(made)))
        yield compared("killed decode node under load", alone, interrupted.result(bench.remaining_s))
    bench.nodes.restart(prefilling, bench.remaining_s)
    yield compared("restarted prefill node", alone, bench.run(made, len(made)))


def scores(bench: Bench) -> Iterator[Found]:
    """Score what was drawn: each output alone, then among as many others as fill all slots, and against generation.

    Only where the answer says that the bits are those of generation, they must be. Elsewhere they are counted.
    """
    made = bench.cases(bench.count(24), 1, 3000, 15, max_tokens=64)
    drawn = bench.run(made, len(made))
    cases = [(prompt, one.token_ids) for (prompt, _, _), one in zip(made, drawn, strict=True)]

    def score(case: tuple[Sequence[int], Sequence[int]]) -> Score:
        return bench.client.score(case[0], [case[1]], timeout_s=bench.remaining_s).scores[0]

    alone = [score(case) for case in cases]
    with ThreadPoolExecutor(2 * len(cases)) as pool:
        others = pool.submit(bench.run, bench.cases(bench.slots, 1, 700, 16), bench.slots)
        crowd = list(pool.map(score, cases * 2))
        others.result()
    yield same_digests("scores alone, twice in a crowd", alone * 2, crowd)
    changed = [score((prompt, [*tokens[:-1], tokens[-1] ^ 1])) for prompt, tokens in cases]
    yield replace(same_digests("scores of another last token", alone, changed), must_differ=True)
    equal = sum(
        a == b for one, got in zip(alone, drawn, strict=True) for a, b in zip(one.logprobs, got.logprobs, strict=True)
    )
    total = sum(len(one.logprobs) for one in alone)
    claimed = all(one.equals_generation for one in alone)
    yield {"scored log probabilities": total, "equal to generation's": equal, "claimed to be equal": claimed}
    if claimed:
        yield Outcome(name="scores have the bits of generation", total=total, equal=equal)


def same_digests(name: str, left: Sequence[Score], right: Sequence[Score]) -> Outcome:
    """Count the scores whose tokens and log probabilities agree in every bit."""
    equal = sum(a.output_digest == b.output_digest for a, b in zip(left, right, strict=True))
    return Outcome(name=name, total=len(left), equal=equal)


def constrained(bench: Bench) -> Iterator[Found]:
    """Run constrained outputs alone, then between free ones. The control runs their prompts without constraints."""
    each = bench.count(5)
    params = {"max_tokens": 48, "ignore_eos": False}
    made = [
        case
        for i, constraint in enumerate(CONSTRAINTS)
        for case in bench.cases(each, 1, 700, 250 + i, **params, structured_outputs=constraint)
    ]
    free = bench.cases(len(made), 1, 700, 260, max_tokens=48)
    alone, free_alone = bench.run(made, 1), bench.run(free, 8)
    mixed = bench.run([case for pair in zip(made, free, strict=True) for case in pair], 2 * len(made))
    yield compared("constrained outputs between free ones", alone, mixed[::2])
    yield compared("free outputs between constrained ones", free_alone, mixed[1::2])
    unmasked = [(prompt, replace(settings, structured_outputs=()), seed) for prompt, settings, seed in made]
    yield replace(compared("without their constraints", alone, bench.run(unmasked, 8)), must_differ=True)


def alternatives(bench: Bench) -> Iterator[Found]:
    """Ask for a token's likeliest alternatives, alone and among requests that want none or another number of them."""
    numbers = (0, 3, 20)
    made = [
        (prompt, replace(settings, top_logprobs=numbers[i % 3]), seed)
        for i, (prompt, settings, seed) in enumerate(bench.cases(bench.count(24), 1, 700, 270))
    ]
    alone, crowd = bench.run(made, 1), bench.run(made, len(made))
    plain = bench.run([(prompt, replace(settings, top_logprobs=0), seed) for prompt, settings, seed in made], 8)
    yield compared("outputs with alternatives, in a crowd", alone, crowd)
    yield compared("outputs with and without alternatives", alone, plain)
    equal = sum(a.samples[0].top_logprobs == b.samples[0].top_logprobs for a, b in zip(alone, crowd, strict=True))
    yield Outcome(name="alternatives, in a crowd", total=len(alone), equal=equal)
    drawn = among = 0
    for one in alone:
        sample = one.samples[0]
        for token_id, logprob, tops in zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=False):
            if (found := dict(zip(tops.token_ids, tops.logprobs, strict=True)).get(token_id)) is not None:
                among += 1
                drawn += found == logprob
    yield Outcome(name="drawn tokens among their alternatives have one log probability", total=among, equal=drawn)


def prefixes(bench: Bench) -> Iterator[Found]:
    """Force misses of the prefix cache, then hits: of whole prompts, and of their beginnings in other prompts.

    A verification runs the latter isolated, so that their KV is computed without any cache.
    """
    draw, params = random.Random(16), sampling(max_tokens=16)

    def case(prompt: list[int]) -> Case:
        return prompt, params, draw.randrange(2**63)

    lengths = [length for length in PREFIX_LENGTHS if length <= bench.prompts.model_len - 64]
    whole = [case(bench.prompts.draw(length, draw)) for length in lengths]
    others = [case([*prompt[: 3 * len(prompt) // 4], *bench.prompts.draw(40, draw)]) for prompt, _, _ in whole]
    missed, hit = bench.run(whole, 1), bench.run(whole, len(whole))
    yield compared("prompts that are computed, and found in the cache", missed, hit)
    begun = bench.run(others, len(others))
    cases = [
        VerifyCase(prompt_token_ids=tuple(prompt), sampling_params=params, seed=seed, output_digest=digest)
        for (prompt, _, seed), digest in zip(others, (one.receipt.output_digest for one in begun), strict=True)
    ]
    isolated = list(bench.client.verify(cases, [Condition.ALONE], timeout_s=bench.remaining_s))
    equal = sum(result.match for result in isolated)
    yield Outcome(name="prompts whose beginnings are found, and isolated", total=len(cases), equal=equal)
    cached = [[one.receipt.cached_tokens for one in found] for found in (missed, hit, begun)]
    hits = [sum(map(bool, found)) for found in cached]
    names = ("misses", "hits", "beginnings")
    yield {"prompts with cached tokens": dict(zip(names, hits, strict=True)), "cached tokens": sum(map(sum, cached))}
    may_hit = bench.nodes.topology.freedoms in ("all", "cached")
    if list(map(bool, hits)) != [False, may_hit, may_hit]:
        yield Outcome(
            name="misses and hits were forced", error=f"prompts with cached tokens {hits}, may hit: {may_hit}"
        )


def long_prompts(bench: Bench) -> Iterator[Found]:
    """Run prompts of more than 8192 tokens, if the cluster takes them (--max-model-len)."""
    longest = bench.prompts.model_len - 64
    if longest <= LONG:
        yield {"prompts of more than 8192 tokens": "not run, the cluster takes none"}
        return
    made = bench.cases(bench.count(8), LONG + 1, longest, 17)
    yield bench.compare(f"prompts of {LONG + 1} to {longest} tokens", made, len(made))


def long_outputs(bench: Bench) -> Iterator[Found]:
    """Run two long outputs alone, then among others that come and go."""
    length = min(bench.long_output, bench.prompts.model_len - 400)
    made = bench.cases(2, 100, 399, 7, max_tokens=length)
    alone = bench.run(made, 1)
    others = bench.cases(bench.count(62), 1, 700, 8, max_tokens=max(1, length // 8))
    together = bench.run([*made, *others], 34)
    yield compared(f"{length} output tokens", alone, together[:2])


@dataclass(frozen=True)
class Check:
    """A check, the longest time that it may take, and the least time left with which it is begun."""

    run: Callable[[Bench], Iterator[Found]]
    limit_s: float
    least_s: float = 8.0

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS: tuple[Check, ...] = (
    Check(paper, 60),
    Check(verify_conditions, 120),
    Check(mixed, 90),
    Check(edges, 120),
    Check(ragged, 120),
    Check(arrivals, 90),
    Check(needle, 120),
    Check(all_slots, 150),
    Check(pairs, 120),
    Check(scores, 90),
    Check(constrained, 90),
    Check(alternatives, 60),
    Check(prefixes, 90),
    Check(long_prompts, 120),
    Check(long_outputs, 240),
    Check(restarts, 300, least_s=100),
)
BY_NAME: Mapping[str, Check] = {check.name: check for check in CHECKS}
