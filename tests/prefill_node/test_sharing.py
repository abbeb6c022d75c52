"""Equal prompts of one client are computed once; every one of them is a reader, until it has read or is released."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun.node.kv.handle import binding
from corun.testing.engines import Facts, FakeKv, FakePrefillEngine
from corun.testing.model import filled_contract
from corun.types import KvHandle, NodeRef, NodeRole
from prefill_node import sharing as module
from prefill_node.metrics import PrefillMetrics
from prefill_node.sharing import KEEPER, PromptRequest, Sharing, StartSample
from tests.answers import put_forward, settle

REF = NodeRef(node_id="p0", generation="a" * 16)
ENGINE_ID = "p0-engine"
READER = NodeRef(node_id="d0", generation="d" * 16)
OTHER = NodeRef(node_id="d1", generation="d" * 16)
PROMPT = (1, 2, 3)


class Engine(FakePrefillEngine):
    """Computes while no test holds `turn`, and answers for readers while `sharing` is set."""

    def __init__(self) -> None:
        super().__init__(filled_contract(NodeRole.PREFILL, 0), FakeKv(), Facts(), REF, ENGINE_ID)
        self.sharing = asyncio.Event()
        self.sharing.set()
        self.share_error: Exception | None = None
        self.is_ending = False
        """The lease of what is held ends too soon for another reader."""
        self.computed: list[str] = []
        self.scopes: list[str] = []

    @property
    def readers(self) -> dict[str, set[str]]:
        return {key[1]: self.kv.readers[key] for key in self.kv.held}

    async def prefill(self, prompt: PromptRequest) -> tuple[KvHandle, float]:
        found = await super().prefill(prompt)
        self.kv.readers.setdefault((ENGINE_ID, prompt.request_id), {prompt.request_id})
        self.computed.append(prompt.request_id)
        self.scopes.append(prompt.scope)
        return found

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        await self.sharing.wait()
        if self.share_error:
            raise self.share_error
        return not self.is_ending and await super().share(request_id, readers)

    async def release(self, request_id: str, reader: str) -> None:
        await self.sharing.wait()  # Calls to an engine are answered in turn.
        await super().release(request_id, reader)

    def read(self, request_id: str, reader: str) -> None:
        """A reader is done."""
        self.kv.take((ENGINE_ID, request_id), reader)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def sharing(engine: Engine) -> Sharing:
    return Sharing(engine, 0, PrefillMetrics())


Asked = asyncio.Task[KvHandle]


def ask(
    sharing: Sharing, name: str, start: StartSample | None = None, *, more_follow: bool = False, **changes: Any
) -> Asked:
    prompt = replace(PromptRequest(name, PROMPT, READER, "client a"), **changes)
    return asyncio.ensure_future(sharing.prefill(prompt, start, more_follow=more_follow))


async def begun(engine: Engine, sharing: Sharing, names: str, *, counted: bool = False) -> dict[str, Asked]:
    """Ask for one prompt under these names. `counted`: its KV is computed, and the engine is being told of its readers.

    Otherwise the computation waits for `engine.turn`.
    """
    await engine.turn.acquire()
    asked = {name: ask(sharing, name) for name in names}
    await settle()
    if counted:
        engine.sharing.clear()
        engine.turn.release()
        await settle()
    return asked


async def test_prompts_that_come_together_are_computed_once_and_all_read(engine: Engine, sharing: Sharing) -> None:
    """On any decode nodes, by handles of their own."""
    asked = await begun(engine, sharing, "rs")
    asked["t"] = ask(sharing, "t", reader=OTHER)
    await settle()
    engine.turn.release()
    handles = await asyncio.gather(*asked.values())
    assert [handle.request_id for handle in handles] == ["r", "r", "r"]
    assert [handle.claim for handle in handles] == ["r", "s", "t"]
    assert [handle.reader for handle in handles] == [READER, READER, OTHER]
    assert all(handle.binding == binding(handle) for handle in handles)
    assert (engine.computed, engine.readers, sharing.metrics.shared_prompts.value) == (["r"], {"r": {*"rst"}}, 2)
    assert engine.scopes == ["client a"], "whose cached KV may be used"


async def test_one_that_comes_later_reads_what_is_still_there(engine: Engine, sharing: Sharing) -> None:
    await ask(sharing, "r")
    assert (await ask(sharing, "s")).request_id == "r"
    assert engine.readers == {"r": {*"rs"}}
    for name in "rs":
        engine.read("r", name)
    assert (await ask(sharing, "t")).request_id == "t"
    assert (await ask(sharing, "u")).request_id == "t"
    assert engine.computed == ["r", "t"]


@pytest.mark.parametrize("changes", [{"scope": ""}, {"scope": "client b"}, {"token_ids": (1, 2)}], ids=str)
async def test_what_is_not_the_same_is_not_shared(engine: Engine, sharing: Sharing, changes: dict[str, Any]) -> None:
    await ask(sharing, "r", **changes)
    assert (await ask(sharing, "s")).request_id == "s"
    assert engine.computed == ["r", "s"]
    await sharing.release("r")
    assert engine.readers == {"s": {"s"}}


FOLLOWED = {"more_follow": True}


@pytest.fixture
def keeping(engine: Engine) -> Sharing:
    return Sharing(engine, 20, PrefillMetrics())


async def test_kv_is_kept_for_those_who_wait_for_slots(engine: Engine, keeping: Sharing) -> None:
    for name, changes in (("r", FOLLOWED), ("s", FOLLOWED), ("t", {}), ("u", {})):
        assert (await ask(keeping, name, **changes)).request_id == "r"
        engine.read("r", name)
        await settle()
    assert (engine.computed, engine.readers, keeping.metrics.shared_prompts.value) == (["r"], {"r": {KEEPER}}, 3)


async def test_kv_that_nobody_comes_for_is_not_kept_for_long(
    engine: Engine, keeping: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_S", 10.0)
    for name in "rs":
        await ask(keeping, name, **FOLLOWED)
        engine.read("r", name)
        put_forward(6.0)
        await settle()
        assert engine.readers == {"r": {KEEPER}}  # For a while after each of them.
    put_forward(4.0)
    await settle()
    assert engine.readers == {}


async def test_what_was_not_asked_for_longest_goes_when_too_much_is_kept(engine: Engine, keeping: Sharing) -> None:
    await ask(keeping, "long", token_ids=(1,) * 6, **FOLLOWED)
    for name, prompt in (("a", (1, 2)), ("b", (3, 4)), ("a again", (1, 2)), ("c", (5,)), ("d", (6,))):
        await ask(keeping, name, token_ids=prompt, **FOLLOWED)
    await settle()
    assert kept(engine) == {"a", "c", "d"}


async def test_a_prompt_that_needs_the_room_gets_it(engine: Engine, keeping: Sharing) -> None:
    await ask(keeping, "a", **FOLLOWED)
    await ask(keeping, "b", token_ids=(1,) * 15)
    await settle()
    assert kept(engine) == {"a"}
    await ask(keeping, "c", token_ids=(1,) * 16, scope="")
    await settle()
    assert kept(engine) == set()


def kept(engine: Engine) -> set[str]:
    return {name for name, readers in engine.readers.items() if KEEPER in readers}


@pytest.mark.parametrize("gone", ["computed", "joined"])
async def test_nothing_is_kept_for_good_when_who_asked_gives_up(engine: Engine, keeping: Sharing, gone: str) -> None:
    if gone == "joined":
        await ask(keeping, "r")
    engine.sharing.clear()
    asked = ask(keeping, "s", **FOLLOWED)
    await settle()
    asked.cancel()
    keeping.release_soon("s")
    engine.sharing.set()
    await settle()
    put_forward(module.KEPT_S)
    await settle()
    assert engine.readers == ({"r": {"r"}} if gone == "joined" else {})


async def test_a_node_that_drains_keeps_nothing(engine: Engine, keeping: Sharing) -> None:
    await ask(keeping, "r", **FOLLOWED)
    engine.read("r", "r")
    keeping.let_go()
    await settle()
    assert engine.readers == {}


@pytest.mark.parametrize("gone", ["r", "s"])
@pytest.mark.parametrize("counted", [False, True])
async def test_one_that_gives_up_takes_nothing_from_the_others(
    engine: Engine, sharing: Sharing, gone: str, counted: bool
) -> None:
    asked = await begun(engine, sharing, "rst", counted=counted)
    asked.pop(gone).cancel()
    await settle()
    sharing.release_soon(gone)
    await settle()
    if not counted:
        engine.turn.release()
    engine.sharing.set()
    handles = await asyncio.gather(*asked.values())
    await settle()
    assert [handle.request_id for handle in handles] == ["r", "r"]
    assert engine.readers == {"r": {*"rst"} - {gone}}


async def test_one_that_comes_while_readers_are_counted_is_counted_too(engine: Engine, sharing: Sharing) -> None:
    asked = await begun(engine, sharing, "rs", counted=True)
    late = ask(sharing, "t")
    await settle()
    engine.sharing.set()
    assert (await late).request_id == "r"
    await asyncio.gather(*asked.values())
    assert engine.readers == {"r": {*"rst"}}


async def test_nothing_is_kept_when_all_give_up_while_they_are_counted(engine: Engine, sharing: Sharing) -> None:
    for name, task in (await begun(engine, sharing, "rst", counted=True)).items():
        task.cancel()
        sharing.release_soon(name)
    engine.sharing.set()
    await settle()
    await settle()
    assert engine.readers == {}


async def test_nothing_is_kept_when_the_engine_cannot_be_told(engine: Engine, sharing: Sharing) -> None:
    engine.share_error = UnavailableError("the engine did not answer")
    asked = await begun(engine, sharing, "rs")
    engine.turn.release()
    for result in await asyncio.gather(*asked.values(), return_exceptions=True):
        assert isinstance(result, UnavailableError)
    await settle()
    assert engine.readers == {}


async def test_what_nobody_wants_any_more_ends_and_is_not_joined(engine: Engine, sharing: Sharing) -> None:
    for task in (await begun(engine, sharing, "rs")).values():
        task.cancel()
    late = ask(sharing, "t")
    await settle()
    engine.turn.release()
    assert (await late).request_id == "t"
    assert engine.computed == ["t"]


async def test_all_hear_of_an_error_and_the_next_one_is_tried_anew(engine: Engine, sharing: Sharing) -> None:
    engine.errors.append(InvalidArgumentError("prompt_token_ids", 3, "must be fewer"))
    for result in await asyncio.gather(ask(sharing, "r"), ask(sharing, "s"), return_exceptions=True):
        assert isinstance(result, InvalidArgumentError)
    assert (await ask(sharing, "t")).request_id == "t"


async def test_a_release_is_one_reader_fewer_and_the_last_one_the_end(engine: Engine, sharing: Sharing) -> None:
    """A run that ends without a token has its KV released, whether it has been read or not."""
    await asyncio.gather(ask(sharing, "r"), ask(sharing, "s"), ask(sharing, "t"))
    engine.read("r", "t")
    await sharing.release("t")
    await sharing.release("s")
    assert engine.readers == {"r": {"r"}}
    await sharing.release("r")
    assert engine.readers == {}


async def test_what_is_gone_is_forgotten(engine: Engine, sharing: Sharing) -> None:
    for index in range(5):
        await ask(sharing, f"r{index}", token_ids=(index,))
        engine.read(f"r{index}", f"r{index}")
    await ask(sharing, "last", token_ids=(9,))
    assert [made.name for made in sharing._computations.values()] == ["last"]


async def test_kv_that_nobody_may_join_any_more_is_still_given_back(engine: Engine, sharing: Sharing) -> None:
    """By each of its readers: else it would wait for the end of its lease."""
    await asyncio.gather(ask(sharing, "r"), ask(sharing, "s"))
    engine.is_ending = True
    assert (await ask(sharing, "t")).request_id == "t"
    await sharing.release("s")
    assert engine.readers == {"r": {"r"}, "t": {"t"}}
    await sharing.release("r")
    await sharing.release("t")
    assert engine.readers == {}
    await ask(sharing, "u")
    assert [made.name for made in (*sharing._computations.values(), *sharing._ending)] == ["u"]


class Starts:
    """Starts samples; each waits while a test holds `turn`."""

    def __init__(self, engine: Engine) -> None:
        self.turn = asyncio.Lock()
        self.refuses = False
        self.started: list[tuple[str, str, bool]] = []
        """The samples, with the prompt's id, and whether the prompt's KV was there when the engine got them."""
        self._engine = engine

    def of(self, name: str) -> StartSample:
        async def start(prefill_id: str) -> bool:
            async with self.turn:
                self.started.append((name, prefill_id, prefill_id in self._engine.readers))
                return not self.refuses

        return start


@pytest.fixture
def starts(engine: Engine) -> Starts:
    return Starts(engine)


@pytest.mark.parametrize("scope", ["client a", ""])
async def test_a_sample_starts_before_its_prompt_and_is_no_reader(
    engine: Engine, sharing: Sharing, starts: Starts, scope: str
) -> None:
    """The engine keeps the KV for it by itself, until it has begun."""
    assert (await ask(sharing, "r", starts.of("r"), scope=scope)).request_id == "r"
    await settle()
    assert (starts.started, engine.readers) == ([("r", "r", False)], {})
    starts.refuses = True
    await ask(sharing, "s", starts.of("s"), scope=scope)
    assert engine.readers == {"s": {"s"}}


async def test_samples_that_join_start_too_and_the_others_read(
    engine: Engine, sharing: Sharing, starts: Starts
) -> None:
    await engine.turn.acquire()
    asked = [ask(sharing, name, starts.of(name) if name != "t" else None) for name in "rst"]
    await settle()
    starts.refuses = True
    asked.append(ask(sharing, "u", starts.of("u")))
    await settle()
    engine.turn.release()
    assert [(await one).claim for one in asked] == [*"rstu"]
    assert sorted(starts.started) == [(name, "r", False) for name in "rsu"]
    assert engine.readers == {"r": {*"tu"}}
    starts.refuses = False
    assert (await ask(sharing, "v", starts.of("v"))).request_id == "r"
    assert len(starts.started) == 3, "it comes when the KV may go at any time"
    assert engine.readers == {"r": {*"tuv"}}


@pytest.mark.parametrize("is_late", [False, True])
async def test_kv_stays_until_the_engine_has_each_sample_that_is_started(
    engine: Engine, sharing: Sharing, starts: Starts, is_late: bool
) -> None:
    """Whoever comes when the readers are being counted is not started, but waits for its handle."""
    asked = await begun(engine, sharing, "rt")
    if is_late:
        engine.sharing.clear()
    else:
        await starts.turn.acquire()
        asked["s"] = ask(sharing, "s", starts.of("s"))
        await settle()
    engine.turn.release()
    await settle()
    if is_late:
        asked["s"] = ask(sharing, "s", starts.of("s"))
        await settle()
        engine.sharing.set()
    else:
        assert not asked["r"].done()
        starts.turn.release()
    assert [handle.claim for handle in await asyncio.gather(*asked.values())] == [*"rts"]
    assert starts.started == [("s", "r", True)][is_late:]
    assert engine.readers == {"r": {*"rts"} if is_late else {*"rt"}}


async def test_no_sample_starts_with_a_prompt_that_has_failed(engine: Engine, sharing: Sharing, starts: Starts) -> None:
    """It would wait in the engine for a prompt that never comes."""
    await engine.turn.acquire()
    asked = [ask(sharing, "r", starts.of("r"))]
    await settle()
    await starts.turn.acquire()
    asked += [ask(sharing, name, starts.of(name)) for name in "st"]
    await settle()
    engine.errors.append(UnavailableError("the prompt is refused"))
    engine.turn.release()
    await settle()
    starts.turn.release()
    assert all(isinstance(one, UnavailableError) for one in await asyncio.gather(*asked, return_exceptions=True))
    assert [name for name, *_ in starts.started] == ["r", "s"], "s had begun to start before"


@pytest.mark.parametrize("gone", ["r", "s"])
async def test_a_started_sample_whose_caller_gives_up_takes_nothing_from_the_others(
    engine: Engine, sharing: Sharing, starts: Starts, gone: str
) -> None:
    await engine.turn.acquire()
    asked = {name: ask(sharing, name, starts.of(name)) for name in "rs"} | {"t": ask(sharing, "t")}
    await settle()
    asked.pop(gone).cancel()
    sharing.release_soon(gone)
    await settle()
    engine.turn.release()
    for one in asked.values():
        assert (await one).request_id == "r"
    await sharing.release("s")
    assert engine.readers == {"r": {"t"}}
    await sharing.release("t")
    assert engine.readers == {}


async def test_kv_of_started_samples_is_kept_for_those_who_wait_for_slots(
    engine: Engine, keeping: Sharing, starts: Starts
) -> None:
    await ask(keeping, "r", starts.of("r"), **FOLLOWED)
    assert engine.readers == {"r": {KEEPER}}
    assert (await ask(keeping, "s", starts.of("s"))).request_id == "r"
    assert engine.readers == {"r": {KEEPER, "s"}}
