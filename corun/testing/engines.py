"""A fake engine for nodes of both roles: its tokens are hashes, its KV is a table, and it has faults on demand.

A token and its log probability are a pure function of prompt, parameters, seed and position (`token`), so the output
of a sample is known ahead (`expected`). This module must not know services, nodes or the network. Only tests use it; a
cluster never falls back to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corun.contract import Contract
from corun.errors import InvalidArgumentError, UnavailableError
from corun.node.certificate import SWITCHES, Certificate
from corun.node.kv.handle import bound
from corun.params import SamplingParams
from corun.receipt import output_digest, prompt_digest
from corun.types import (
    Alternatives,
    FinishReason,
    Freedom,
    KvHandle,
    KvOwner,
    KvReads,
    NixlEndpoint,
    NodeRef,
    NodeRole,
    TokenScores,
)
from decode_node.service import DecodeRequest, OwnPrompt, StepRow
from prefill_node.sharing import PromptRequest

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
KV_BLOCKS = 1000
STEP_MS = 1.0
POLL_S = 0.002


def token(prompt: Sequence[int], params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
    """Return the token that fake engines draw, and its log probability, an fp32 value."""
    key = f"{prompt_digest(prompt)} {params.digest()} {seed} {position}"
    number, fraction = struct.unpack("<II", hashlib.blake2b(key.encode(), digest_size=8).digest())
    logprob: float = struct.unpack("<f", struct.pack("<f", -fraction / 2**30))[0]
    return number % VOCAB_SIZE, logprob


def expected_alternatives(token_id: int, logprob: float, count: int) -> Alternatives:
    """Return the alternatives that fake engines give beside a drawn token, which is the likeliest one."""
    values = [logprob - place / 8 for place in range(count)]
    exact = struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *values))
    return Alternatives(tuple((token_id + place) % VOCAB_SIZE for place in range(count)), exact)


def expected(prompt: Sequence[int], params: SamplingParams, seed: int) -> tuple[list[int], list[float], FinishReason]:
    """Return a sample's token ids, log probabilities and finish reason. Stop strings are ignored: routers find them.

    seed: the sample's own seed, as its receipt has it.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token_id, logprob = token(prompt, params, seed, len(ids))
        ids.append(token_id)
        logprobs.append(logprob)
        if reason := finish_reason(params, token_id, len(ids)):
            return ids, logprobs, reason


def expected_digest(prompt: Sequence[int], params: SamplingParams, seed: int) -> str:
    """Return the output digest that the receipt of such a sample has."""
    ids, logprobs, _ = expected(prompt, params, seed)
    return output_digest(ids, logprobs)


def expected_scores(token_ids: Sequence[int], num_scored: int) -> TokenScores:
    """Return the scores that fake engines compute of the last tokens of a sequence.

    The log probability of a token depends on the tokens up to it. It has nothing to do with that of a drawn token,
    which depends on how it was drawn. Every third token, by its id, is the likeliest one at its place.
    """
    logprobs, tops, top_logprobs = [], [], []
    for end in range(len(token_ids) - num_scored, len(token_ids)):
        key = prompt_digest(token_ids[: end + 1])
        (fraction,) = struct.unpack("<I", hashlib.blake2b(key.encode(), digest_size=4).digest())
        logprob: float = struct.unpack("<f", struct.pack("<f", -fraction / 2**30))[0]
        is_top = token_ids[end] % 3 == 0
        logprobs.append(logprob)
        tops.append(token_ids[end] if is_top else (token_ids[end] + 1) % VOCAB_SIZE)
        top_logprobs.append(logprob if is_top else logprob / 2)
    return TokenScores(logprobs=tuple(logprobs), top_token_ids=tuple(tops), top_logprobs=tuple(top_logprobs))


def finish_reason(params: SamplingParams, token_id: int, num_tokens: int) -> FinishReason | None:
    """Return why an engine ends a sample at its newest token, or None if it goes on.

    The fake model has no end-of-sequence token.
    """
    if token_id in params.stop_token_ids and num_tokens > params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= params.max_tokens else None


NOT_TESTED = "a fake engine tests nothing"


def certificate(role: NodeRole) -> Certificate:
    """Return the certificate of a fake engine: it tests nothing and holds nothing."""
    return Certificate.of_ranks(dict.fromkeys(SWITCHES[role], NOT_TESTED))


