"""Engine steps for self-tests: run a worker's own step on chosen sequences and KV blocks, and collect all its results.

Owns: the conversion of sequences to vLLM's `SchedulerOutput` and of the step's output to traces, on both model runners,
and access to the contents of KV blocks. Must not know: what is tested with it, roles, gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from corun.node.vllm import graphs

NULL_BLOCK = 0
"""vLLM's null block: padding rows write there."""
DRAWN_ROWS = 512
"""The rows of a layer's KV for which random numbers are drawn at once: there is little room beside the KV cache."""


@dataclass(kw_only=True, slots=True)
class TestSequence:
    """A sequence under test: its prompt, where its KV lies, and how far it has come."""

    __test__ = False  # Tells pytest that this is not a test class.

    name: str
    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    """The KV blocks, with room for the prompt and all tokens that will be drawn."""
    computed: int
    """The number of tokens whose KV is in the blocks."""
    sampling: Any
    """The sequence's `SamplingParams` of vLLM."""
    drawn: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The results of one step for one sequence, in the order in which the model computes them."""

    kv: tuple[torch.Tensor, ...] = ()
    """Whole blocks, per layer: [blocks, ...]; a step gives none (`Stepper.with_kv`)."""
    hidden: torch.Tensor
    """The input of lm_head: [hidden size]."""
    logits: torch.Tensor
    """The output of lm_head: [vocab]."""
    logprob: torch.Tensor
    """The drawn token's log probability: [1] fp32."""
    token: torch.Tensor
    """The drawn token: [1]."""

    @property
    def stages(self) -> dict[str, torch.Tensor]:
        """What the model computed, by its name, in order."""
        layers = {f"the KV of layer {layer} of {len(self.kv)}": kv for layer, kv in enumerate(self.kv)}
        drawn = {"the log probability": self.logprob, "the drawn token": self.token}
        return {**layers, "the last hidden state": self.hidden, "the logits (lm_head)": self.logits, **drawn}


def first_differences(pairs: Sequence[tuple[Trace, Trace]]) -> list[str]:
    """Return of each pair the first stage of the model whose bits differ; empty if no bits differ.

    The device compares all, and the host waits for it once.
    """
    if not pairs:
        return []
    stages = [(a.stages, b.stages) for a, b in pairs]
    differ = [_differ(*both) for a, b in stages for both in zip(a.values(), b.values(), strict=True)]
    found = iter(torch.stack(differ).tolist())
    return [next((name for name, differs in [(name, next(found)) for name in a] if differs), "") for a, _ in stages]


def first_difference(a: Trace, b: Trace) -> str:
    """Return the first stage of the model whose bits differ; empty if no bits differ."""
    return first_differences([(a, b)])[0]


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether any bit differs, on the device. As bytes, 0.0 is not -0.0, and NaN equals itself."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):  # One may have been stretched to the other.
        return torch.ones((), dtype=torch.bool, device=a.device)
    left, right = (each.contiguous().view(torch.uint8) for each in (a, b))
    return left.ne(right).any()


