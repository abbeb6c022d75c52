"""Fixed slots: at most `max_num_seqs` requests run, one token each, each with KV room for its whole sequence.

Owns: admission into the engine, the guarantee that a step holds no prompt token and that no request is preempted, and
the form in which a step's tokens and log probabilities leave the engine. A request that is admitted has its KV read at
once, also while all slots run, and takes a slot when the KV has arrived.

Samples of one prompt share its blocks, by vLLM's prefix cache. A block can be found only after it was *read* and passed
the check, and only if it is a whole block that ends before the prompt's last position: decode computes that position
again, and all later ones, so no block that it writes to is ever found. Requests with one salt are of one prompt, and
those without a salt share nothing. While one of them reads the blocks, the others wait for it. So two copies are never
held for samples that may run, and the node's leases, which count these blocks once, hold for the engine, too.

While a prefill node computes on the same GPU, steps without rows put the next step of rows off
(corun/node/vllm/gpu_lock.py). Meanwhile what the last step drew leaves, and KV is read, so that a sample waits for one
turn at most, not for one with each stage of its way into a slot.

The mask of a constrained row is made while all rows of the step wait for it. So such rows take turns where their masks
would take long (`resting`). When a row is computed changes no bit of it.

It repeats the node's own lease accounting on purpose: the blocks of an aborted request become free later, and only the
engine knows when. Must not know: leases, gRPC, sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists
from vllm.v1.request import Request, RequestStatus

from corun.node.vllm.gpu_lock import DecodeTurn
from corun.node.vllm.scheduler import ReservingScheduler
from corun.room import blocks_needed, shared_blocks
from decode_node.masks import MaskBackend, RowGrammar

LONGEST_WAIT = "longest_wait_s"
"""The key of the longest wait of a step, in seconds, in the connector's extra configuration; our schedulers read their
settings there."""
MASKS_S = 0.02
"""The processor time, in seconds, that the masks of a step may take; on average, if one mask takes longer. A mask
mostly takes 0.3 ms, but 20 ms if the constraint holds a text of 60,000 characters."""
ENOUGH_S = 1e-6
"""The time, in seconds, that is too short for any mask."""
ADMITTED_BLOCKS = 2048
"""The KV blocks of the prompts that one step admits; a prompt with more is admitted alone.