@dataclass(kw_only=True)
class Facts:
    """The facts that a node tells about its engine; see `corun.node.vllm.start.EngineFacts`."""

    kv_blocks: int = KV_BLOCKS
    block_size: int = BLOCK_SIZE
    step_tokens: int = 4096
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    finding: str = ""
    """The reason why the self-test failed; empty if it passed."""


class FakeKv:
    """The KV that all prefill engines hold: prompts by (engine id, request id), and the readers of shared KV."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], tuple[int, ...]] = {}
        self.readers: dict[tuple[str, str], set[str]] = {}

    def take(self, key: tuple[str, str], reader: str) -> bool:
        """Remove a reader, and the KV after its last one. Return False if the KV was not there."""
        readers = self.readers.get(key, {reader})
        readers.discard(reader)
        return key in self.held if readers else self.held.pop(key, None) is not None


class FakeEngine:
    """What the engines of both roles have in common: the members that a node's life needs, and faults."""

    def __init__(self, contract: Contract, kv: FakeKv, facts: Facts, engine_id: str = "") -> None:
        """Create the engine. engine_id: the id that it says; random if empty."""
        self.engine_id = engine_id or f"engine-{secrets.token_hex(8)}"
        self.contract = contract
        self.facts = facts
        self.certificate = certificate(contract.role)
        self.kv = kv
        self.on_death: Callable[[], None] = lambda: None
        self.on_finding: Callable[[str], None] = lambda finding: None
        self.steps = 0
        self.hanging = False
        """Whether it computes nothing, although it answers."""
        self.stopped = False
        """Whether it neither computes nor answers, like a stopped process."""
        self.dead = False
        self.closed = False

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False

    def die(self) -> None:
        """End like an engine process that crashes. The node notices and ends, too."""
        self.dead = True
        self.on_death()

    async def answer(self) -> None:
        """See `corun.node.watchdog.Engine.answer`."""
        await self._until_not(lambda: self.stopped)
        if self.dead:
            raise UnavailableError("the engine died")

    def computed_s(self) -> float:
        """See `corun.node.watchdog.Engine.computed_s`."""
        return 0.0

    async def close(self) -> None:
        self.closed = True

    async def _until_not(self, is_held: Callable[[], bool]) -> None:
        while is_held() and not self.closed:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


