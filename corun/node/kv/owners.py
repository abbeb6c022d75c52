"""The scheduler's half of the stamps: which KV blocks get an owner in a step, and which complete prompts get digests.

Owns: the list of every running prefill's blocks, in the prompt's order. Must not know: vLLM's classes (it reads
requests and the engine's block lists), the table that owners are written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

OWNER_PARAM = "corun_owner"
"""The key in `kv_transfer_params` of both sides for the owner's name that the prompt's blocks carry, a uint64."""
CHECK_PARAM = "corun_check"
"""The key in a prefill's `kv_transfer_params` for whether the blocks get digests."""
READER = "/"
"""The mark between a prefill's id and a reader's id in the messages from decode nodes to prefill nodes."""
SEPARATORS = f"{READER}:,"
"""All marks that separate names in these messages, so no name may contain them. All but `READER` are vLLM's
(nixl/pull_worker.py)."""


def read_id(request_id: str, claim: str) -> str:
    """Return a reader's own id of a prefill's KV. vLLM keeps a set of such ids for each peer and renews the leases of
    the KV that they name (nixl/base_scheduler.py), so two readers must have different ids. claim: empty if there is one
    reader only."""
    return f"{request_id}{READER}{claim}" if claim else request_id


@dataclass(frozen=True, slots=True)
class Owned:
    """Blocks that get an owner: the blocks of its prompt from number `first` on."""

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
    """The prefills that the scheduler knows, from their first blocks to their end."""

    def __init__(self) -> None:
        self._running: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Any) -> None:
        """Record a request that has its first blocks. Without an owner's name it is ignored; no reader takes its KV."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and OWNER_PARAM in params:
            self._running[request.request_id] = _Prefill(request, params[OWNER_PARAM], bool(params.get(CHECK_PARAM)))

    def end(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def give(self, request_id: str, blocks: Iterable[int], *, anew: bool) -> Owned | None:
        """Record the blocks that a step gives to a request. `anew`: the request has lost its earlier blocks."""
        prefill = self._running.get(request_id)
        given = tuple(blocks)
        if prefill is None or not given:
            return None
        if anew:
            prefill.blocks.clear()
        prefill.blocks.extend(given)
        return Owned(prefill.owner, len(prefill.blocks) - len(given), given)

    def completed(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Return all blocks of a prompt that gets digests if this step's `num_tokens` complete it; else none."""
        prefill = self._running.get(request_id)
        if prefill is None or not prefill.is_checked:
            return ()
        request = prefill.request
        done: bool = request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + num_tokens
        return tuple(prefill.blocks) if done else ()
