"""The vLLM worker of a prefill node: the stock worker, with observation, scores, a self-test, and the test of its
freedoms.

Prefill steps need no padding: the shape of an isolated prompt's steps depends on its own length alone. The self-test
checks that a prompt's KV does not depend on earlier prompts or on the KV blocks that hold it. Both tests run with the
loaded model's own steps, before the node serves. Must not know: gRPC.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors

from corun.node.certificate import Evidence
from corun.node.kv.handle import TARGETS_PARAM
from corun.node.vllm import attention, blas, graphs, structure
from corun.node.vllm.logprobs import log_probabilities
from corun.node.vllm.selftest import Stepper
from corun.node.vllm.start import step_tokens
from corun.node.vllm.worker import NodeWorker
from corun.types import Freedom
from prefill_node.certify import Freedoms, certify
from prefill_node.scenes import Limits, within
from prefill_node.scoring import CPU_ROWS, GPU_ROWS, Scorer

LONGEST = 4096 + 100
"""The least length of the longest prompt under test, if the model and the KV cache have room: its last chunk has so
much context that attention's heuristic would cut it."""
CPU_LONGEST, CPU_BUDGET, CPU_SCENES = 1600, 2048, 2
"""The longest prompt, the most tokens of a step and the number of scenes of each kind on a CPU, where the test grants
nothing and only finds what differs."""
CPU_UNKNOWN = "a CPU's libraries do not tell in which order they sum for other numbers of rows"
log = init_logger(f"vllm.{__name__}")  # In engine processes only vLLM's own loggers print.


class PrefillWorker(NodeWorker):
    """Computes prompts with the stock model runner, and scores tokens in its own way."""

    holds_prompts = True
    """Whether the step that runs holds prompts; all of a prefill node's do."""

    def compile_or_warm_up_model(self) -> Any:
        if current_platform.is_cpu():
            times = super().compile_or_warm_up_model()
            score_in_steps_v1(self.model_runner, self.scorer())
            return times
        manager, builders = self.model_runner.cudagraph_manager, attention.builders_of(self.model_runner)
        whole = self.may_be_whole and graphs.can_be_whole(builders)
        graphs.plan(manager, builders, {*self.buckets, *self.long_steps}, self.row_lengths, whole=whole)
        graphs.guard(manager, lambda: self.holds_prompts)
        times = super().compile_or_warm_up_model()
        score_in_steps_v2(self.model_runner, self.scorer())
        graphs.choose(manager, length_of=self.graph_of)
        return times

    @property
    def row_lengths(self) -> Sequence[int]:
        """The numbers of rows of decode steps that have a graph; a prefill node has no such steps."""
        return ()

    @property
    def may_be_whole(self) -> bool:
        """Whether a captured step with prompts may be whole, attention included."""
        return structure.has_one_tile(self.vllm_config)

    def graph_of(self, tokens: int) -> int:
        """Return the length to which a step with prompts is padded, which has a graph; 0: it runs without one."""
        lengths = self.buckets if tokens <= self.chunk_size else self.long_steps
        return next((length for length in lengths if length >= tokens), 0)

    def scorer(self) -> Scorer:
        """Return how this node scores tokens."""
        if current_platform.is_cpu():
            return Scorer(CPU_ROWS, log_probabilities)
        from corun.node.vllm import logprob_kernels  # noqa: PLC0415  # There may be no Triton without a GPU.

        return Scorer(GPU_ROWS, logprob_kernels.log_probabilities)

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "scorer": self.scorer().name}

    def certify(self) -> str:
        """Return the first difference that the self-test finds; empty if there is none."""
        with torch.inference_mode():
            finding = certify(Stepper(self), self.chunk_size, self.buckets, _sampling())
        torch.accelerator.empty_cache()
        return finding

    def certify_freedoms(self, wanted: Sequence[str], by_name: bool = True) -> dict[str, Any]:
        """Return why each wanted freedom is refused; empty: it is held. With it comes the evidence, in numbers.

        A freedom is held only if three things hold: nothing of the engine is known to follow the number of rows, all
        algorithms of its matrix products give a row the same bits, and whole steps found no difference.
        by_name: whether to look at what is known; tests switch it off, to see the other parts find the same.
        """
        test = FreedomTest(self, wanted)
        with torch.inference_mode():
            if current_platform.is_cpu():
                test.run("steps", test.by_steps)
                test.refuse(dict.fromkeys(Freedom, CPU_UNKNOWN))
            else:
                if by_name:
                    test.refuse(structure.refused(self.vllm_config, self.model_runner.get_model()))
                test.run("products", test.by_products)
                test.run("steps", test.by_steps)
                self.test_scores(test)
                self.test_mixed(test)
        torch.accelerator.empty_cache()
        return {"refused": test.refused, "evidence": asdict(test.evidence())}

    def test_scores(self, test: FreedomTest) -> None:
        """Test `scores` if it is wanted. A prefill node draws nothing, so it is not."""

    def test_mixed(self, test: FreedomTest) -> None:
        """Test `mixed` if it is wanted. No step of a prefill node has rows, so it is not."""

    @property
    def chunk_size(self) -> int:
        """The most tokens of one prompt in a step, by the contract."""
        return int(self.vllm_config.scheduler_config.long_prefill_token_threshold or self.budget)

    @property
    def lengths(self) -> list[int]:
        """The lengths of all captured graphs, ascending."""
        return sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or [])

    @property
    def buckets(self) -> list[int]:
        """The lengths of steps that have a graph by the contract, ascending."""
        return [size for size in self.lengths if size <= self.chunk_size]

    @property
    def long_steps(self) -> list[int]:
        """The lengths above a chunk that have a graph, too, ascending (prefill_node/engine.py: `long_steps`)."""
        longest = max([self.chunk_size, *self.row_lengths])
        return [size for size in self.lengths if size > longest]

    @property
    def budget(self) -> int:
        """The most prompt tokens of a step."""
        return step_tokens(self.vllm_config.scheduler_config)

    @property
    def places(self) -> int:
        """The most prompts of a step."""
        return int(self.vllm_config.scheduler_config.max_num_seqs)

    def limits(self, stepper: Stepper) -> Limits:
        """Return the sizes of this engine's steps, and the longest prompt that the test of freedoms has room for."""
        on_cpu = current_platform.is_cpu()
        longest = CPU_LONGEST if on_cpu else max(LONGEST, 2 * self.chunk_size + 100, self.budget)
        limits = Limits(
            chunk=self.chunk_size,
            budget=min(self.budget, max(CPU_BUDGET, self.chunk_size) if on_cpu else 2**31),
            sequences=self.places,
            longest=min(longest, stepper.max_model_len - 1),
            packs_contexts=structure.packs_contexts(self.vllm_config),
            buckets=(*self.buckets, *self.long_steps),
            scenes=CPU_SCENES if on_cpu else 2**20,
        )
        return within(limits, stepper.num_blocks - 1, stepper.block_size)


