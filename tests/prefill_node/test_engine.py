"""What the prefill engine adds to vLLM: handles, refusals, and the account of the KV it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corun.config.fields import PrefillConfig
from corun.errors import InternalError, InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.node.certificate import Certificate
from corun.node.kv.handle import BEGAN_PARAM, CACHED, FREEDOMS_PARAM, STEPS_PARAM, TARGETS_PARAM, binding, owner
from corun.node.kv.stamps import stamps
from corun.node.vllm.start import STEP_TOKENS, EngineFacts
from corun.receipt import prompt_digest
from corun.testing.engines import certificate
from corun.types import Freedom, KvOwner, NixlEndpoint, NodeRef, NodeRole
from prefill_node import engine as engine_module
from prefill_node.engine import VllmPrefillEngine, arguments, contract_buckets, long_steps, prefill_buckets
from prefill_node.recheck import Computation
from prefill_node.sharing import PromptRequest
from tests.loading import load

REF = NodeRef(node_id="p0", generation="a" * 16)
READER = NodeRef(node_id="d0", generation="d" * 16)
ENDPOINT = NixlEndpoint(engine_id="p0-engine", host="127.0.0.1", port=7000, tp_size=1, stamp_addresses=(4096,))
FACTS = EngineFacts(
    kv_blocks=4, block_size=16, step_tokens=64, max_model_len=512, vocab_size=256, eos_token_ids=(0,), finding=""
)


def output(request_id: str) -> SimpleNamespace:
    """The end of a request that kept no KV."""
    return SimpleNamespace(request_id=request_id, finish_reason="length", kv_transfer_params=None)


class Llm:
    """The calls of `AsyncLLM` that do not compute: `held` is what each worker answers."""

    def __init__(self) -> None:
        self.errored = False
        self.held: list[list[str]] | None = [[]]
        self.expired = 0
        self.silent = False
        self.calls: list[tuple[Any, ...]] = []
        self.engine_core = self
        self.asked: list[Any] = []
        """The requests that the core got."""
        self.aborted: list[str] = []

    async def add_request_async(self, request: Any) -> None:
        self.asked.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.calls.append((method, *args))
        if self.held is None:
            await asyncio.sleep(60)
        if method == "kv_contents":
            if self.silent:
                await asyncio.sleep(60)
            return [[1000 * rank + block for block in args[0]] for rank in (1, 2)]
        assert self.held is not None
        return [{"names": names, "expired": self.expired} for names in self.held]


class Engine(VllmPrefillEngine):
    """Computes nothing; the KV of a prompt of n tokens has one block for each 16. `cached`: the first of these blocks,
    which another prefill computed."""

    given: list[dict[str, Any]]
    cached: list[int]
    scored: Any = None
    """What a worker returns of a scored prompt."""

    async def _run(self, request: Any) -> Any:
        self.given.append(request.sampling_params.extra_args["kv_transfer_params"])
        request_id, num_tokens = request.request_id, len(request.prompt_token_ids)
        own = -(-num_tokens // 16) - len(self.cached)
        first = 100 * len(self.given)
        owners = [("earlier", len(self.cached))] if self.cached else []
        params = {
            BEGAN_PARAM: 7.5,
            STEPS_PARAM: [[16, 3, 90, 7], [num_tokens - 16, 1, 4, 0]],
            "remote_engine_id": "p0-engine",
            "remote_request_id": request_id,
            "remote_block_ids": ([*self.cached, *range(first, first + own)],),
            "corun_owners": [*owners, (request_id, own)],
            "remote_host": "127.0.0.1",
            "remote_port": 7000,
            "tp_size": 1,
            "remote_num_tokens": num_tokens,
        }
        return SimpleNamespace(kv_transfer_params=params, new_prompt_logprobs_tensors=self.scored)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    monkeypatch.setattr(engine_module, "HELD_TIMEOUT_S", 0.05)
    return Llm()


def make(cls: type[VllmPrefillEngine], llm: Llm, fraction: float = 0.5) -> Any:
    load("vllm.v1.engine.exceptions")
    contract: Any = None
    return cls(llm, FACTS, contract, REF, ENDPOINT, fraction, certificate(NodeRole.PREFILL))


@pytest.fixture
def engine(llm: Llm) -> Engine:
    made: Engine = make(Engine, llm)
    made.given, made.cached = [], []
    return made


async def test_a_handle_names_the_kv_and_the_prompt_and_is_bound_to_its_reader(engine: Engine) -> None:
    handle, began = await engine.prefill(PromptRequest("r", [5] * 20, READER))
    assert (handle.prefill_node, handle.request_id, handle.block_ids) == (REF, "r", ((100, 101),))
    assert (handle.num_tokens, handle.prompt_digest) == (20, prompt_digest([5] * 20))
    assert (handle.reader, handle.binding) == (READER, binding(handle))
    assert (handle.owners, handle.cached_tokens) == ((KvOwner(request_id="r", num_blocks=2),), 0)
    assert began == 7.5


def scored(*logprobs: float) -> SimpleNamespace:
    both = torch.tensor([[each, each / 2] for each in logprobs])
    return SimpleNamespace(logprob_token_ids=torch.arange(len(logprobs)), logprobs=both)


async def test_a_score_computes_all_tokens_but_the_last_and_keeps_nothing(engine: Engine) -> None:
    engine.scored, engine.cached = scored(-0.5, -0.1), [7]
    found, began = await engine.score("r", [5] * 19 + [6, 8], 2, "a")
    assert (found.top_token_ids, found.cached_tokens, began) == ((0, 1), 16, 7.5)
    assert found.logprobs == (-0.5, torch.tensor(-0.1).item()), "each bit of fp32 is kept"
    assert found.top_logprobs == (-0.25, torch.tensor(-0.05).item())
    (given,) = engine.given
    assert given[TARGETS_PARAM] == [6, 8]
    assert not given["do_remote_decode"]
    assert given["corun_stamps"] == stamps([(owner("r", REF), 2)], [5] * 19 + [6], 16)
    assert engine.known_kv_blocks == 0


async def test_a_score_may_be_as_long_as_the_model_or_the_kv(engine: Engine) -> None:
    engine.scored = scored(-1.0)
    await engine.score("r", [1] * 64, 1)
    for count, limit in ((65, "at most 64 tokens"), (513, "must be 1 to 511 tokens")):
        with pytest.raises(InvalidArgumentError, match=limit):
            await engine.score("r", [1] * count, 1)
    with pytest.raises(InvalidArgumentError, match=r"must be in \[0, 256\)"):
        await engine.score("r", [1, 256], 1)


async def test_a_handle_says_what_came_from_the_cache(engine: Engine) -> None:
    engine.cached = [7, 8]
    handle, _ = await engine.prefill(PromptRequest("r", [5] * 40, READER))
    assert handle.block_ids == ((7, 8, 100),)
    assert [(one.request_id, one.num_blocks) for one in handle.owners] == [("earlier", 2), ("r", 1)]
    assert (handle.cached_tokens, handle.binding) == (32, binding(handle))


async def test_a_prompt_may_use_the_cache_of_its_own_scope_only(llm: Llm) -> None:
    engine = make(VllmPrefillEngine, llm)
    uses: list[tuple[frozenset[str], str]] = [
        (frozenset(), "a"),
        (frozenset({CACHED}), ""),
        (frozenset({CACHED}), "a"),
        (frozenset({CACHED}), "b"),
        (frozenset({CACHED, "chunks"}), "a"),
    ]
    for freedoms, scope in uses:
        engine.freedoms = freedoms
        ended = asyncio.ensure_future(engine.prefill(PromptRequest("r", [5] * 20, READER, scope)))
        await asyncio.sleep(0)
        engine.take([output("r"), output("another's")])
        with pytest.raises(InternalError, match="the engine kept no KV for prefill r"):
            await ended
    given = [request.sampling_params.extra_args["kv_transfer_params"] for request in llm.asked]
    assert [params["corun_freedoms"] for params in given] == [
        [],
        [],
        ["cached"],
        ["cached"],
        ["cached", "chunks"],
    ]
    salts = [request.cache_salt for request in llm.asked]
    assert len({*salts[2:]}) == 3, "another scope, or other freedoms, never find these blocks"
    assert {params["corun_stamps"] for params in given} == {stamps([(owner("r", REF), 2)], [5] * 20, 16)}


async def test_a_prompt_may_do_what_its_node_may_unless_it_is_isolated(engine: Engine) -> None:
    await engine.prefill(PromptRequest("a", [1], READER))
    engine.freedoms = frozenset({Freedom.CHUNKS, Freedom.PACKED})
    await engine.prefill(PromptRequest("b", [1], READER))
    await engine.prefill(PromptRequest("c", [1], READER, isolated=True))
    assert [given[FREEDOMS_PARAM] for given in engine.given] == [[], ["chunks", "packed"], []]


@pytest.mark.parametrize(
    ("fraction", "freedoms", "cached", "is_told"),
    [
        (1.0, {CACHED, Freedom.PACKED}, [], True),
        (1.0, {CACHED}, [7], True),
        (1.0, {CACHED}, [], False),
        (0.0, {CACHED, Freedom.PACKED}, [], False),
    ],
)
async def test_a_checked_prompt_is_told_with_its_bits_and_its_company(
    llm: Llm, fraction: float, freedoms: set[str], cached: list[int], is_told: bool
) -> None:
    """If it was not computed as the contract says, since then there is something to compare: its whole blocks."""
    engine = make(Engine, llm, fraction)
    engine.given, engine.cached, engine.freedoms = [], cached, frozenset(freedoms)
    found: list[Computation] = []
    engine.on_checked = found.append
    await engine.prefill(PromptRequest("r", [5] * 40, READER, "scope"))
    first = [*cached, 100, 101][:2]
    digests = [[1000 * rank + block for block in first] for rank in (1, 2)]
    assert [(one.prompt_token_ids, one.digests) for one in found] == [((5,) * 40, digests)] * is_told
    assert all("16 of the 90 tokens of 3 prompts beside 7 samples; 24 of the 4 tokens" in one.how for one in found)


@pytest.mark.parametrize(("tokens", "is_told"), [(15, False), (16, True)])
async def test_a_checked_prompt_without_a_whole_block_has_nothing_to_compare(
    engine: Engine, llm: Llm, tokens: int, is_told: bool
) -> None:
    engine._check_fraction, engine.freedoms = 1.0, frozenset({Freedom.PACKED})
    found: list[Computation] = []
    engine.on_checked = found.append
    await engine.prefill(PromptRequest("r", [5] * tokens, READER, "scope"))
    assert (len(found), len(llm.calls)) == (is_told, is_told)


async def test_a_prompt_is_computed_again_isolated_and_nothing_is_kept(engine: Engine, llm: Llm) -> None:
    engine.freedoms = frozenset({CACHED, Freedom.PACKED})
    assert await engine.recompute([5] * 20) == [[1100], [2100]]
    (given,) = engine.given
    assert given[FREEDOMS_PARAM] == []
    (release,) = [call for call in llm.calls if call[0] == "release_kv"]
    assert release[1].startswith("recheck-")


async def test_a_finding_takes_all_freedoms_away(engine: Engine) -> None:
    findings: list[str] = []
    engine.on_finding = findings.append
    engine.freedoms = frozenset({Freedom.PACKED, CACHED})
    engine.certificate = Certificate.of_ranks({Freedom.PACKED: "", Freedom.CHUNKS: "switched off"})
    before = engine.certificate.digest
    engine.withdraw("other KV")
    assert (engine.freedoms, findings) == (frozenset(), ["other KV"])
    assert [one.refused for one in engine.certificate.freedoms] == ["other KV", "switched off"]
    assert engine.certificate.digest != before


async def test_a_worker_that_tells_no_digests_in_time_costs_the_prompt_nothing(engine: Engine, llm: Llm) -> None:
    engine._check_fraction, engine.freedoms = 1.0, frozenset({Freedom.PACKED})
    llm.silent = True
    found: list[Computation] = []
    engine.on_checked = found.append
    handle, _ = await engine.prefill(PromptRequest("r", [5] * 40, READER, "scope"))
    assert (handle.num_tokens, found) == (40, [])


@pytest.mark.parametrize(
    ("prompt", "limit"),
    [
        ([5, 256], r"prompt\.token_ids = 256: must be in \[0, 256\)"),
        ([5] * 512, r"prompt\.token_ids = 512 tokens: must be at most 511 tokens"),
        ([5] * 64, r"prompt_token_ids = .*64 tokens.*at most 63 tokens"),
    ],
)
async def test_a_prompt_that_cannot_be_computed_is_refused(engine: Engine, prompt: list[int], limit: str) -> None:
    """A prompt that never fits would wait at the head of the queue for ever. The room is all blocks, less the token
    that is thrown away."""
    with pytest.raises(InvalidArgumentError, match=rf"^{limit}"):
        await engine.prefill(PromptRequest("r", prompt, READER))
    assert engine.given == []
    await engine.prefill(PromptRequest("fits", [1] * 63, READER))


@pytest.mark.parametrize("end", ["cancelled", "dead"])
async def test_a_prompt_that_nobody_computes_ends(llm: Llm, end: str) -> None:
    engine = make(VllmPrefillEngine, llm)
    died: list[str] = []
    engine.on_death = lambda: died.append("r")
    waiting = asyncio.ensure_future(engine.prefill(PromptRequest("r", [1, 2], READER)))
    await asyncio.sleep(0)
    if end == "dead":
        engine.note_dead()
        with pytest.raises(UnavailableError, match="the engine died"):
            await waiting
    else:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert (llm.aborted, died) == (([], ["r"]) if end == "dead" else (["r"], []))
    engine.take([output("r")])  # Its late output is nobody's.


async def test_a_call_that_comes_when_the_engine_has_died_is_told_so(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router then knows of a lost node, and not of one that fails."""
    engine = make(VllmPrefillEngine, llm)
    died: list[str] = []
    engine.on_death = lambda: died.append("p")

    async def dead(*_: Any, **__: Any) -> None:
        raise load("vllm.v1.engine.exceptions").EngineDeadError

    monkeypatch.setattr(llm, "add_request_async", dead)
    monkeypatch.setattr(llm, "collective_rpc", dead)
    prompt = PromptRequest("r", [1, 2], READER)
    for call in (engine.prefill(prompt), engine.share("r", ["d0"]), engine.release("r", "d0")):
        with pytest.raises(UnavailableError, match="the engine died"):
            await call
    assert died == ["p"]