All rows wait while requests are admitted. Each block of a prompt is looked at, whether it is found or is to be read. On
the host of an H200 this takes 5 ms for 1000 blocks while the engine takes in further requests. So 64 samples of 8000
tokens would hold the rows up for 0.16 s in one step.
"""


class FixedSlotScheduler(ReservingScheduler):
    """Decodes requests whose prompt KV arrives from a prefill node (paper, Section IV-B)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = self.max_num_running_reqs
        # The stock scheduler looks at waiting requests only below both limits, so their KV would be read only while a
        # slot is free. A request never runs on the added ones (`_try_promote_blocked_waiting_request`).
        self.max_num_running_reqs += 1
        self.max_num_scheduled_tokens += 1
        coordinator = self.kv_cache_manager.coordinator
        self._let_find = coordinator.cache_blocks
        coordinator.cache_blocks = self.keep_computed
        # vLLM would choose a backend by each request, and make its grammars in threads, while requests wait in a state
        # that passes by our admission. Here they are made when requests come (`grammar_init`).
        self._masks = MaskBackend(self.vllm_config)
        self.structured_output_manager.backend = self._masks
        self.structured_output_manager._use_async_grammar_compilation = False
        self._mask_time_s = 0.0
        """The processor time that masks may still take; negative after a mask that took longer."""
        self._has_begun = False
        """Whether a constrained request has begun in the step that is being made."""
        self._takes_rows = True
        """Whether samples may be in the step that is being made."""
        self._free_slots = 0
        """The slots that the step which is being made may still give away; none if it has no rows."""
        self.free_room = 0
        """The KV blocks that the samples which `admissible` has returned leave to others."""
        self._read: list[Request] = []
        """The requests whose KV has been read since the last output."""
        self.turn: DecodeTurn | None = None
        if (path := self.gpu_lock()) is not None:
            self.turn = DecodeTurn(path, self.vllm_config.kv_transfer_config.kv_connector_extra_config[LONGEST_WAIT])

    def add_request(self, request: Request) -> None:
        """Let a constrained sample wait like any other: its matcher is there."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            request.status = RequestStatus.WAITING
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one decode step over the admitted requests. On a shared GPU, prefill goes first.

        Raises:
            RuntimeError: the step would have another shape; it is refused and does not run.
        """
        self._takes_rows = self.turn is None or self.turn.wait()
        self._count_free_slots(len(self.running))
        with self.showing_waiting(self.admissible()), self.resting(self.running):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        self._check_shape(output)
        if self.turn is not None and output.num_scheduled_tokens:
            self.turn.note_step()
        return output

    @contextmanager
    def resting(self, rows: Collection[Request]) -> Iterator[None]:
        """Hide rows from the stock scheduler; they keep their slots. Hide all of them if the step takes none, and
        otherwise constrained ones if all masks would take too long: those that have rested longest are next."""
        hidden = self._to_rest(rows) if self._takes_rows else list(rows)
        if hidden:
            names = {request.request_id for request in hidden}
            self.running = [request for request in self.running if request.request_id not in names]
        try:
            yield
        finally:
            self.running.extend(hidden)

    def _to_rest(self, rows: Collection[Request]) -> list[Request]:
        """Return the constrained rows for whose masks the step has no time: those whose last masks are the newest."""
        self._mask_time_s, self._has_begun = min(self._mask_time_s + MASKS_S, MASKS_S), False
        constrained = [request for request in rows if request.use_structured_output]
        hidden: list[Request] = []
        for request in sorted(constrained, key=lambda request: _grammar(request).filled_at):
            if self._mask_time_s > ENOUGH_S:
                self._mask_time_s -= _grammar(request).fill_s
            else:
                hidden.append(request)
        return hidden if len(hidden) < len(rows) else hidden[1:]  # A step with no row at all would help nobody.

    def admissible(self) -> list[Request]:
        """Return the requests at the head of the queue that get KV room in this step.

        The order is FIFO, so the first request without room ends the list. Only those that wait for another sample's
        read are passed by.
        """
        self.free_room = 0
        if not self.waiting:
            return []
        free = self.free_blocks([*self.running, *self.skipped_waiting])
        reading = {request.cache_salt: self.shared_ids(request) for request in self.being_read()}
        found = dict[str | None, tuple[bool, int]]()
        chosen: list[Request] = []
        blocks = 0
        for request in self.unread():
            if blocks_in_place := self.in_place(request):
                num_held = len(blocks_in_place)
                ids = [block.block_id for block in blocks_in_place]
                if self.shared_tokens(request) and reading.setdefault(request.cache_salt, ids) != ids:
                    continue  # Another sample is about to hold a copy of these.
            else:
                if request.cache_salt not in found:
                    found[request.cache_salt] = self._found(request)
                are_held, num_held = found[request.cache_salt]
                if not are_held:
                    if request.cache_salt in reading:
                        continue
                    reading[request.cache_salt] = []
            blocks += blocks_needed(request.num_prompt_tokens, self.block_size)
            free -= self.blocks_of(request) - num_held
            if free < 0 or (chosen and blocks > ADMITTED_BLOCKS):
                break
            chosen.append(request)
        self.free_room = max(free, 0)
        return chosen

    def in_place(self, request: Request) -> Sequence[Any]:
        """Return the blocks of its prompt that a sample reads where they are. An engine without prompts has none."""
        return ()

    def shared_ids(self, request: Request) -> list[int]:
        """Return the ids of the blocks that a sample has and others of its prompt may read, to compare them with those
        in place."""
        return []

    def unread(self) -> Iterable[Request]:
        """Return the samples whose KV has not begun to be read, in the order of their arrival."""
        waiting: Iterable[Request] = self.waiting
        return waiting

    def _count_free_slots(self, taken: int) -> None:
        """Count once a step. taken: the samples that have a slot, also those that rest in this step."""
        self._free_slots = self.slots - taken if self._takes_rows else 0

    def keep_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Let nothing be found that this engine computed, in place of vLLM's `KVCacheCoordinator.cache_blocks`: vLLM
        would let outputs be found, too."""

    def shared_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens whose blocks other samples of the prompt may find."""
        if request.cache_salt is None or not self.kv_cache_manager.enable_caching:
            return 0
        return shared_blocks(request.num_prompt_tokens, self.block_size) * int(self.block_size)

    def _found(self, request: Request) -> tuple[bool, int]:
        """Return whether somebody holds all blocks that samples of this prompt share, and the number that are held.

        Blocks that nobody holds may be found, but may be gone before a request gets them. No model has a second group
        of KV (corun/node/kv/connector.py).
        """
        shared, coordinator = self.shared_tokens(request), self.kv_cache_manager.coordinator
        if not shared:
            return True, 0
        found = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[0][0]
        num_held = sum(block.ref_cnt > 0 for block in found)
        return num_held * self.block_size == shared, num_held

    def being_read(self) -> Iterator[Request]:
        """Yield the samples whose KV is being read."""
        for request in self.skipped_waiting:
            is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if is_loading and request.request_id not in self.finished_recving_kv_req_ids:
                yield request

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        """Take note of the reads that have ended, also of those whose samples have no slot yet. A request whose read
        failed or was refused has ended by now (vLLM's `update_from_output`)."""
        super()._update_from_kv_xfer_finished(kv_connector_output)
        for name in kv_connector_output.finished_recving or ():
            request = self.requests.get(name)
            if request is not None and not request.is_finished():
                self.note_read(request)

    def note_read(self, request: Request) -> None:
        """Let a sample's blocks be found from now on, and tell that its KV has been read."""
        if not request.is_finished():
            self._let_find(request, self.shared_tokens(request))
        self._read.append(request)

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        """Let a request run whose KV has arrived, if a slot is free. vLLM asks in the order of arrival, and otherwise
        keeps the request in its place. Only one constrained request begins in a step that has no time for its mask."""
        late = request.use_structured_output and self._has_begun and self._mask_time_s <= ENOUGH_S
        if late or self._free_slots <= 0 or not super()._try_promote_blocked_waiting_request(request):
            return False
        self._free_slots -= 1
        if request.use_structured_output:
            self._mask_time_s -= _grammar(request).fill_s
            self._has_begun = True
        return True

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> dict[int, Any]:
        """Add to each drawn token the bits of its log probability, and the number of requests that the step computed,
        as two more integers of `new_token_ids`. Behind them come the alternatives, if the request asks for some: their
        ids, and as many bits of log probabilities.

        That number is not the one of drawn tokens: a request that a stop has ended may be in the next step, too. The
        worker computes a log probability for every row (decode_node/worker.py: `as_tensors`), and vLLM carries them in
        the same output as the tokens of the step. Requests ask vLLM for none, since it would send three arrays for
        each.

        An output without a token and without an end says that the KV of its request has been read. A sample that no
        token can follow under its constraint ends without the one that was drawn, and says why as its stop reason.
        """
        made: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self._masks.findings:
            for output in (output for outputs in made.values() for output in outputs.outputs):
                if finding := self._masks.findings.pop(output.request_id, ""):
                    output.new_token_ids, output.stop_reason = [], finding
        drawn = [output for outputs in made.values() for output in outputs.outputs if output.new_token_ids]
        if drawn:
            found = model_runner_output.logprobs
            bits = found.logprobs[:, 0].view(np.uint32).tolist()
            row_of, live = model_runner_output.req_id_to_index, self.rows_of(scheduler_output)
            for output in drawn:
                row = row_of[output.request_id]
                tops = alternatives_of(found, row) if found.logprob_token_ids.size else ()
                output.new_token_ids = [*output.new_token_ids, bits[row], live, *tops]
        for request in self._read:
            told = made.setdefault(request.client_index, EngineCoreOutputs())
            told.outputs.append(EngineCoreOutput(request_id=request.request_id, new_token_ids=[]))
        self._read.clear()
        return made

    def rows_of(self, output: SchedulerOutput) -> int:
        """Return the number of samples in a step."""
        return len(output.num_scheduled_tokens)

    def _check_shape(self, output: SchedulerOutput) -> None:
        tokens = output.num_scheduled_tokens
        if len(tokens) > self.slots or any(count != 1 for count in tokens.values()):
            raise RuntimeError(f"a decode step holds one token for up to {self.slots} requests: {tokens}")

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        raise RuntimeError(f"request {request.request_id} would be preempted, but its KV room was reserved")


def _grammar(request: Request) -> RowGrammar:
    grammar: RowGrammar = request.structured_output_request.grammar
    return grammar


def alternatives_of(found: LogprobsLists, row: int) -> list[int]:
    """Return the alternatives of one row of a step in which some row has any: ids, and bits of log probabilities."""
    ids = found.logprob_token_ids[row]
    count = int((ids >= 0).sum())  # A row's own alternatives come first (corun/node/vllm/logprobs.py).
    bits = found.logprobs[row, 1 : 1 + count].view(np.uint32)
    return [*ids[:count].tolist(), *bits.tolist()]
