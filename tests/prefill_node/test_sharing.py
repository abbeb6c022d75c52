"""Equal prompts of one client are computed once; every one of them is a reader, until it has read or is released."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from corun.cluster import KvHandle, NodeRef
from corun.errors import InvalidArgumentError
from corun.receipt import prompt_digest
from prefill_node.sharing import Sharing

REF = NodeRef(node_id="p0", generation="a" * 16)
READER = NodeRef(node_id="d0", generation="d" * 16)
OTHER = NodeRef(node_id="d1", generation="d" * 16)
PROMPT = (1, 2, 3)


class Engine:
    """Computes when `go` is set, and keeps count of the readers of what it has computed."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.sharing = asyncio.Event()
        self.sharing.set()
        self.error: Exception | None = None
        self.computed: list[str] = []
        self.readers: dict[str, int] = {}

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        await self.go.wait()
        if self.error:
            raise self.error
        self.computed.append(request_id)
        self.readers[request_id] = 1
        digest = prompt_digest(prompt_token_ids)
        return KvHandle(
            prefill_node=REF,
            engine_id="e",
            request_id=request_id,
            block_ids=((1,),),
            host="h",
            port=1,
            tp_size=1,
            num_tokens=len(prompt_token_ids),
            prompt_digest=digest,
            reader=reader,
        )

    async def share(self, request_id: str, readers: int) -> bool:
        await self.sharing.wait()
        if request_id in self.readers:
            self.readers[request_id] += readers
        return request_id in self.readers

    async def release(self, request_id: str) -> None:
        self.read(request_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self.readers

    def read(self, request_id: str) -> None:
        """A reader is done."""
        if request_id in self.readers:
            self.readers[request_id] -= 1
            if not self.readers[request_id]:
                del self.readers[request_id]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def sharing(engine: Engine) -> Sharing:
    return Sharing(engine)


def ask(sharing: Sharing, name: str, **changes: object) -> asyncio.Task[KvHandle]:
    asked = {"prompt_token_ids": PROMPT, "reader": READER, "scope": "client a", **changes}
    return asyncio.ensure_future(sharing.prefill(name, **asked))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_prompts_that_come_together_are_computed_once_and_all_read(engine: Engine, sharing: Sharing) -> None:
    engine.go.clear()
    asked = [ask(sharing, name) for name in "rst"]
    await settle()
    engine.go.set()
    handles = await asyncio.gather(*asked)
    assert [handle.request_id for handle in handles] == ["r", "r", "r"]
    assert (engine.computed, engine.readers, sharing.shared) == (["r"], {"r": 3}, 2)


async def test_one_that_comes_later_reads_what_is_still_there(engine: Engine, sharing: Sharing) -> None:
    await ask(sharing, "r")
    assert (await ask(sharing, "s")).request_id == "r"
    assert engine.readers == {"r": 2}


async def test_one_that_comes_too_late_is_computed_anew(engine: Engine, sharing: Sharing) -> None:
    await ask(sharing, "r")
    engine.read("r")
    assert (await ask(sharing, "s")).request_id == "s"
    assert (await ask(sharing, "t")).request_id == "s"
    assert engine.computed == ["r", "s"]


@pytest.mark.parametrize(
    "changes", [{"scope": ""}, {"scope": "client b"}, {"reader": OTHER}, {"prompt_token_ids": (1, 2)}], ids=str
)
async def test_what_is_not_the_same_is_not_shared(engine: Engine, sharing: Sharing, changes: dict[str, object]) -> None:
    await ask(sharing, "r")
    assert (await ask(sharing, "s", **changes)).request_id == "s"
    assert engine.computed == ["r", "s"]


async def test_without_a_scope_nothing_is_kept_of_it(engine: Engine, sharing: Sharing) -> None:
    await ask(sharing, "r", scope="")
    assert (await ask(sharing, "s")).request_id == "s"
    await sharing.release("r")
    assert engine.readers == {"s": 1}


@pytest.mark.parametrize("gone", ["r", "s"])
async def test_one_that_gives_up_takes_nothing_from_the_others(engine: Engine, sharing: Sharing, gone: str) -> None:
    engine.go.clear()
    asked = {name: ask(sharing, name) for name in "rst"}
    await settle()
    asked[gone].cancel()
    await settle()
    await sharing.release(gone)
    engine.go.set()
    handles = await asyncio.gather(*(task for name, task in asked.items() if name != gone))
    assert [handle.request_id for handle in handles] == ["r", "r"]
    assert engine.readers == {"r": 2}


async def test_one_that_gives_up_after_it_was_counted_gives_its_part_back(engine: Engine, sharing: Sharing) -> None:
    engine.go.clear()
    engine.sharing.clear()
    asked = {name: ask(sharing, name) for name in "rst"}
    await settle()
    engine.go.set()
    await settle()
    asked["s"].cancel()  # While the engine is told of three readers.
    await settle()
    engine.sharing.set()
    await asyncio.gather(asked["r"], asked["t"])
    await sharing.release("s")
    assert engine.readers == {"r": 2}


async def test_what_nobody_wants_any_more_ends_and_is_not_joined(engine: Engine, sharing: Sharing) -> None:
    engine.go.clear()
    asked = [ask(sharing, name) for name in "rs"]
    await settle()
    for task in asked:
        task.cancel()
    late = ask(sharing, "t")
    await settle()
    engine.go.set()
    assert (await late).request_id == "t"
    assert engine.computed == ["t"]


async def test_kv_that_was_computed_when_the_last_one_left_is_dropped(engine: Engine, sharing: Sharing) -> None:
    engine.go.clear()
    engine.sharing.clear()
    asked = [ask(sharing, name) for name in "rs"]
    await settle()
    engine.go.set()
    await settle()
    assert engine.readers == {"r": 1}
    for task in asked:
        task.cancel()
    await settle()
    assert engine.readers == {}


async def test_all_hear_of_an_error_and_the_next_one_is_tried_anew(engine: Engine, sharing: Sharing) -> None:
    engine.error = InvalidArgumentError("prompt_token_ids", 3, "must be fewer")
    for result in await asyncio.gather(ask(sharing, "r"), ask(sharing, "s"), return_exceptions=True):
        assert isinstance(result, InvalidArgumentError)
    engine.error = None
    assert (await ask(sharing, "t")).request_id == "t"


async def test_a_release_is_one_reader_fewer_and_the_last_one_the_end(engine: Engine, sharing: Sharing) -> None:
    await asyncio.gather(ask(sharing, "r"), ask(sharing, "s"))
    await sharing.release("s")
    assert engine.readers == {"r": 1}
    await sharing.release("r")
    assert engine.readers == {}


async def test_what_is_gone_is_forgotten(engine: Engine, sharing: Sharing) -> None:
    for index in range(5):
        await ask(sharing, f"r{index}", prompt_token_ids=(index,))
        engine.read(f"r{index}")
    await ask(sharing, "last", prompt_token_ids=(9,))
    assert not any(sharing.has("client a", (index,), READER) for index in range(5))
    assert sharing.has("client a", (9,), READER)