class FreedomTest:
    """The parts of the test of freedoms, what they refused, and what they did."""

    def __init__(self, worker: PrefillWorker, wanted: Sequence[str]) -> None:
        self.refused = dict.fromkeys(wanted, "")
        self._worker = worker
        self._stepper = Stepper(worker)
        self._counts: dict[str, int] = {}
        self._seconds: list[tuple[str, float]] = []
        self._versions = worker.versions()

    def run(self, name: str, part: Callable[[list[str]], None]) -> None:
        """Run a part of the test for the freedoms that are not refused yet; none: it is left out."""
        if left := [freedom for freedom, reason in self.refused.items() if not reason]:
            began = time.monotonic()
            part(left)
            self._seconds.append((name, round(time.monotonic() - began, 3)))

    def refuse(self, found: dict[Freedom, str]) -> None:
        """Refuse freedoms for these reasons, unless there is one already."""
        for freedom, reason in found.items():
            if freedom.value in self.refused:
                self.refused[freedom.value] = self.refused[freedom.value] or reason

    def by_products(self, left: list[str]) -> None:
        """Refuse all freedoms if cuBLASLt splits K, or if an algorithm gives rows other bits, at any number of rows.

        With MLA, refuse them also if a product by head gives rows other bits.
        """
        worker, reason = self._worker, ""
        scheduler = worker.vllm_config.scheduler_config
        try:
            heuristic = blas.Heuristic(ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"))
            self._versions.append(f"cuBLASLt {heuristic.version}")
            # A decode node's `lm_head` has multiples of 16 rows, and that of scores has `GPU_ROWS`.
            rows = max(-(-scheduler.max_num_seqs // 16) * 16, GPU_ROWS)
            model, tokens = worker.model_runner.get_model(), step_tokens(scheduler)
            products = blas.products(model, tokens, rows)
            with self._timed("heuristic"):
                found = blas.surveyed(heuristic, products)
            self._counts |= {"products": len(products), "algorithms": sum(map(len, found))}
            with self._timed("algorithms"):
                for product, algorithms in zip(products, found, strict=True):
                    blas.check(product, algorithms)
            if worker.model_config.use_mla:
                with self._timed("products by head"):
                    blas.check_by_head(model, tokens)
        except (blas.RefusedError, OSError) as error:
            reason = str(error)
        self.refused |= dict.fromkeys(left, self._stepper.agree(reason))

    def by_steps(self, left: list[str]) -> None:
        """Refuse `packed` and `chunks` if a whole step gives other bits than the contract's own form."""
        test = Freedoms(self._stepper, self._worker.limits(self._stepper), _sampling())
        self.refused |= test.refused([name for name in left if name in (Freedom.PACKED, Freedom.CHUNKS)])
        self._counts |= {"steps": test.steps, "comparisons": test.comparisons}

    def add(self, name: str, steps: int, comparisons: int, seconds: float) -> None:
        """Count what another part of the test has done."""
        self._counts["steps"] = self._counts.get("steps", 0) + steps
        self._counts["comparisons"] = self._counts.get("comparisons", 0) + comparisons
        self._seconds.append((name, round(seconds, 3)))

    def evidence(self) -> Evidence:
        return Evidence(**self._counts, versions=tuple(self._versions), seconds=tuple(self._seconds))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds.append((part, round(time.monotonic() - began, 3)))


def _sampling() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, detokenize=False)


@dataclass(slots=True)
class _Scored:
    """The scores of one prompt, as far as its chunks have been computed."""

    targets: torch.Tensor
    """[tokens] int64. The logits of the prompt's last tokens, as many as these, each score one."""
    num_prompt: int
    tops: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, params: SamplingParams | None, num_prompt: int, device: torch.device) -> _Scored | None:
        """Return the empty scores that a request asks for; None if it asks for none."""
        transfer = ((params and params.extra_args) or {}).get("kv_transfer_params") or {}
        if TARGETS_PARAM not in transfer:
            return None
        return cls(torch.tensor(transfer[TARGETS_PARAM], device=device), num_prompt)

    def add(
        self,
        scorer: Scorer,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        start: int,
    ) -> LogprobsTensors | None:
        """Score what a step has computed; return all scores with the prompt's last chunk.

        hidden: [tokens, hidden size], the hidden states of the prompt's tokens from `start` on. A step may also draw
        tokens after the prompt, which are not scored.
        """
        first = self.num_prompt - len(self.targets)
        begin, end = max(start, first), min(start + len(hidden), self.num_prompt)
        if begin >= end:
            return None
        tops, logprobs = scorer.score(
            compute_logits, hidden[begin - start : end - start], self.targets[begin - first : end - first]
        )
        self.tops.append(tops)
        self.logprobs.append(logprobs)
        if end < self.num_prompt:
            return None
        return LogprobsTensors(torch.cat(self.tops), torch.cat(self.logprobs), tops.new_empty(0))


def score_in_steps_v1(runner: Any, scorer: Scorer) -> None:
    """Let the V1 runner's steps score prompts with `scorer`, in place of `_get_prompt_logprobs_dict`
    (v1/worker/gpu_model_runner.py), which computes what requests ask vLLM for; ours ask for nothing."""

    def scores(hidden: torch.Tensor, counts: dict[str, int]) -> dict[str, LogprobsTensors]:
        found = {}
        for name, count in counts.items():
            request = runner.requests[name]
            # The state of a request is dropped with it, so an aborted one leaves nothing.
            if not hasattr(request, "corun_scored"):
                request.corun_scored = _Scored.of(request.sampling_params, request.num_prompt_tokens, hidden.device)
            if request.corun_scored is None:
                continue
            at = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
            rows = hidden[at : at + count]
            done = request.corun_scored.add(scorer, runner.model.compute_logits, rows, request.num_computed_tokens)
            if done is not None:
                found[name] = done
        return found

    runner._get_prompt_logprobs_dict = scores


def score_in_steps_v2(runner: Any, scorer: Scorer) -> None:
    """Let the V2 runner's steps score prompts with `scorer` (v1/worker/gpu/model_runner.py)."""
    runner.prompt_logprobs_worker = PromptScorerV2(scorer, runner.device, runner.req_states.prompt_len.np)


class PromptScorerV2:
    """Stands in for vLLM's `PromptLogprobsWorker` (v1/worker/gpu/sample/prompt_logprob.py), with its methods."""

    def __init__(self, scorer: Scorer, device: torch.device, prompt_lengths: Any) -> None:
        """Create it. prompt_lengths: of the running requests, by place in the runner's state."""
        self._scorer = scorer
        self._device = device
        self._prompt_lengths = prompt_lengths
        self._scored: dict[str, _Scored] = {}

    def add_request(self, name: str, place: int, params: SamplingParams) -> None:
        scored = _Scored.of(params, int(self._prompt_lengths[place]), self._device)
        if scored is not None:
            self._scored[name] = scored

    def remove_request(self, name: str) -> None:
        self._scored.pop(name, None)

    def compute_prompt_logprobs(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, batch: Any, *_: Any
    ) -> dict[str, LogprobsTensors]:
        """Return the scores of the prompts that end with this step."""
        found = {}
        for i, name in enumerate(batch.req_ids if self._scored else ()):
            if (scored := self._scored.get(name)) is None:
                continue
            rows = hidden[int(batch.query_start_loc_np[i]) : int(batch.query_start_loc_np[i + 1])]
            done = scored.add(self._scorer, compute_logits, rows, int(batch.num_computed_prefill_tokens_np[i]))
            if done is not None:
                found[name] = done
        return found