class FakePrefillEngine(FakeEngine):
    """A prefill engine that takes `delay_s` per prompt, one prompt at a time."""

    def __init__(self, contract: Contract, kv: FakeKv, facts: Facts, ref: NodeRef, engine_id: str = "") -> None:
        super().__init__(contract, kv, facts, engine_id)
        self.endpoint = NixlEndpoint(
            engine_id=self.engine_id, host="127.0.0.1", port=1, tp_size=1, stamp_addresses=(4096,)
        )
        self.delay_s = 0.0
        self.on_checked: Callable[[Any], None] = lambda computation: None
        self.kv_ttl_s = 30.0
        """How long KV is kept for its reader."""
        self.errors: list[Exception] = []
        """The errors that the next prefills raise, one each."""
        self.prefilled: list[tuple[int, ...]] = []
        self.scored: list[tuple[int, ...]] = []
        """The sequences of which tokens were scored."""
        self.not_finite = 0
        """The number of next scores that find no finite logits."""
        self.isolated: list[tuple[int, ...]] = []
        """The prompts among `prefilled` that had to be isolated."""
        self.recomputed: list[tuple[int, ...]] = []
        self.cached_tokens = 0
        """The number of tokens of each prompt that come from the cache."""
        self.released: list[str] = []
        self.expired_claims = 0
        self.turn = asyncio.Lock()
        """The lock of the prompt that is being computed. While a test holds it, prompts gather uncomputed."""
        self._ref = ref

    async def prefill(self, prompt: PromptRequest) -> tuple[KvHandle, float]:
        """See `PrefillEngine.prefill`. A stopped engine computes the prompt, and answers when it goes on."""
        began = await self._computed()
        token_ids, key = tuple(prompt.token_ids), (self.endpoint.engine_id, prompt.request_id)
        self.prefilled.append(token_ids)
        if prompt.isolated:
            self.isolated.append(token_ids)
        self.kv.held[key] = token_ids
        asyncio.get_running_loop().call_later(self.kv_ttl_s, lambda: self.kv.held.pop(key, None))
        await self.answer()
        return self._handle(prompt), began

    async def score(
        self, request_id: str, token_ids: Sequence[int], num_scored: int, scope: str = ""
    ) -> tuple[TokenScores, float]:
        """See `PrefillEngine.score`. A stopped engine answers when it goes on."""
        began = await self._computed()
        self.scored.append(tuple(token_ids))
        await self.answer()
        found = expected_scores(token_ids, num_scored)
        if self.not_finite:
            self.not_finite -= 1
            found = replace(found, logprobs=(math.nan,) * num_scored)
        return found, began

    async def _computed(self) -> float:
        """Take the time of a prompt, and return when it began. Raises the error that a test has set for it."""
        async with self.turn:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(self.delay_s)
            await self._until_not(lambda: self.hanging)
        if self.errors:
            raise self.errors.pop(0)
        return began

    async def recompute(self, prompt_token_ids: Sequence[int]) -> list[list[int]]:
        """See `PrefillEngine.recompute`. The digests are the token ids."""
        self.recomputed.append(tuple(prompt_token_ids))
        await self._until_not(lambda: self.hanging)
        return [list(prompt_token_ids)]

    def withdraw(self, finding: str) -> None:
        """See `PrefillEngine.withdraw`."""
        for freedom in Freedom:
            self.certificate = self.certificate.without(freedom, finding)
        self.on_finding(finding)

    def _handle(self, prompt: PromptRequest) -> KvHandle:
        request_id, num_blocks = prompt.request_id, _blocks(prompt.token_ids)
        handle = KvHandle(
            prefill_node=self._ref,
            engine_id=self.endpoint.engine_id,
            request_id=request_id,
            block_ids=(tuple(range(1, 1 + num_blocks)),),
            host=self.endpoint.host,
            port=self.endpoint.port,
            tp_size=self.endpoint.tp_size,
            num_tokens=len(prompt.token_ids),
            prompt_digest=prompt_digest(prompt.token_ids),
            reader=prompt.reader,
            owners=(KvOwner(request_id=request_id, num_blocks=num_blocks),),
            cached_tokens=self.cached_tokens,
        )
        return bound(handle)

    @property
    def known_kv_blocks(self) -> int:
        held = [prompt for (engine, _), prompt in self.kv.held.items() if engine == self.endpoint.engine_id]
        return sum(map(_blocks, held))

    async def held_kv_blocks(self) -> int:
        await self.answer()
        return self.known_kv_blocks

    async def release(self, request_id: str, reader: str) -> None:
        self.released.append(reader)
        self.kv.take((self.endpoint.engine_id, request_id), reader)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        key = self.endpoint.engine_id, request_id
        if key in self.kv.held:
            self.kv.readers.setdefault(key, {request_id}).update(readers)
        return key in self.kv.held

    def holds(self, request_id: str) -> bool:
        return (self.endpoint.engine_id, request_id) in self.kv.held


