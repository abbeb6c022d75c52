"""Which KV blocks get an owner in a step, and which prompts are complete and to be signed: the scheduler's half.

Owns: the account of every running prefill's blocks, in the prompt's order. Must not know: vLLM's classes (it reads
requests and the engine's block lists), the table that owners are written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

OWNER_PARAM = "corun_owner"
"""In `kv_transfer_params` of both sides: the name that the prompt's blocks carry, a uint64."""
CHECK_PARAM = "corun_check"
"""In `kv_transfer_params` of a prefill: whether the blocks get digests."""
READER = "/"
"""Between a prefill's id and a reader's, in what decode nodes say to prefill nodes."""
SEPARATORS = f"{READER}:,"
"""All that stands between names there, and so in none of them; the others are vLLM's (nixl/pull_worker.py)."""


def read_id(request_id: str, claim: str) -> str:
    """A reader's own id of a prefill's KV: vLLM keeps the lease of what is being read alive by such ids, a set of them
    for each peer (nixl/base_scheduler.py), so those of two readers must differ. claim: empty where there is but one."""
    return f"{request_id}{READER}{claim}" if claim else request_id


@dataclass(frozen=True, slots=True)
class Owned:
    """Blocks that get an owner: number `first` and up of its prompt."""

    owner: int
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Prefill:
    request: Any
    owner: int
    is_checked: bool
    blocks: list[int] = field(default_factory=list)


class Prefills:
    """The prefills that the scheduler knows, from their first block to their end."""

    def __init__(self) -> None:
        self._running: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Any) -> None:
        """A request has its first blocks. One without an owner's name stays without: no reader will accept its KV."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and OWNER_PARAM in params:
            self._running[request.request_id] = _Prefill(request, params[OWNER_PARAM], bool(params.get(CHECK_PARAM)))

    def end(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def give(self, request_id: str, blocks: Iterable[int], *, anew: bool) -> Owned | None:
        """Blocks that a step gives to a request; `anew`: it had lost those before."""
        prefill = self._running.get(request_id)
        given = tuple(blocks)
        if prefill is None or not given:
            return None
        if anew:
            prefill.blocks.clear()
        prefill.blocks.extend(given)
        return Owned(prefill.owner, len(prefill.blocks) - len(given), given)

    def completed(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """All blocks of a prompt that is to be signed, if this step's `num_tokens` complete it; else none."""
        prefill = self._running.get(request_id)
        if prefill is None or not prefill.is_checked:
            return ()
        request = prefill.request
        done: bool = request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + num_tokens
        return tuple(prefill.blocks) if done else ()
