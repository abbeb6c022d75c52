"""Steps of a colocated node: prompts and samples in one engine.

Owns: which of the two are in the next step. Rows of samples ride in a step of prompts if each of the prompts allows
that (`Freedom.MIXED`); otherwise steps of prompts and of rows take turns. What a prompt or a sample may do else is
decided as on a node of one role (prefill_node/scheduler.py, decode_node/scheduler.py): a request's own parameters say
which of the two it is. And what samples do with the KV of this engine's own prompts: whole blocks are read where they
are, which no row ever writes to, the last block is copied, and the sample begins in the step that copies it. If all
allow it, the sample begins in its prompt's last step instead, and computes the tokens of the last block itself. Samples
may come with their prompt: before it, while it is computed, or while others have yet to read its KV. Until they have
begun, the KV stays, whoever else has read it. Must not know: connectors, sampling, why a freedom holds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from colocated_node.shares import SLOTS, prompt_blocks
from corun.node.kv import handle
from corun.node.vllm.start import step_tokens
from corun.room import blocks_needed, shared_blocks
from corun.types import Freedom, NodeRef
from decode_node.scheduler import ADMITTED_BLOCKS, FixedSlotScheduler
from prefill_node.scheduler import PrefillScheduler, freedoms, note_began

DRAWS_AT_ONCE = frozenset({Freedom.MIXED, Freedom.CHUNKS, Freedom.SCORES})
"""What a prompt must allow so that its sample may draw the first token in the prompt's own last step: rows beside
prompts, any cuts of a prompt, and rows that have the bits of prompts."""
LACKS_KV = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
"""The states of a sample whose copy is of no use, or was refused; any other has computed a row from it."""


class ColocatedScheduler(PrefillScheduler, FixedSlotScheduler):  # type: ignore[misc]  # `turn` is None in both.
    """Runs prompts for any reader, and samples of any prefill node, its own included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots: int = self.vllm_config.kv_transfer_config.kv_connector_extra_config[SLOTS]
        # vLLM's limits are on both sides together (colocated_node/engine.py).
        self._step_tokens = step_tokens(self.scheduler_config)
        self._places: int = self.scheduler_config.max_num_seqs - self.slots
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # Block 0 is vLLM's null block.
        self._all_blocks = blocks
        self._prompt_blocks = prompt_blocks(blocks, self.block_size, self.max_model_len)
        self._had_prompts = False
        """Whether the last step held prompts."""
        self._copying: dict[str, Request] = {}
        """The samples whose KV is copied in a step that computes a row of them, until that step's result is there."""
        self._with_prompt: dict[str, list[Request]] = {}
        """The samples that came with their prompts and have not begun, by the prompt's id."""
        self._kept: dict[str, Request] = {}
        """The prompts whose KV is kept only for such samples."""
        self._in_place = defaultdict[str, list[str]](list)
        """The ids of the samples whose first blocks others of the prompt read in place, by its salt."""
        self._beside: list[Request] = []
        """The samples that are to begin in the last step of their prompts, which is being made."""
        self._slots_left = 0
        """The slots that are left to these."""
        self._started: list[Request] = []
        """The prompts that ran before the step that is being made."""
        self._rows: list[Request] = []
        """The samples that ran before it."""
        self.kv_cache_manager.get_computed_blocks = self._computed_blocks

    def gpu_lock(self) -> None:
        """Take no turns with other engines: this one has the GPU for itself."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule prompts, rows, or both; the stock scheduler sees nothing else.

        Raises RuntimeError if it made another step.
        """
        self._tell_of_prompts()
        self._started, self._rows = [], []
        for request in self.running:
            (self._started if is_prompt(request) else self._rows).append(request)
        begin = [*self.unread(), *(request for request in self.skipped_waiting if not is_prompt(request))]
        rows = min(len(self._rows) + len(begin), self.slots)
        self._slots_left, self._beside = self.slots - rows, []
        # What rows in the step leave, so that it is full if there are enough prompts, and nothing of it is padding.
        self.budget = self._step_tokens - (rows if self._may_mix() else 0)
        chosen = self.choose()
        mixes = all(Freedom.MIXED in freedoms(request) for request in chosen)
        if chosen and not mixes and self._had_prompts and rows:
            chosen = []
        if not (chosen and mixes):
            self._beside = []
        self._had_prompts = bool(chosen)
        self._takes_rows = mixes or not chosen
        with self._showing_only(chosen):
            output: SchedulerOutput = super(FixedSlotScheduler, self).schedule(throttle_prefills)
        self._check_step(output, chosen)
        self._note_begun_beside(output)
        self._note_copies(output)
        return output

    def add_request(self, request: Request) -> None:
        """Add a request. End a sample with an error if the prompt of the id that it came with is another one: a router
        used the id again, and the sample would be told of that prompt's KV."""
        if own := (request.kv_transfer_params or {}).get(handle.OWN_PROMPT_PARAM):
            prompt = self.requests.get(own[0])
            if prompt is not None and prompt.prompt_token_ids != request.prompt_token_ids:
                self.refused.append(request)
                return
            self._with_prompt.setdefault(own[0], []).append(request)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """End requests, and with a prompt the samples that came with it and have not begun: its KV is gone."""
        finished = super().finish_requests(request_ids, finished_status)
        self._forget_begun()
        ended = [self._with_prompt.get(request.request_id, ()) for request in finished]
        if lost := [sample.request_id for samples in ended for sample in samples]:
            finished += super().finish_requests(lost, finished_status)
        return finished

    def _free_blocks(self, request: Request) -> None:
        """Free the blocks of a request that has ended; those of a prompt only if no sample that came with it waits."""
        if request.request_id in self._with_prompt:
            self._kept[request.request_id] = request
        else:
            super()._free_blocks(request)

    def has_requests(self) -> bool:
        """Return whether a step may have anything to do.

        The first sample that comes with a prompt is here a moment before it. The engine's core then waits for the
        prompt. A step without anything in it would keep the prompt waiting for 1 ms and more (vllm/v1/engine/core.py:
        `_process_engine_step`).
        """
        return bool(super().has_requests()) and not self._awaits_prompts()

    def _awaits_prompts(self) -> bool:
        """Return whether all that waits is samples whose prompts have yet to come, and nothing runs. Prompts that are
        finished may be here, as long as their KV is kept."""
        if self.finished_req_ids or self.running or not (self.waiting or self.skipped_waiting):
            return False
        given = (one.kv_transfer_params or {} for one in itertools.chain(self.waiting, self.skipped_waiting))
        owns = (params.get(handle.OWN_PROMPT_PARAM) for params in given)
        return all(own is not None and own[0] not in self.requests for own in owns)

    def _may_mix(self) -> bool:
        """Return whether rows may be in a step with the prompt at the head of the line: they need leave of each one."""
        head = next(self._line(), None)
        return head is not None and Freedom.MIXED in freedoms(head)

    def beside(self, request: Request, left: int) -> int:
        """Let samples that came with a prompt begin in the prompt's last step, if all allow it, as many as slots and
        tokens are left for, and no more than one step admits. Return their tokens.

        All KV that they read is there when attention runs: each layer writes the KV of all tokens of a step first.
        """
        if not (DRAWS_AT_ONCE.issubset(freedoms(request)) and self.kv_cache_manager.enable_caching):
            return 0
        taken, blocks = 0, sum(blocks_needed(sample.num_prompt_tokens, self.block_size) for sample in self._beside)
        # Who gets the same blocks elsewhere holds another copy. Once it is known to have them, these are read in place.
        elsewhere = {sample.cache_salt for sample in self.being_read() if self.shared_tokens(sample)}
        for sample in self._with_prompt.get(request.request_id, ()):
            tail = self._tail(sample)
            blocks += blocks_needed(sample.num_prompt_tokens, self.block_size)
            if self._slots_left <= 0 or taken + tail > left or (self._beside and blocks > ADMITTED_BLOCKS):
                break
            is_alike = sample.prompt_token_ids == request.prompt_token_ids
            if is_alike and not sample.use_structured_output and sample.cache_salt not in elsewhere:
                self._slots_left -= 1
                self._beside.append(sample)
                taken += tail
        return taken

    def _tail(self, sample: Request) -> int:
        """Return how many tokens a prompt has behind the blocks that a sample may read in place."""
        whole = shared_blocks(sample.num_prompt_tokens, self.block_size)
        return int(sample.num_prompt_tokens) - whole * int(self.block_size)

    def _with_room(self) -> Iterator[Request]:
        """Yield those that are to begin beside their prompts for which there is KV room."""
        for sample in self._beside:
            self.free_room -= self.blocks_of(sample) - shared_blocks(sample.num_prompt_tokens, self.block_size)
            if self.free_room >= 0:
                yield sample

    def _note_begun_beside(self, output: SchedulerOutput) -> None:
        """Forget that samples have begun in their prompts' last step if they have not: they come as all others do."""
        for sample in self._beside:
            params = sample.kv_transfer_params
            if sample.request_id in output.num_scheduled_tokens:
                params.pop(handle.OWN_PROMPT_PARAM)
            else:
                for name in (handle.TAIL_PARAM, handle.IN_PLACE_PARAM, handle.STAMPS_PARAM, handle.AT_ONCE_PARAM):
                    params.pop(name, None)

    def _forget_begun(self) -> None:
        """Forget the samples that have begun or ended, and free what was kept for them."""
        for name, samples in [*self._with_prompt.items()]:
            if waiting := [sample for sample in samples if sample.status is RequestStatus.WAITING]:
                self._with_prompt[name] = waiting
                continue
            del self._with_prompt[name]
            if (prompt := self._kept.pop(name, None)) is not None:
                super()._free_blocks(prompt)

    def _tell_of_prompts(self) -> None:
        """Tell samples that came with prompts whose last step has been made where the KV will be. The step that is
        being made is behind it on the device, so they may begin in it."""
        self._forget_begun()
        for name, samples in self._with_prompt.items():
            prompt, given = self.requests.get(name), [sample.kv_transfer_params for sample in samples]
            untold = [params for params in given if handle.OWN_PROMPT_PARAM in params]
            if not untold or prompt is None or prompt.num_computed_tokens < prompt.num_prompt_tokens:
                continue
            blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()
            _, node_id, generation = untold[0][handle.OWN_PROMPT_PARAM]
            stamps = self.connector.stamps_of(prompt, blocks, NodeRef(node_id=node_id, generation=generation))
            for params in untold:
                del params[handle.OWN_PROMPT_PARAM]
                params |= {"remote_block_ids": [list(group) for group in blocks], handle.STAMPS_PARAM: stamps}

    # What is a prompt's, and what a sample's.

    @property
    def places(self) -> int:
        return self._places

    def started(self) -> list[Request]:
        return self._started

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    def unstarted(self) -> Iterator[Request]:
        return (request for request in self.waiting if is_prompt(request))

    def unread(self) -> Iterator[Request]:
        samples = (request for request in self.waiting if not is_prompt(request))
        return (sample for sample in samples if handle.OWN_PROMPT_PARAM not in sample.kv_transfer_params)

    def admissible(self) -> list[Request]:
        """Return the samples at the head of the queue that get KV room in this step, and mark those that also begin.

        A sample of one of this engine's own prompts needs no step to read its KV: it is copied in the step that
        computes the first row, if a slot is free. Without that, a sample would begin two steps later, since the next
        step is chosen before the result of the one that copied is there. A step of prompts may take 0.1 s. Who waits
        longer for KV keeps a slot.
        """
        chosen = super().admissible()
        free = self._free_slots - sum(not is_prompt(request) for request in self.skipped_waiting)
        for place, request in enumerate(chosen):
            begins = place < free and self._is_own(request) and not request.use_structured_output
            request.kv_transfer_params[handle.AT_ONCE_PARAM] = begins
        return chosen

    def in_place(self, request: Request) -> Sequence[Any]:
        """Return the whole blocks of a sample's prompt before its last position, if this engine holds that prompt's KV.

        The sample holds the blocks like its prompt does, until it ends. If another sample of the same prompt has its
        KV, also a peer's, these are the same blocks, since the node's leases count them once. Whatever does not fit,
        such as a stale handle, is left to the copy of all blocks, which is judged.
        """
        params, whole = request.kv_transfer_params, shared_blocks(request.num_prompt_tokens, self.block_size)
        if others := self._in_place.get(request.cache_salt or ""):
            shared: list[Any] = self.kv_cache_manager.get_blocks(others[0]).blocks[0][:whole]
            return shared
        if not (self._is_own(request) and self.kv_cache_manager.enable_caching):
            return ()
        prompt = self.requests.get(handle.names_in(params["remote_request_id"])[0])
        if prompt is None or not is_prompt(prompt) or prompt.prompt_token_ids != request.prompt_token_ids:
            return ()
        (held,) = self.kv_cache_manager.get_blocks(prompt.request_id).blocks
        is_beside = handle.OWN_PROMPT_PARAM in params  # It is not told yet where the KV will be.
        if not is_beside and [block.block_id for block in held] != params["remote_block_ids"][0]:
            return ()
        found: list[Any] = held[:whole]
        return found

    def shared_ids(self, request: Request) -> list[int]:
        held: list[int] = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        return held[: self.shared_tokens(request) // self.block_size]

    def note_read(self, request: Request) -> None:
        super().note_read(request)
        if self.shared_tokens(request) and not request.is_finished():
            self._in_place[request.cache_salt].append(request.request_id)

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if (others := self._in_place.get(request.cache_salt or "")) and request.request_id in others:
            others.remove(request.request_id)
            if not others:
                del self._in_place[request.cache_salt]
        return super()._connector_finished(request)

    def _num_in_prompt(self, request: Request) -> int:
        """Return how many blocks of a sample its prompt still holds, too."""
        params = request.kv_transfer_params
        in_place: int = params.get(handle.IN_PLACE_PARAM, 0)
        return in_place if handle.names_in(params["remote_request_id"])[0] in self.requests else 0

    def being_read(self) -> Iterator[Request]:
        yield from super().being_read()
        yield from self._copying.values()
        yield from self._beside

    def _is_own(self, request: Request) -> bool:
        """Return whether a sample's prompt was computed by this engine."""
        engine_id: str = self.vllm_config.kv_transfer_config.engine_id
        return bool(request.kv_transfer_params.get("remote_engine_id") == engine_id)

    def _note_copies(self, output: SchedulerOutput) -> None:
        """Remember the samples that begin in this step with KV that it copies. Those that need no copy have their KV:
        the row computes the only position that nobody else has computed."""
        for name, read in output.kv_connector_metadata.reqs_to_recv.items():
            request = self.requests.get(name)
            if request is not None and request.kv_transfer_params.get(handle.AT_ONCE_PARAM):
                if read.local_block_ids:
                    self._copying[name] = request
                else:
                    self.note_read(request)

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        """Take note of the copies, which vLLM must not hear of: their samples run already, or have ended. A sample
        whose copy was refused has ended with an error."""
        names = kv_connector_output.finished_recving or set()
        copied = [name for name in self._copying if name in names]
        kv_connector_output.finished_recving = names.difference(copied)
        super()._update_from_kv_xfer_finished(kv_connector_output)
        for name in copied:
            request = self._copying.pop(name)
            if request.status not in LACKS_KV:
                self.note_read(request)

    def rows_of(self, output: SchedulerOutput) -> int:
        rows = output.kv_connector_metadata.rows
        return len(output.num_scheduled_tokens) if rows is None else rows

    def room(self, started: Sequence[Request]) -> int:
        """Return the number of KV blocks that prompts have and do not use yet, for those that have not started.

        All blocks in use that no sample holds are prompts', and those that a sample reads in place, until its prompt is
        gone. Samples share the blocks of their prompt's start.
        """
        used: int = self._all_blocks - self.kv_cache_manager.block_pool.get_num_free_blocks()
        samples, groups = 0, dict[str | None, int]()
        for request in (*self.running, *self.skipped_waiting):
            if not is_prompt(request):
                in_prompt = self._num_in_prompt(request)
                held = sum(map(len, self.kv_cache_manager.get_blocks(request.request_id).blocks)) - in_prompt
                shared = min(held, max(0, self.shared_tokens(request) // self.block_size - in_prompt))
                samples += held - shared
                groups[request.cache_salt] = max(shared, groups.get(request.cache_salt, 0))
        # Samples of several prompts that begin alike may read the same blocks in place, so these are counted too often.
        prompts = (request.request_id for request in self.requests.values() if is_prompt(request))
        tables = (self.kv_cache_manager.get_block_ids(name)[0] for name in prompts)
        held_by_prompts = max(used - samples - sum(groups.values()), len(set().union(*tables)))
        own = self._prompt_blocks - held_by_prompts - sum(map(self.reserved_for, started))
        return min(own, self.free_blocks([*self.running, *self.skipped_waiting]))

    def keep_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Let other prompts find what a prompt has computed (prefill_node/prefix_cache.py asks for no more than it may
        leave there), and nobody what a sample has."""
        if is_prompt(request):
            self._let_find(request, num_computed_tokens)

    def _computed_blocks(self, request: Request) -> Any:
        """Return the blocks that a request finds, in place of `KVCacheManager.get_computed_blocks`."""
        if is_prompt(request):
            return self.prefix_cache.get_computed_blocks(request)
        manager = self.kv_cache_manager
        blocks, params = self.in_place(request), request.kv_transfer_params
        params.pop(handle.IN_PLACE_PARAM, None)
        if handle.OWN_PROMPT_PARAM in params:
            # It copies nothing, so its claim to the prompt's KV names no block.
            params |= {handle.TAIL_PARAM: True, handle.AT_ONCE_PARAM: True, handle.STAMPS_PARAM: b""}
        if blocks:
            params[handle.IN_PLACE_PARAM] = len(blocks)
            return manager.create_kv_cache_blocks((list(blocks),)), len(blocks) * self.block_size, 0
        return type(manager).get_computed_blocks(manager, request)

    @contextmanager
    def _showing_only(self, chosen: Sequence[Request]) -> Iterator[None]:
        """Show the stock scheduler the chosen prompts, and the samples if they may be in the step."""
        note_began(chosen)
        unfinished = [request for request in chosen if request in self._started]
        hidden = [request for request in self._started if request not in unfinished]
        self._count_free_slots(len(self._rows))
        # What hidden prompts may still take is not free for samples, so this is asked before they are hidden.
        admitted = self.admissible() if self._takes_rows else ()
        new = [*admitted, *chosen[len(unfinished) :], *self._with_room()]
        self.running = [*self._rows, *unfinished]
        try:
            with self.showing_waiting(new), self.resting(self._rows):
                yield
        finally:
            # Unfinished prompts go first among prompts, because the line begins with them in this order.
            self.running.extend(hidden)

    def _check_step(self, output: SchedulerOutput, chosen: Sequence[Request]) -> None:
        """Refuse a step with a row that must not be in it, or with prompts other than these or in other chunks."""
        ran = {request.request_id for request in self._rows}  # It is known of these already that they are no prompts.
        rows = dict(output.num_scheduled_tokens)
        names = [name for name in rows if name not in ran and is_prompt(self.requests[name])]
        prompts = {name: rows.pop(name) for name in names}
        if rows and not self._takes_rows:
            raise RuntimeError(f"the prefill step of {sorted(prompts)} holds rows of {sorted(rows)}")
        tails = {sample.request_id: self._tail(sample) for sample in self._beside}
        if len(rows) > self.slots or any(count != tails.get(name, 1) for name, count in rows.items()):
            raise RuntimeError(f"a decode step holds one token for up to {self.slots} requests: {rows}")
        self.check_prompts(prompts, chosen, samples=len(rows))
        if prompts:
            output.kv_connector_metadata.rows = len(rows)


def is_prompt(request: Request) -> bool:
    """Return whether a request is a prompt; else it is a sample that reads KV."""
    return handle.is_prompt(request.kv_transfer_params)
