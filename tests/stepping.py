"""Drives vLLM's own scheduler classes through random traces, step by step, without a model.

The scheduler, its block pool and the scheduler half of the NIXL connector are the real ones, configured as our engines
configure them. Faked are the worker, which draws a token for each row and reports KV transfers as NIXL's pull worker
does, and the loop, which is `step_with_batch_queue` of vLLM's engine core (vllm/v1/engine/core.py).

Imports vLLM: load it with `tests.loading.load`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from vllm import EngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from colocated_node.shares import SLOTS
from corun.config.fields import ColocatedConfig, DecodeConfig, PrefillConfig
from corun.models import tiny
from corun.node.kv.handle import (
    CHECK_PARAM,
    FREEDOMS_PARAM,
    IN_PLACE_PARAM,
    OWN_PROMPT_PARAM,
    STAMPS_PARAM,
    owner,
    read_id,
)
from corun.node.kv.stamps import stamps
from corun.node.vllm import start as nodes
from corun.types import NixlEndpoint, NodeRef, NodeRole
from decode_node.grammar import Matcher
from decode_node.masks import RowGrammar
from decode_node.slots import NoRoomError, SlotTable
from prefill_node.engine import salt
from tests.loading import environment
from tests.traces import BLOCK_SIZE, ENDLESS, MAX_LEN, Abort, Arrive, Join, Platform, Record, Row, Run, Step, Trace

ORDINARY, STOP, OTHER = 7, 3, 8
"""Token ids."""
REF = NodeRef(node_id="p0", generation="a" * 16)
"""The node whose prefills are stamped."""


def play(scheduler: str, trace: Trace, platform: Platform, **options: Any) -> Record:
    """Runs `trace` to its end on the scheduler class of this dotted name. options: see `engine`."""
    with environment(VLLM_USE_V2_MODEL_RUNNER=str(int(platform.v2_runner))):
        return engine(scheduler, trace, platform, **options).play()


def engine(
    scheduler: str,
    trace: Trace,
    platform: Platform,
    *,
    role: NodeRole | None,
    connector: bool = True,
    caching: bool = True,
    **changes: Any,
) -> _Engine:
    """What `play` runs, before it runs.

    role: None: both, a colocated node; it has as many places for prompts as slots. caching: whether the node has its
    prefix cache. changes: to the settings of the KV transfer, if there is a `connector`.
    """
    with environment():
        config = _config(role, platform, connector, **changes)
        config.cache_config.enable_prefix_caching &= caching
    with environment(VLLM_USE_V2_MODEL_RUNNER=str(int(platform.v2_runner))):
        return _Engine(scheduler, trace, config)


class _Engine:
    """vLLM's engine core, reduced to what a scheduler can see of it."""

    def __init__(self, scheduler: str, trace: Trace, config: Any) -> None:
        config.cache_config.num_gpu_blocks = trace.blocks + 1  # Block 0 is vLLM's null block.
        config.scheduler_config.max_num_seqs = trace.slots
        config.scheduler_config.max_num_batched_tokens = budget = trace.budget or trace.chunk
        transfer = config.kv_transfer_config
        self._is_colocated = transfer is not None and transfer.kv_role == "kv_both"
        if self._is_colocated:  # As colocated_node/engine.py does.
            transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, SLOTS: trace.slots}
            config.scheduler_config.max_num_seqs = 2 * trace.slots
            config.scheduler_config.max_num_batched_tokens = trace.slots + budget
        config.scheduler_config.long_prefill_token_threshold = trace.chunk
        config.scheduler_config.scheduler_cls = scheduler
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=trace.blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        init_none_hash(sha256)  # As vllm/v1/engine/core.py does.
        self._hasher = (
            get_request_block_hasher(BLOCK_SIZE, sha256) if config.cache_config.enable_prefix_caching else None
        )
        self.ships_bits = scheduler.startswith(("decode_node.", "colocated_node."))
        """Whether a log probability's bits come with each token (decode_node/scheduler.py)."""
        self.live = 0
        """The number of samples of the step whose outputs are taken."""
        self.record = Record()
        self.table: SlotTable | None = None
        """The leases of the node. With them, requests that get none never arrive."""
        self._lease_of: dict[int, int] = {}
        self._content: dict[int, tuple[Any, ...]] = {}  # What each block holds: (prompt, number), or who wrote it.
        self._first_seen: dict[tuple[int, int], tuple[Any, ...]] = {}  # What a sample's blocks in place held first.
        self._of_prompt: dict[int, list[int]] = {}  # By sample that reads in place, all blocks of its prompt.
        self._trace = trace
        self._transfer = config.kv_transfer_config
        self.worker: Any = _PullWorker(self.record) if self._transfer else _Worker(self.record)
        self._depth: int = config.max_concurrent_batches
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._blocks: dict[str, set[int]] = {}  # by request, after the last step was scheduled
        self._late: list[Abort] = []

    def play(self) -> Record:
        for op in self._trace.ops:
            if isinstance(op, Arrive):
                self._arrive(op)
            elif isinstance(op, Join):
                self._join(op)
            elif isinstance(op, Abort) and op.late:
                self._late.append(op)
            elif isinstance(op, Abort):
                self._abort(op)
            else:
                assert isinstance(op, Run)
                for _ in range(op.steps):
                    self.step()
        self._drain()
        self.record.left_over = list(self._left_over())
        return self.record

    def step(self) -> None:
        """`EngineCore.step_with_batch_queue`: fills the queue of steps first, then takes the oldest result."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.record.steps.append(self._observe(output))
            self._in_flight.append((output, self.worker.execute(output, self.scheduler.requests)))
            if len(self._in_flight) < self._depth and (
                output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            ):
                return
        if self._in_flight:
            step = self._in_flight.popleft()
            while self._late:  # vllm/v1/engine/core.py: `_process_aborts_queue`
                self._abort(self._late.pop())
            self.live = sum(not self._is_prompt(int(name)) for name in step[0].num_scheduled_tokens)
            for outputs in self.scheduler.update_from_output(*step).values():
                for output in outputs.outputs:
                    self._take(output)

    def _arrive(self, arrival: Arrive) -> None:
        first = len(self.record.requests)
        count = sum(self._gets_lease(first + place, arrival) for place in range(arrival.with_prompt or 1))
        if not arrival.with_prompt:
            if count:
                self._add(arrival)
            return
        for number in range(first, first + count):
            self.record.prompt_of[number] = first + count
            self._add(arrival)
        if count:
            self._add(replace(arrival, reads=False, own=False, with_prompt=0, max_tokens=1, stops_after=ENDLESS))

    def _join(self, op: Join) -> None:
        """Add a sample of a prompt that runs, or whose KV some reader has yet to read."""
        held = [request for name, request in self.scheduler.requests.items() if self._is_prompt(int(name))]
        held = [request for request in held if request.status is not RequestStatus.FINISHED_ABORTED]
        if not held:
            return
        prompt, number = int(held[op.which % len(held)].request_id), len(self.record.requests)
        of_prompt = replace(self.record.requests[prompt], reads=True, own=True, with_prompt=1, transfer_steps=0)
        arrival = replace(of_prompt, max_tokens=op.max_tokens, stops_after=op.stops_after)
        if self._gets_lease(number, arrival):
            self.record.prompt_of[number] = prompt
            self._add(arrival)

    def _gets_lease(self, number: int, arrival: Arrive) -> bool:
        """Return whether a request may arrive."""
        if self.table is None or (self._is_colocated and not arrival.reads):
            return True
        try:
            lease = self.table.reserve("r", arrival.prompt, arrival.max_tokens, share_key=_salt(arrival) or "")
        except NoRoomError:
            return False
        self._lease_of[number] = lease.lease_id
        return True

    def _add(self, arrival: Arrive) -> None:
        number = len(self.record.requests)
        self.record.requests.append(arrival)
        is_sample, prompt = self._is_sample(number), self.record.prompt_of.get(number)
        request = _request(str(number), arrival, self._transfer, self._hasher, is_sample=is_sample, prompt=prompt)
        self.scheduler.add_request(request)

    def _abort(self, op: Abort) -> None:
        if not self.record.requests:
            return
        number = op.which % len(self.record.requests)
        if number not in self.record.finished:
            self.record.aborted.add(number)
        self._release(number)
        self.scheduler.finish_requests([str(number)], RequestStatus.FINISHED_ABORTED)
        for sample in [sample for sample, prompt in self.record.prompt_of.items() if prompt == number]:
            if str(sample) not in self.scheduler.requests and sample not in self.record.finished:
                self.record.aborted.add(sample)  # It ended with its prompt.
                self._release(sample)

    def _release(self, number: int) -> None:
        if self.table is not None and number in self._lease_of:
            self.table.release(self._lease_of[number])

    def _is_sample(self, number: int) -> bool:
        """Whether a request reads its prompt's KV."""
        if self._is_colocated:
            return self.record.requests[number].reads
        return self._transfer is not None and not self._transfer.is_kv_producer

    def _is_prompt(self, number: int) -> bool:
        """Whether a request is only computed for a reader on a colocated node."""
        return self._is_colocated and not self._is_sample(number)

    def _drain(self) -> None:
        """Runs until all is done. `stuck`: far more steps than all of this work can take."""
        work = sum(r.prompt + r.max_tokens + r.transfer_steps + 4 for r in self.record.requests)
        for _ in range(2 * work + 8):
            if not (self.scheduler.has_requests() or self._in_flight):
                return
            self.step()
        self.record.stuck = True

    def _observe(self, output: SchedulerOutput) -> Step:
        requests = self.scheduler.requests
        rows = {
            int(name): Row(requests[name].num_computed_tokens - tokens, tokens)
            for name, tokens in output.num_scheduled_tokens.items()
        }
        loads = getattr(output.kv_connector_metadata, "reqs_to_recv", {})
        into = {name: set(itertools.chain(*meta.local_block_ids)) for name, meta in loads.items()}
        read = set[int]().union(*into.values())
        # The runner zeroes blocks before the worker copies, and while a peer's KV may be on its way.
        copied = {block for name in into if self.record.requests[int(name)].own for block in into[name]}
        zeroed = set(output.new_block_ids_to_zero or ())
        given_to, kept = self._given()
        given = set[int]().union(*given_to.values())
        found = self._found(output, given_to)
        wrong = self._compute(rows, read, zeroed, loads)
        return Step(
            rows=rows,
            loads=tuple(int(name) for name, meta in loads.items() if meta.local_block_ids),
            running=sum(not self._is_prompt(int(request.request_id)) for request in self.scheduler.running),
            preempted=len(output.preempted_req_ids or ()),
            free=self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            owed=sum(self._owed(request) for request in self._admitted()),
            stale=len(given - zeroed - read - found),
            wiped=len(zeroed & (kept | (read - copied))),
            wrong=wrong,
            read_blocks=len(read),
            prompt_blocks=self._prompt_blocks() if self._is_colocated else 0,
        )

    def _prompt_blocks(self) -> int:
        held = [blocks for name, blocks in self._blocks.items() if self._is_prompt(int(name))]
        running = (request for request in self.scheduler.running if self._is_prompt(int(request.request_id)))
        return len(set().union(*held)) + sum(map(self._owed, running))

    def _found(self, output: SchedulerOutput, given: dict[str, set[int]]) -> set[int]:
        """The blocks that are from the prefix cache."""
        news = [new for new in output.scheduled_new_reqs if not self._is_sample(int(new.req_id))]
        found = {block for new in news for block in new.block_ids[0][: new.num_computed_tokens // BLOCK_SIZE]}
        pool = self.scheduler.kv_cache_manager.block_pool  # What has been read is found from the next step on.
        of_samples = (blocks for name, blocks in given.items() if self._is_sample(int(name)))
        found.update(*map(self._in_prompt, given))
        return found | {block for block in itertools.chain(*of_samples) if pool.blocks[block].block_hash is not None}

    def _in_prompt(self, name: str) -> list[int]:
        """The blocks of its prompt that a sample reads where they are, in the prompt's order."""
        request = self.scheduler.requests.get(name)
        count = (request.kv_transfer_params or {}).get(IN_PLACE_PARAM, 0) if request is not None else 0
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0][:count]) if count else []

    def _compute(self, rows: dict[int, Row], read: set[int], zeroed: set[int], loads: dict[str, Any]) -> int:
        """Do to the blocks what a step does. Return how many blocks, from which its rows read, are not the prompt's.

        A row whose own copy is refused computes nothing that anybody gets."""
        if not self._is_colocated and not any(map(self._is_sample, range(len(self.record.requests)))):
            return 0
        for name in self.scheduler.requests:
            if self._in_prompt(name) and int(name) not in self._of_prompt:
                prompt = self.record.prompt_of.get(int(name))
                blocks = self.scheduler.kv_cache_manager.get_block_ids(str(prompt))[0] if prompt is not None else []
                self._of_prompt[int(name)] = blocks or self._in_prompt(name)
        self._content.update(dict.fromkeys(zeroed, ("zeros",)))
        self._content.update(dict.fromkeys(read, ("on its way",)))
        own = [(name, meta.local_block_ids[0]) for name, meta in loads.items() if meta.local_block_ids]
        own = [(name, blocks) for name, blocks in own if self.record.requests[int(name)].own]
        for name, blocks in (*self.worker.arrived, *own):
            arrival = self.record.requests[int(name)]
            whole = -(-arrival.prompt // BLOCK_SIZE)
            content = ("garbage",) if arrival.fails else (arrival.prompt, arrival.group or name)
            numbers = range(whole - len(blocks), whole)
            if arrival.with_prompt and not self._is_there(loads[name].remote.block_ids[0], arrival):
                content = ("not computed",)
            self._content.update({block: (*content, i) for block, i in zip(blocks, numbers, strict=True)})
        self.worker.arrived.clear()
        wrong = 0
        for number, row in rows.items():
            arrival = self.record.requests[number]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(str(number))
            if self._is_sample(number) and not (arrival.own and arrival.fails):
                # The first row also reads what was brought of the block that it writes to.
                read_until = arrival.prompt - 1 + (BLOCK_SIZE - 1 if row.start == arrival.prompt - 1 else 0)
                in_place = len(self._in_prompt(str(number)))
                for i, block in enumerate(blocks[: read_until // BLOCK_SIZE]):
                    content = self._content.get(block, ("nobody",))
                    if i < in_place:
                        wrong += not self._is_in_place(number, i, block, content)
                    else:
                        expected: tuple[Any, ...] = (arrival.prompt, arrival.group or str(number), i)
                        wrong += content != expected
            written = blocks[row.start // BLOCK_SIZE : (row.start + row.tokens - 1) // BLOCK_SIZE + 1]
            self._content.update(dict.fromkeys(written, ("written by", number)))
        return wrong

    def _is_in_place(self, number: int, i: int, block: int, content: tuple[Any, ...]) -> bool:
        """Return whether a sample's block is the one of its prompt, which prompts have computed or another sample of
        the group has read, and holds what it held when the sample began."""
        what, *by = content
        arrival = self.record.requests[number]
        of_prompts = [self._of_prompt[number]]
        if arrival.group:  # Samples of one group have one prompt, though it was computed for each of them.
            same = (arrival.prompt, arrival.group)
            mates = [(self.record.requests[mate], blocks) for mate, blocks in self._of_prompt.items()]
            of_prompts = [blocks for mate, blocks in mates if (mate.prompt, mate.group) == same]
        if not (arrival.group and content == (arrival.prompt, arrival.group, i)) and (
            what != "written by" or not self._is_prompt(*by) or block not in {blocks[i] for blocks in of_prompts}
        ):
            return False
        return self._first_seen.setdefault((number, i), content) == content

    def _is_there(self, blocks: Sequence[int], sample: Arrive) -> bool:
        """Return whether these blocks are as many as the sample's prompt needs, and prompts have computed them: all
        prompts begin alike."""
        whole = -(-sample.prompt // BLOCK_SIZE)
        found = [self._content.get(block, ("nobody",)) for block in blocks]
        return len(found) == whole and all(what == "written by" and self._is_prompt(*by) for what, *by in found)

    def _given(self) -> tuple[dict[str, set[int]], set[int]]:
        """The blocks that each request has since this step, and those that any had before it."""
        before, blocks = self._blocks, self.scheduler.kv_cache_manager.get_block_ids
        self._blocks = {name: set(itertools.chain(*blocks(name))) for name in self.scheduler.requests}
        given = {name: now - before.get(name, set()) for name, now in self._blocks.items()}
        kept = [now & before.get(name, set()) for name, now in self._blocks.items()]
        return given, set().union(*kept)

    def _admitted(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.skipped_waiting]

    def _owed(self, request: Request) -> int:
        (held,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens: int = request.num_prompt_tokens + request.max_tokens
        return max(0, -(-tokens // BLOCK_SIZE) - len(held))

    def _take(self, output: Any) -> None:
        number = int(output.request_id)
        if not output.new_token_ids and output.finish_reason is None:
            self.record.read.append(number)
            return
        outputs = self.record.outputs.setdefault(number, [])
        if self.ships_bits and output.new_token_ids:
            token, bits, computed = output.new_token_ids
            assert computed == self.live, "the step had other rows"
            expected = np.float32(-(number + (len(outputs) + 1) / 1024))
            assert bits == int(expected.view(np.uint32)), "the log probability is of another token"
            outputs.append(token)
        else:
            outputs += output.new_token_ids
        if output.finish_reason is not None:
            self.record.finished[number] = str(output.finish_reason)
            self._release(number)

    def _left_over(self) -> Iterator[str]:
        scheduler = self.scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self._trace.blocks:
            yield f"{self._trace.blocks - free} blocks"
        queues = ("requests", "running", "waiting", "skipped_waiting", "_inflight_prefills", "deferred_frees")
        for name in (*queues, *(("_with_prompt", "_kept", "_in_place") if self._is_colocated else ())):
            if held := getattr(scheduler, name):
                yield f"{name}: {held}"
        if scheduler.connector and (heartbeats := scheduler.connector.connector_scheduler._heartbeat_by_engine):
            yield f"heartbeats: {heartbeats}"
        if scheduler.connector and (prefills := len(scheduler.connector._prefills)):
            yield f"owners of {prefills} prefills"
        yield from self.worker.left_over()


class _Worker:
    """Draws one token for each row that has reached its request's last position."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._drawn: dict[str, int] = {}

    def execute(self, output: SchedulerOutput, requests: dict[str, Request]) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        drawn = [[] if requests[name].is_prefill_chunk else [self._draw(name)] for name in names]
        logprobs = np.array([[self.logprob(name)] for name in names], dtype=np.float32)
        nothing = np.empty(0, dtype=np.int64)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=drawn,
            logprobs=LogprobsLists(nothing, logprobs.reshape(len(names), 1), nothing),
            kv_connector_output=self._transfer(output),
        )

    def logprob(self, name: str) -> float:
        """The log probability of a request's last token: it tells the request and the token's number."""
        return -(int(name) + self._drawn.get(name, 0) / 1024)

    def _draw(self, name: str) -> int:
        drawn = self._drawn[name] = self._drawn.get(name, 0) + 1
        return STOP if drawn == self._record.requests[int(name)].stops_after else ORDINARY

    def _transfer(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        return None

    def left_over(self) -> Iterator[str]:
        yield from ()


class _PullWorker(_Worker):
    """Reports transfers as NIXL's pull worker does (nixl/pull_worker.py), each after the steps its request says."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._reading: dict[str, tuple[int, Sequence[int]]] = {}  # name -> steps left, local blocks
        self._in_batch: set[str] = set()
        self._held: dict[str, int] = {}  # name -> steps until read, or until its lease ends
        self.arrived: list[tuple[str, Sequence[int]]] = []
        """The reads that have ended, with their blocks, since this was last looked at."""

    def _transfer(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        meta: Any = output.kv_connector_metadata
        for name, read in meta.reqs_to_recv.items():
            if read.local_block_ids:  # Otherwise an abort before the start: the other side is told, nothing is read.
                (blocks,) = read.local_block_ids
                arrival = self._arrival(name)
                self._reading[name] = (0 if arrival.own else arrival.transfer_steps, blocks)
        self._in_batch |= meta.reqs_in_batch
        for name in meta.reqs_not_processed:
            self._in_batch.discard(name)
            assert name not in self._held, "an abort after the lease began"
        for name in meta.reqs_to_send:
            if name in self._in_batch:
                self._held[name] = self._arrival(name).transfer_steps
        return self._finished()

    def _finished(self) -> KVConnectorOutput:
        read = {name: blocks for name, (steps, blocks) in self._reading.items() if steps == 0}
        sent = {name for name, steps in self._held.items() if steps == 0}
        self._in_batch -= sent
        self._reading = {k: (steps - 1, blocks) for k, (steps, blocks) in self._reading.items() if k not in read}
        self._held = {k: steps - 1 for k, steps in self._held.items() if k not in sent}
        self.arrived += [(name, blocks) for name, blocks in read.items() if not self._arrival(name).own]
        failed = [blocks for name, blocks in read.items() if self._arrival(name).fails]
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=set(read), invalid_block_ids=set(itertools.chain(*failed))
        )

    def _arrival(self, name: str) -> Arrive:
        return self._record.requests[int(name)]

    def left_over(self) -> Iterator[str]:
        for what, held in (("reading", self._reading), ("in batch", self._in_batch), ("held", self._held)):
            if held:
                yield f"{what}: {sorted(held)}"


def tokens_of(arrival: Arrive) -> list[int]:
    """Return the token ids of its prompt."""
    common = arrival.prompt if arrival.common == ENDLESS else min(arrival.common, arrival.prompt)
    return [ORDINARY] * common + [OTHER] * (arrival.prompt - common)


def _request(
    name: str, arrival: Arrive, transfer: Any, hasher: Any, *, is_sample: bool, prompt: int | None = None
) -> Request:
    params = SamplingParams(
        max_tokens=arrival.max_tokens,
        ignore_eos=True,
        stop_token_ids=[] if arrival.stops_after == ENDLESS else [STOP],
        extra_args={"kv_transfer_params": _transfer_params(name, arrival, transfer, prompt, is_sample=is_sample)},
    )
    salted = _salt(arrival) if is_sample else salt(arrival.scope, arrival.freedoms)
    request = Request(name, tokens_of(arrival), params, None, cache_salt=salted, block_hasher=hasher)
    if arrival.mask_s:
        request.structured_output_request = StructuredOutputRequest(params=StructuredOutputsParams(regex="a"))
        request.structured_output_request.grammar = _Grammar(arrival.mask_s)
    return request


class _Grammar(RowGrammar):
    """A row whose masks take a time of the test's own. They are made when the step has drawn."""

    def __init__(self, fill_s: float) -> None:
        super().__init__(cast("Matcher", None), {}, fill_s)

    def accept_tokens(self, _: str, __: list[int]) -> bool:
        self.filled_at = time.monotonic()
        return True


def _salt(arrival: Arrive) -> str | None:
    """Return the salt of a sample on a decode node, where the samples of one prompt share its blocks."""
    return f"{arrival.prompt} {arrival.group}" if arrival.group else None


def _transfer_params(
    name: str, arrival: Arrive, transfer: Any, prompt: int | None, *, is_sample: bool
) -> dict[str, Any]:
    """As our engines give them. prompt: the one with which a sample comes."""
    if transfer is None:  # Only our own scheduler looks at them.
        return {FREEDOMS_PARAM: [*arrival.freedoms]}
    if not is_sample:
        own = (owner(name, REF), -(-arrival.prompt // BLOCK_SIZE))
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            STAMPS_PARAM: stamps([own], tokens_of(arrival), BLOCK_SIZE),
            CHECK_PARAM: True,
            FREEDOMS_PARAM: list(arrival.freedoms),
        }
    if prompt is not None:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": transfer.engine_id,
            "remote_request_id": read_id(str(prompt), name),
            "remote_block_ids": [[]],
            "remote_host": "",
            "remote_port": 0,
            "tp_size": 1,
            OWN_PROMPT_PARAM: [str(prompt), REF.node_id, REF.generation],
        }
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": transfer.engine_id if arrival.own else "peer",
        "remote_request_id": f"prefill-{name}",
        "remote_block_ids": [list(range(-(-arrival.prompt // BLOCK_SIZE)))],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        STAMPS_PARAM: bytes(8),
    }


def _config(role: NodeRole | None, platform: Platform, connector: bool, **transfer: Any) -> Any:
    """A fresh configuration."""
    base = _engine_config(role)
    config = copy.copy(base)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.cache_config = copy.copy(base.cache_config)
    config.scheduler_config.async_scheduling = platform.async_scheduling
    config.kv_transfer_config = copy.copy(base.kv_transfer_config) if connector else None
    for name, value in transfer.items():
        setattr(config.kv_transfer_config, name, value)
    return config


@functools.lru_cache
def _engine_config(role: NodeRole | None) -> Any:
    """What vLLM makes of our engines' arguments."""
    cls = {NodeRole.PREFILL: PrefillConfig, NodeRole.DECODE: DecodeConfig, None: ColocatedConfig}[role]
    roles = [*NodeRole] if role is None else [role]
    endpoint = NixlEndpoint(engine_id="self", host="127.0.0.1", port=1, tp_size=1)
    arguments = nodes.shared_arguments(cls(model=str(tiny.ensure())), roles, endpoint)
    arguments |= {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    return EngineArgs(**arguments, max_num_seqs=1, max_num_batched_tokens=BLOCK_SIZE).create_engine_config()