class Stepper:
    """Runs steps on a loaded worker that does not serve requests yet.

    As in service, the host makes a step while the device runs the one before it, and no more: vLLM's V2 runner has the
    buffers of two steps (v1/worker/gpu/buffer_utils.py). So traces may still be computed when they are returned.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._unfinished: Any = None
        """The last step's output, if the device may still compute it."""
        self._runner = worker.model_runner
        self._known: set[str] = set()
        config = worker.vllm_config
        self.block_size: int = config.cache_config.block_size
        self.num_blocks: int = self._runner.kv_cache_config.num_blocks
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.max_model_len: int = config.model_config.max_model_len
        self._caches: list[torch.Tensor] = self._runner.kv_caches

    def step(
        self,
        tokens: Sequence[tuple[TestSequence, int]],
        ended: Iterable[TestSequence] = (),
        traced: Container[str] | None = None,
        rows: int | None = None,
    ) -> dict[str, Trace]:
        """Run one step.

        Args:
            tokens: the step's sequences in their order, each with its number of tokens.
            ended: the sequences of earlier steps that are over; they take part in no later step.
            traced: the names of the sequences whose traces are wanted; None: all.
            rows: the number of decode rows in a step that also holds prompts; None: it holds none.

        Returns:
            A trace for every wanted sequence whose prompt is complete, by name.
        """
        output = self._schedule(tokens, {sequence.name for sequence in ended}, rows)
        with recorded_logits(self._runner.model) as recorded:
            self._worker.execute_model(output)
            result = self._worker.sample_tokens(None)
        self._finish()
        self._unfinished = result if hasattr(result, "get_output") else None
        traces = {}
        for sequence, count in tokens:
            sequence.computed += count
            if sequence.computed >= len(sequence.prompt):
                sequence.drawn += 1
                if traced is None or sequence.name in traced:
                    traces[sequence.name] = _trace(sequence.name, result, *recorded[-1])
        return traces

    def _finish(self) -> None:
        """Wait until the device has run the last step."""
        if self._unfinished is not None:
            self._unfinished.get_output()
        self._unfinished = None

    def with_kv(self, sequence: TestSequence, last: Trace, start: int = 0) -> Trace:
        """Return a sequence's last trace with the blocks of all its tokens from `start` on."""
        return replace(
            last, kv=self.read(sequence.blocks[start // self.block_size : -(-sequence.computed // self.block_size)])
        )

    def layer_that_differs(self, a: Sequence[int], b: Sequence[int]) -> str:
        """Compare the KV in two lists of blocks, in place and bit by bit, and return the first layer that differs in
        words; empty if none does. The host waits for the device once for all layers, not for each."""
        both = zip(self._caches, self._rows(a), self._rows(b), strict=True)
        equal = [(cache[left].view(torch.uint8) == cache[right].view(torch.uint8)).all() for cache, left, right in both]
        differ = (~torch.stack(equal)).nonzero()
        return f"the KV of layer {int(differ[0])} of {len(equal)}" if len(differ) else ""

    def agree(self, finding: str) -> str:
        """Return this rank's finding, or that another rank found something; empty if no rank did.

        Ranks compare different parts of the KV. If one stopped at a difference that another does not see, the other
        would wait for it in its next step for ever.
        """
        group = get_tp_group()
        if group.world_size == 1:
            return finding
        found = torch.tensor([int(bool(finding))])
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
        return finding or ("another rank found a difference" if found.item() else "")

    @contextmanager
    def other_splits(self) -> Iterator[None]:
        """Let attention cut KV in another way than the contract's: sums in another order, and nothing else.

        On a GPU FlashAttention then cuts KV by its own heuristic, which looks at the whole batch. Captured graphs have
        their splits inside, so these steps run without them. On a CPU split-KV is what it is not in the contract.
        """
        if current_platform.is_cpu():
            with _replaced(ops, "cpu_attn_get_scheduler_metadata", _flipped):
                yield
            return
        groups = (group for groups in self._runner.attn_groups for group in groups)
        with ExitStack() as stack:
            stack.enter_context(graphs.without(self._runner.cudagraph_manager))
            for builder in (builder for group in groups for builder in group.metadata_builders):
                stack.enter_context(_replaced(builder, "build", _with_heuristic))
                if (prompts := getattr(builder, "_prefill_backend", None)) is not None:
                    # MLA's prompts have a call of their own (v1/attention/backends/mla/prefill/flash_attn.py).
                    stack.enter_context(_replaced(prompts, "flash_attn_varlen_func", partial(partial, num_splits=0)))
            yield

    def close(self) -> None:
        """Make the worker forget all sequences."""
        self._finish()
        self._worker.execute_model(self._schedule((), set(self._known)))

    def read(self, blocks: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return copies of the contents of KV blocks, per layer."""
        return tuple(cache[rows] for cache, rows in zip(self._caches, self._rows(blocks), strict=True))

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Set the contents of KV blocks, per layer."""
        for cache, rows, content in zip(self._caches, self._rows(blocks), contents, strict=True):
            cache[rows] = content

    def scramble(self, blocks: Sequence[int], seed: int) -> None:
        """Fill KV blocks with normal random numbers. Drawn in fp32: a CPU takes four times as long for bf16."""
        device = self._caches[0].device
        generator = torch.Generator(device=device).manual_seed(seed)
        for cache, rows in zip(self._caches, self._rows(blocks), strict=True):
            for part in rows.split(DRAWN_ROWS):
                shape = (len(part), *cache.shape[1:])
                noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
                cache[part] = noise.to(cache.dtype)

    def _rows(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of KV blocks in each layer's cache; a kernel may split a block into several rows."""
        first = async_tensor_h2d(list(blocks), self._caches[0].device)[:, None]
        all_parts = [cache.shape[0] // self.num_blocks for cache in self._caches]
        rows = {parts: (first * parts + torch.arange(parts, device=first.device)).flatten() for parts in {*all_parts}}
        return [rows[parts] for parts in all_parts]

    def _schedule(
        self, tokens: Sequence[tuple[TestSequence, int]], ended: set[str], rows: int | None = None
    ) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        for sequence, _ in tokens:
            if sequence.name in self._known:
                cached.req_ids.append(sequence.name)
                cached.num_computed_tokens.append(sequence.computed)
                cached.num_output_tokens.append(sequence.drawn)
                cached.new_block_ids.append(None)
                continue
            prompt = list(sequence.prompt)
            new = NewRequestData(
                req_id=sequence.name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=sequence.sampling,
                pooling_params=None,
                block_ids=(list(sequence.blocks),),
                num_computed_tokens=sequence.computed,
                lora_request=None,
                prefill_token_ids=prompt,
            )
            output.scheduled_new_reqs.append(new)
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = {sequence.name: count for sequence, count in tokens}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_common_prefix_blocks = [0] * len(self._runner.kv_cache_config.kv_cache_groups)
        output.finished_req_ids = ended
        if has_kv_transfer_group():
            output.kv_connector_metadata = get_kv_transfer_group().nothing_to_do(rows)
        self._known = self._known - ended | {sequence.name for sequence, _ in tokens}
        return output


def _trace(name: str, result: Any, hidden: torch.Tensor, logits: torch.Tensor) -> Trace:
    """Return the trace of one sequence of a step, from the runner's result and the input and output of lm_head."""
    if hasattr(result, "get_output"):  # The V2 runner's results lie on the device.
        row = result.model_runner_output.req_ids.index(name)
        tokens, logprobs = result.sampler_output.sampled_token_ids, result.sampler_output.logprobs_tensors.logprobs
        token, logprob = tokens[row, :1].clone(), logprobs[row, :1].clone()
    else:
        row = result.req_ids.index(name)
        token = torch.tensor(result.sampled_token_ids[row][:1])
        logprob = torch.tensor([result.logprobs.logprobs[row][0]], dtype=torch.float32)
    return Trace(hidden=hidden[row].clone(), logits=logits[row].clone(), logprob=logprob, token=token)


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what `by` makes of it, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, by(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _flipped(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the planner of vLLM's CPU attention (v1/attention/backends/cpu_attn.py) with split-KV flipped."""

    def flipped(*args: Any, enable_kv_split: bool, **kwargs: Any) -> Any:
        return schedule(*args, enable_kv_split=not enable_kv_split, **kwargs)

    return flipped


def _with_heuristic(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a metadata builder's `build` whose results leave splits and schedule to FlashAttention.

    With 0 splits and no schedule FlashAttention 3 makes both itself (v1/attention/backends/flash_attn.py). MLA has a
    part of its own for decode rows (v1/attention/backends/mla/flashattn_mla.py).
    """

    def built(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        for part in (metadata, getattr(metadata, "decode", None)):
            if part is not None and hasattr(part, "max_num_splits"):
                part.max_num_splits, part.scheduler_metadata = 0, None
        return metadata

    return built


@contextmanager
def recorded_logits(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collect the input and the output of lm_head, call by call."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute_logits = model.compute_logits

    def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(hidden, *args, **kwargs)
        calls.append((hidden, logits))
        return logits

    model.compute_logits = record
    try:
        yield calls
    finally:
        model.compute_logits = compute_logits


def differences(
    stepper: Stepper, blocks: Sequence[tuple[Sequence[int], Sequence[int]]], traces: Sequence[tuple[Trace, Trace]]
) -> list[str]:
    """Return of each pair of sequences the first layer whose KV differs in their blocks, or else the first stage that
    differs in their traces; empty if no bits differ.

    Each look at KV waits for the device, so there is one for all pairs, and others only if it finds something.
    """
    if not blocks:
        return []
    left, right = ([block for pair in blocks for block in pair[side]] for side in (0, 1))
    differ = bool(stepper.layer_that_differs(left, right))
    layers = [stepper.layer_that_differs(*pair) if differ else "" for pair in blocks]
    return [layer or stage for layer, stage in zip(layers, first_differences(traces), strict=True)]


class BlockPool:
    """The first `count` KV blocks behind the null block, full of random numbers, in a random order. They are taken from
    the front and given back to the end, so that a sequence gets other blocks the next time."""

    def __init__(self, stepper: Stepper, count: int, draw: random.Random, seed: int) -> None:
        self.free = list(range(NULL_BLOCK + 1, NULL_BLOCK + 1 + count))
        stepper.scramble(self.free, seed)
        draw.shuffle(self.free)

    def take(self, count: int) -> tuple[int, ...]:
        taken, self.free = self.free[:count], self.free[count:]
        if len(taken) < count:
            raise RuntimeError(f"the self-test needs {count} more KV blocks, {len(taken)} are left")
        return tuple(taken)

    def give_back(self, blocks: Iterable[int]) -> None:
        self.free.extend(blocks)


def compare(expected: Mapping[str, Sequence[Trace]], found: Mapping[str, Sequence[Trace]], scene: str) -> str:
    """Return in words the first difference between two runs of the same sequences; empty if there is none."""
    pairs = {
        (name, step): pair
        for name, traces in expected.items()
        for step, pair in enumerate(zip(traces, found[name], strict=True))
    }
    stages = zip(pairs, first_differences(list(pairs.values())), strict=True)
    differ = (f"{scene}: {name} differs in step {step}, first in {stage}" for (name, step), stage in stages if stage)
    return next(differ, "")