class FakeDecodeEngine(FakeEngine):
    """A decode engine that draws a token for every request in a slot each `step_ms`; the others wait in line.

    The KV of all is read in the step after their start. A request without its KV ends with an error, as at the real
    engine. A stopped engine ends the step that it was in when it goes on, before it reads what was sent to it
    meanwhile.
    """

    def __init__(self, contract: Contract, kv: FakeKv, facts: Facts, engine_id: str = "") -> None:
        super().__init__(contract, kv, facts, engine_id)
        assert contract.decode is not None
        self._slots = contract.decode.slots
        self.step_sizes = [self._slots]
        self.shares = True
        self.kv_reads = KvReads()
        self.step_ms = STEP_MS
        self.fail_after: int | None = None
        """End the next request that has this many tokens with an error, once."""
        self.not_finite: list[int] = []
        """The positions, from 0, at which some request finds no finite logits; once each."""
        self.start_errors: list[Exception] = []
        """The errors that the next starts raise, one each."""
        self.reads_hang = False
        """Whether reads of KV that have not ended neither end nor fail."""
        self.corrupt = False
        """Whether it draws other log probabilities than it should."""
        self.overdraws = 0
        """How many tokens it draws behind the last one that a request asks for."""
        self.connected: list[NixlEndpoint] = []
        self.connect_errors: list[Exception] = []
        self.aborted: list[str] = []
        self.most_running = 0
        """The most requests that had a slot at once."""
        self.on_step: Callable[[Sequence[StepRow]], None] = lambda _: None
        self.on_read: Callable[[Sequence[str]], None] = lambda _: None
        self._running: dict[str, tuple[DecodeRequest, int]] = {}  # with the number of tokens drawn; in the line's order
        self._unread: set[str] = set()
        self._clock: asyncio.Task[None] | None = None

    async def start(self, request: DecodeRequest) -> None:
        if self.start_errors:
            raise self.start_errors.pop(0)
        if (constraint := request.params.constraint) is not None:
            limit = "must be unset: a fake engine draws hashes, which no constraint changes"
            raise InvalidArgumentError("sampling_params.structured_outputs", constraint[0], limit)
        if (key := self._own_prompt(request)) is not None:  # The KV stays until the sample has it.
            self.kv.readers.setdefault(key, {key[1]}).add(request.request_id)
        self._running[request.request_id] = request, 0
        self._unread.add(request.request_id)
        self.most_running = max(self.most_running, self.in_slots)
        if self._clock is None or self._clock.done():
            self._clock = asyncio.ensure_future(self._tick())

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await self._until_not(lambda: self.stopped)
        request, _ = self._running.pop(request_id, (None, 0))
        if request is not None and request_id in self._unread and (key := self._own_prompt(request)) is not None:
            self.kv.take(key, request_id)
        self._unread.discard(request_id)

    async def connect(self, peer: NixlEndpoint) -> None:
        if self.connect_errors:
            raise self.connect_errors.pop(0)
        self.connected.append(peer)

    def go_on(self) -> None:
        self._step()
        super().go_on()

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        await super().close()

    async def _tick(self) -> None:
        while self._running:
            await asyncio.sleep(self.step_ms / 1000)
            if not (self.hanging or self.stopped or self.dead):
                self._step()

    def _step(self) -> None:
        self.steps += 1
        failed = [] if self.reads_hang else self._read_all()
        in_line = (running for name, running in self._running.items() if name not in self._unread)
        in_slots = list(itertools.islice(in_line, self._slots))
        self.on_step([*failed, *(self._row(*running) for running in in_slots)])

    def _read_all(self) -> list[StepRow]:
        """Read the KV of all requests that wait for it. Return the rows of those whose KV is not there."""
        unread = {name: self._running[name] for name in self._running if name in self._unread}
        unread = {name: running for name, running in unread.items() if self._is_computed(running[0])}
        self._unread -= unread.keys()
        failed = [request for request, _ in unread.values() if not self._read(request)]
        rows = [self._failed(request, "the KV could not be loaded") for request in failed]
        read = [name for name in unread if name in self._running]
        self._running.update({name: self._running.pop(name) for name in read})
        self.on_read(read)
        return rows

    @property
    def in_slots(self) -> int:
        """The number of requests that have a slot, or take one when their KV is there."""
        return min(len(self._running), self._slots)

    def _is_computed(self, request: DecodeRequest) -> bool:
        """Return whether a sample's prompt is not still to be computed by this engine."""
        return (key := self._own_prompt(request)) is None or key in self.kv.held

    def _own_prompt(self, request: DecodeRequest) -> tuple[str, str] | None:
        """Return the key of the KV of the prompt that a sample came with; None if it came with a handle."""
        return (self.engine_id, request.kv.prefill_id) if isinstance(request.kv, OwnPrompt) else None

    def _read(self, request: DecodeRequest) -> bool:
        kv = request.kv
        if isinstance(kv, OwnPrompt):
            return self.kv.take((self.engine_id, kv.prefill_id), request.request_id)
        return self.kv.take((kv.engine_id, kv.request_id), kv.claim)

    def _row(self, request: DecodeRequest, drawn: int) -> StepRow:
        if self.fail_after == drawn:
            self.fail_after = None
            return self._failed(request, "the engine failed")
        if drawn in self.not_finite:
            self.not_finite.remove(drawn)
            return self._failed(request, "not finite", not_finite=True)
        token_id, logprob = token(request.prompt_token_ids, request.params, request.seed, drawn)
        reason = finish_reason(request.params, token_id, drawn + 1 - self.overdraws)
        if reason is None:
            self._running[request.request_id] = request, drawn + 1
        else:
            del self._running[request.request_id]
        logprob = -1.0 if self.corrupt else logprob
        tops = expected_alternatives(token_id, logprob, request.params.top_logprobs)
        return StepRow(request.request_id, token_id, logprob, reason, tops=tops)

    def _failed(self, request: DecodeRequest, detail: str, *, not_finite: bool = False) -> StepRow:
        del self._running[request.request_id]
        return StepRow(request.request_id, None, 0.0, FinishReason.ERROR, detail, not_finite=not_finite)


def _blocks(prompt: Sequence[int]) -> int:
    return -(-len(prompt) // BLOCK_SIZE)