async def test_an_id_that_names_held_kv_is_refused(engine: Engine, llm: Llm) -> None:
    await engine.prefill(PromptRequest("r", [1], READER))
    with pytest.raises(InvalidArgumentError, match="request_id = 'r': must be unique to one attempt"):
        await engine.prefill(PromptRequest("r", [1], READER))
    await engine.held_kv_blocks()
    await engine.held_kv_blocks()  # The worker does not hold it any more.
    await engine.prefill(PromptRequest("r", [1], READER))


async def test_the_id_of_a_cancelled_prompt_is_refused_until_the_engine_has_surely_forgotten_it(llm: Llm) -> None:
    """The prompt may have ended just before. Then its KV is held until its release is heard."""
    engine = make(VllmPrefillEngine, llm)
    waiting = asyncio.ensure_future(engine.prefill(PromptRequest("r", [1], READER)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    llm.held = [["r"]]
    for _ in range(3):
        with pytest.raises(InvalidArgumentError, match="request_id = 'r': must be unique to one attempt"):
            await asyncio.wait_for(engine.prefill(PromptRequest("r", [1], READER)), 1.0)
        assert await engine.held_kv_blocks() == 0
    assert len(llm.asked) == 1
    llm.held = [[]]
    await engine.held_kv_blocks()
    assert not engine.holds("r")


async def test_an_id_that_only_the_engine_still_knows_is_refused_and_holds_nothing(llm: Llm) -> None:
    """A sample that came with that prompt has not begun, so a colocated node's scheduler keeps its KV."""
    engine = make(VllmPrefillEngine, llm)
    waiting = asyncio.ensure_future(engine.prefill(PromptRequest("r", [1], READER)))
    await asyncio.sleep(0)
    ended = load("vllm.v1.engine").FinishReason.ERROR
    engine.take([SimpleNamespace(request_id="r", finish_reason=ended, kv_transfer_params=None)])
    with pytest.raises(InvalidArgumentError, match="request_id = 'r': must be unique to one attempt"):
        await waiting
    assert not engine.holds("r")


async def test_held_kv_is_counted_until_the_workers_let_go(engine: Engine, llm: Llm) -> None:
    """A prefill that has just ended is not known to the worker yet: it counts, the first time. An idle worker is left
    alone."""
    assert await engine.held_kv_blocks() == 0
    assert llm.calls == []
    await engine.prefill(PromptRequest("a", [1] * 40, READER))
    await engine.prefill(PromptRequest("b", [1], READER))
    assert await engine.held_kv_blocks() == 4
    llm.held = [["a"], ["a", "b"]]
    assert await engine.held_kv_blocks() == 4
    llm.held = [[], ["b"]]
    assert await engine.held_kv_blocks() == 1
    assert engine.expired_claims == 0
    llm.held, llm.expired = [[], []], 1
    assert await engine.held_kv_blocks() == 0
    assert (engine.known_kv_blocks, engine.expired_claims) == (0, 1)


async def test_a_block_that_two_prompts_hold_counts_once(engine: Engine) -> None:
    engine.cached = [7, 8]
    for name in "ab":
        await engine.prefill(PromptRequest(name, [1] * 40, READER))
    assert engine.known_kv_blocks == 4


async def test_a_busy_worker_leaves_the_last_known_number(engine: Engine, llm: Llm) -> None:
    await engine.prefill(PromptRequest("a", [1] * 40, READER))
    llm.held = None
    assert await engine.held_kv_blocks() == 3
    llm.held = [[]]
    assert await engine.held_kv_blocks() == 3  # Still not asked about since it ended.
    assert await engine.held_kv_blocks() == 0


async def test_a_busy_worker_holds_each_of_several_routers_up_as_long_as_one(engine: Engine, llm: Llm) -> None:
    """Each asks before its heartbeat. If they waited for each other, some would take the node for lost."""
    await engine.prefill(PromptRequest("a", [1] * 40, READER))
    llm.held = None
    assert await asyncio.gather(*(engine.held_kv_blocks() for _ in range(5))) == [3] * 5
    assert llm.calls == [("held_kv",)]


async def test_the_death_of_an_idle_engine_is_noticed(engine: Engine, llm: Llm) -> None:
    died = asyncio.Event()
    engine.on_death = died.set
    await engine.held_kv_blocks()
    assert not died.is_set()
    llm.errored = True
    await engine.held_kv_blocks()
    assert died.is_set()


async def test_releases_go_to_the_workers(engine: Engine, llm: Llm) -> None:
    await engine.release("r", "s")
    assert llm.calls == [("release_kv", "r", "s")]


@pytest.mark.parametrize("chunk_size", [1, 16, 100, 2048, 4096, 2**20])
def test_buckets_ascend_and_stay_within_the_chunk(chunk_size: int) -> None:
    buckets = prefill_buckets(chunk_size)
    assert list(buckets) == sorted(set(buckets))
    assert all(16 <= bucket <= chunk_size for bucket in buckets)


def test_the_graphs_of_long_steps_are_not_in_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill nodes and colocated nodes have full steps of other lengths, and one contract."""
    monkeypatch.setattr(engine_module.base, "on_gpu", lambda: True)
    assert long_steps(STEP_TOKENS, 2048) == (2304, 2688, 3072, 3584, STEP_TOKENS)
    assert long_steps(STEP_TOKENS, STEP_TOKENS // 2 + 1) == ()
    assert contract_buckets(2048) == prefill_buckets(2048)
    assert contract_buckets(2048)[-1] == 2048
    monkeypatch.setattr(engine_module.base, "on_gpu", lambda: False)
    assert contract_buckets(2048) == (), "a CPU captures no graphs"


@pytest.mark.parametrize("chunk_size", [128, 2048, 8192])
@pytest.mark.parametrize("is_packing", [True, False])
def test_a_step_has_room_for_a_chunk_whatever_the_node_may_do(
    monkeypatch: pytest.MonkeyPatch, chunk_size: int, is_packing: bool
) -> None:
    """What is compiled must not follow from a setting that is no part of the contract."""
    load("vllm")
    monkeypatch.setattr(engine_module.base, "prepare", lambda *_: None)
    config = PrefillConfig(model=str(tiny.ensure()), chunk_size=chunk_size, packed_prefill=is_packing)
    made = arguments(config, ENDPOINT)
    assert made.max_num_scheduled_tokens == max(STEP_TOKENS, chunk_size)
    assert made.max_num_batched_tokens == made.max_num_scheduled_tokens, "a CPU compiles nothing"
    assert made.long_prefill_token_threshold == chunk_size
