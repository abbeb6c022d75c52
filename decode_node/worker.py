"""The vLLM worker of a decode node: body, lm_head and sampler of a step run on fixed numbers of rows, used or idle.

Owns: how a step of n requests is padded, on vLLM's V1 runner (CPU) and V2 runner (GPU), which numbers of rows may run,
and whose log probabilities a step returns: ours, for every request, so that requests ask vLLM for none. No other module
decides this. Must not know: gRPC, leases, NIXL.

The hooks are instance attributes. They are set after vLLM's own warm-up, which runs other shapes on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE as LM_HEAD_PADS_TO
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput as SamplerOutputV2

from corun.node.certificate import VOID, Evidence
from corun.node.kv.handle import TOPS_PARAM
from corun.node.vllm import graphs, pin
from corun.node.vllm.logprobs import alternatives, log_probabilities
from corun.node.vllm.selftest import Stepper
from corun.node.vllm.worker import NodeWorker
from decode_node.certify import Certification
from decode_node.masks import mask_rows
from decode_node.sampling import GPU_SAMPLER_VERSION, IDLE, SAMPLER_VERSION, Draw, sample
from decode_node.slots import rows_of_step, smaller_than

RowsOf = Callable[[int], int]
"""A function from the number of a step's live requests to its number of rows."""
log = init_logger(f"vllm.{__name__}")  # In engine processes only vLLM's own loggers print.


class FixedShapeWorker(NodeWorker):
    """Runs decode steps with numbers of rows that do not change any bit (paper, Sections IV-B and IV-C).

    In the benchmark it also runs prefill, as in the paper, in steps of their own length. Prefix caching must be off
    there: otherwise a prompt could begin with KV that decode wrote.
    """

    sizes: Sequence[int]
    """The numbers of rows that steps may have, ascending."""
    _compiled: Future[None]
    """On a GPU: done when Triton has compiled what `compile_draws` names."""

    def load_model(self, **kwargs: Any) -> None:
        if not current_platform.is_cpu():
            config = self.model_config
            self._compiled = ThreadPoolExecutor(1).submit(
                compile_draws, config.get_vocab_size(), config.head_dtype, self.device
            )
        super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        if not current_platform.is_cpu():
            self._compiled.result()  # It lasts no longer than if it had begun here.
        times = super().compile_or_warm_up_model()
        fix_shapes = fix_shapes_v1 if current_platform.is_cpu() else fix_shapes_v2
        fix_shapes(self.model_runner, self.rows_of)
        self.use(self.slots)
        return times

    def rows_of(self, live: int) -> int:
        """Return the number of rows of a step with `live` requests."""
        return rows_of_step(live, self.sizes)

    def graph_of_rows(self, live: int) -> int:
        """Return the number of rows of the graph that a decode step of `live` requests runs; 0: it runs none."""
        return rows_of_step(live, self.sizes) if live <= self.sizes[-1] else 0

    @property
    def slots(self) -> int:
        return int(self.vllm_config.scheduler_config.max_num_seqs)

    @property
    def piece(self) -> int:
        """The tokens of the pieces that attention cuts a sequence into (`decode_split`); 0: it cuts none."""
        most = self.vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph
        return pin.PIECE_TOKENS if most == pin.SPLITS["own-length"] and not current_platform.is_cpu() else 0

    def use(self, *sizes: int) -> None:
        """Use these numbers of rows, ascending, from now on; on a GPU, each needs a captured graph.

        The benchmark's padding sweep calls it, too, even if bits change.
        """
        self.sizes = sizes
        if not current_platform.is_cpu():
            graphs.choose(self.model_runner.cudagraph_manager, rows_of=self.graph_of_rows)

    def certify(self) -> str:
        """Return the first difference that the self-test finds (decode_node/certify.py); empty if there is none."""
        self.use(self.slots)
        with torch.inference_mode():
            finding = Certification(Stepper(self), self.slots, sampling_style, self.piece).check(self.slots)
        torch.accelerator.empty_cache()
        return finding

    def certify_freedoms(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Return which smaller numbers of rows give the bits of a step of all slots, on this model and device.

        Returns:
            "sizes": these numbers, ascending; "refused": why there is none, by the freedom's name, empty if there are
            some; "evidence": what was done, in numbers.
        """
        began = time.monotonic()
        self.use(self.slots)
        with torch.inference_mode():
            test = Certification(Stepper(self), self.slots, sampling_style, self.piece)
            findings = {rows: self._finding(test, rows) for rows in smaller_than(self.slots)}
            sizes = [rows for rows, finding in findings.items() if not finding]
            reason = "" if sizes else next(iter(findings.values()), f"no step is smaller than {self.slots} rows")
            # A size that differed has shown that the test notices what differs.
            if sizes and len(sizes) == len(findings) and not self._control(test):
                sizes, reason = [], VOID
        self.use(self.slots)
        torch.accelerator.empty_cache()
        seconds = (("steps", round(time.monotonic() - began, 3)),)
        evidence = Evidence(
            steps=test.steps, comparisons=test.comparisons, versions=tuple(self.versions()), seconds=seconds
        )
        return {"sizes": sizes, "refused": dict.fromkeys(wanted, reason), "evidence": asdict(evidence)}

    def _finding(self, test: Certification, rows: int) -> str:
        """Return what differs in steps of `rows` rows; empty if nothing does."""
        self.use(rows)
        finding = test.check(rows)
        if finding:
            log.info("steps of %d rows are not used: %s", rows, finding)
        return f"steps of {rows} rows: {finding}" if finding else ""

    def _control(self, test: Certification) -> str:
        """Return what differs with other splits in attention."""
        self.use(self.slots)
        return test.control()

    def use_rows(self, certified: Sequence[int]) -> None:
        """Allow the smaller steps that all ranks have certified."""
        self.use(*certified, self.slots)

    def observe(self) -> dict[str, Any]:
        sampler = SAMPLER_VERSION if current_platform.is_cpu() else GPU_SAMPLER_VERSION
        return {**super().observe(), "sampler": sampler, "slots": self.slots}


def sampling_style(number: int) -> SamplingParams:
    """Return one of the sampling styles of a test batch: greedy or drawn, filtered or penalised.

    vLLM compiles its filter by whether any row has top-k and whether any row has top-p
    (v1/sample/ops/topk_topp_triton.py). The first two styles run under one kernel each when alone, and under a third
    one when they are in one batch. They come first, so that nodes with few slots test them, too.
    """
    styles: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    ]
    style = styles[number % len(styles)]
    return SamplingParams(seed=number, max_tokens=64, ignore_eos=True, detokenize=False, **style)


def compile_draws(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Let Triton compile what draws and scores, but for what vLLM's warm-up runs: its filters, and our kernels.

    Triton compiles a kernel where it is first called, one after the other, and these take 8 s. In a thread they take
    none of a start's time, since weights are read and torch compiles the model meanwhile. Logits have the type, the
    alignment and a number of rows of those of a step (`sampled_rows`).
    """
    from corun.node.vllm import logprob_kernels as kernels  # noqa: PLC0415  # There may be no Triton without a GPU.

    torch.accelerator.set_device_index(device)
    rows, width = sampled_rows(1), -(-vocab // LM_HEAD_PADS_TO) * LM_HEAD_PADS_TO
    logits = torch.zeros((rows, width), dtype=dtype, device=device)[:, :vocab]
    k = torch.ones(rows, dtype=torch.int32, device=device)
    p = torch.ones(rows, dtype=torch.float32, device=device)
    for filters in ((None, p), (k, None), (k, p)):
        apply_top_k_top_p(logits, *filters)
    kernels.log_probabilities(logits, torch.zeros(rows, dtype=torch.int64, device=device))


def fix_shapes_v1(runner: Any, rows_of: RowsOf) -> None:
    """Pad the V1 runner, which has no graphs on CPU (vllm/v1/worker/gpu_model_runner.py).

    The body gets its number of rows from `_determine_batch_execution_and_padding`. lm_head and sampler run outside it,
    on as many rows as `compute_logits` is given, so they are padded separately.
    """
    decide = runner._determine_batch_execution_and_padding
    compute_logits = runner.model.compute_logits

    def padded_body(*args: Any, **kwargs: Any) -> Any:
        mode, descriptor, *rest = decide(*args, **kwargs)
        return (mode, replace(descriptor, num_tokens=rows_of(descriptor.num_tokens)), *rest)

    def padded_lm_head(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map [n <= rows, hidden] to [rows, vocab]."""
        padded = hidden.new_zeros((rows_of(hidden.shape[0]), hidden.shape[-1]))
        padded[: hidden.shape[0]] = hidden
        return compute_logits(padded, *args, **kwargs)

    runner._determine_batch_execution_and_padding = padded_body

    def sample_unmasked(grammar_output: Any) -> Any:
        """Leave the masks to our sampler: vLLM would apply them to the logits that log probabilities are made of."""
        runner.sampler.grammar_output = grammar_output
        return sample_tokens(None)

    sample_tokens = runner.sample_tokens
    runner.sample_tokens = sample_unmasked
    runner.model.compute_logits = padded_lm_head
    runner.sampler = FixedRowSampler(runner)


class FixedRowSampler(Sampler):  # type: ignore[misc]
    """The V1 sampler on a fixed number of rows, with request-bound randomness.

    vLLM's own V1 sampler draws from one generator per request, and ignores all of them when any row of the batch has no
    seed (vllm/v1/sample/ops/topk_topp_sampler.py). This one draws R(seed, position).
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self.grammar_output: Any = None
        """The masks of the step's constrained rows; None if it has none."""

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *_: Any, **__: Any) -> SamplerOutput:
        """Map [rows, vocab] logits to the live requests' tokens and raw log probabilities.

        An invalid token gets a log probability that is not finite. That ends the token's request where it is read
        (decode_node/engine.py), and affects neither this engine nor another request.
        """
        live = self._runner.input_batch.num_reqs
        processed = logits.to(torch.float32, copy=True)
        if self.grammar_output is not None:
            mask_rows(processed, self._runner.input_batch.req_ids, self.grammar_output)
        # Biases and penalties work on one element at a time, so the number of rows cannot change a bit there.
        processed[:live] = self.apply_logits_processors(processed[:live], sampling_metadata, False)
        tokens, sound = sample(processed, self._draws(logits.shape[0]))
        picked = log_probabilities(logits, tokens).masked_fill(~sound, torch.nan)[:live]
        counts = [
            top_logprobs(self._runner.requests[name].sampling_params) for name in self._runner.input_batch.req_ids
        ]
        tops = alternatives(logits, counts, log_probabilities) if any(counts) else None
        tokens = tokens[:live].to(torch.int32).unsqueeze(-1)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=as_tensors(picked, tops))

    def _draws(self, rows: int) -> list[Draw]:
        draws = []
        for name in self._runner.input_batch.req_ids:
            state = self._runner.requests[name]
            params, position = state.sampling_params, len(state.output_token_ids)
            top_k = max(params.top_k, 0)
            draws.append(Draw(params.temperature, top_k, params.top_p, params.min_p, params.seed, position))
        return draws + [IDLE] * (rows - len(draws))


def as_tensors(logprobs: torch.Tensor, tops: tuple[torch.Tensor, torch.Tensor] | None = None) -> LogprobsTensors:
    """Put the [live] log probabilities of drawn tokens where vLLM's runners take them from.

    tops: the rows' `alternatives`. Their log probabilities come behind that of the drawn token, and their ids in place
    of vLLM's. None: no row asks for any, and the ids are empty. Nobody reads ranks.
    """
    nothing, drawn = logprobs.new_empty(0), logprobs.unsqueeze(-1)
    if tops is None:
        return LogprobsTensors(nothing, drawn, nothing)
    tokens, values = (each[: len(drawn)] for each in tops)
    return LogprobsTensors(tokens, torch.cat((drawn, values), dim=-1), nothing)


def top_logprobs(params: SamplingParams) -> int:
    """Return how many alternatives a request asks for beside each of its tokens."""
    transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
    return int(transfer.get(TOPS_PARAM, 0))


def fix_shapes_v2(runner: Any, rows_of: RowsOf) -> None:
    """Pad the V2 runner's lm_head and sampler; its captured graph pads the body (vllm/v1/worker/gpu/model_runner.py).

    Log probabilities are computed here for every row, whatever the request asks for.
    """
    from corun.node.vllm import logprob_kernels as kernels  # noqa: PLC0415  # There may be no Triton without a GPU.

    sampler = runner.sampler
    changes = np.zeros(runner.max_num_reqs, dtype=bool)  # by the request's place in the runner's state
    counts_of_tops = np.zeros(runner.max_num_reqs, dtype=np.int32)  # by the same place
    add_request = sampler.add_request

    def noted_request(place: int, prompt_length: int, params: Any) -> None:
        changes[place] = changes_logits(params)
        counts_of_tops[place] = top_logprobs(params)
        add_request(place, prompt_length, params)

    def sample_fixed_rows(hidden: torch.Tensor, batch: Any, grammar_output: Any) -> tuple[Any, Any, Any]:
        live, places = batch.num_reqs, batch.idx_mapping_np
        at, mapping, local = columns(batch, sampled_rows(rows_of(live)))
        positions, inputs = batch.positions[at], batch.input_ids[at]

        def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if grammar_output is not None:  # Only live rows are masked. What the others draw is cut off.
                constrained = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
                runner.structured_outputs_worker.apply_grammar_bitmask(logits, batch, *constrained)
            drawn: tuple[torch.Tensor, torch.Tensor] = sampler.sample(logits, mapping, places, positions, inputs, local)
            return drawn

        logits = runner.model.compute_logits(hidden[at])
        is_changed = grammar_output is not None or bool(changes[places].any())
        tokens, logprobs = kernels.draw_and_score(draw, logits, changes=is_changed)
        wanted = counts_of_tops[places]
        tops = alternatives(logits, wanted.tolist(), kernels.log_probabilities) if wanted.any() else None
        ones, prompts = batch.seq_lens.new_ones(live), sampler.req_states.prefill_len.gpu
        counts = get_num_sampled_and_rejected(ones, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prompts)
        return (SamplerOutputV2(tokens[:live].unsqueeze(-1), as_tensors(logprobs[:live], tops), None, *counts), *counts)

    sampler.add_request = noted_request
    sampler.returns_logprobs = lambda places: False  # Otherwise vLLM would clone all logits.
    runner.sample = sample_fixed_rows


def changes_logits(params: SamplingParams) -> bool:
    """Return whether vLLM's V2 sampler may change the logits of such a request (vllm/v1/worker/gpu/sample/sampler.py:
    `apply_sampling_params`). It applies a temperature of 1 to none, and 0 stands for greedy."""
    filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    lists = params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens
    return bool(params.temperature not in (0, 1) or filters or penalties or lists)


def sampled_rows(rows: int) -> int:
    """Return the number of rows of lm_head and sampler in a GPU's step of `rows` rows: the next multiple of 16.

    vLLM filters by top-k and top-p with another algorithm below 8 rows (vllm/v1/sample/ops/topk_topp_sampler.py:
    `apply_top_k_top_p`), and Triton compiles another kernel where the number of rows is no multiple of 16.
    """
    return -(-rows // 16) * 16


def columns(batch: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `logits_indices`, `expanded_idx_mapping` and `expanded_local_pos` of a V2 `InputBatch` for `rows` rows.

    Rows beyond the live requests repeat these in turn. Sampling only reads their state, and the results of these rows
    are cut off.
    """
    found = batch.logits_indices, batch.expanded_idx_mapping, batch.expanded_local_pos
    if rows == batch.num_reqs:
        return found
    repeated = torch.arange(rows, device=batch.logits_indices.device) % batch.num_reqs
    at, mapping, local = (column[repeated] for column in found)
    return at, mapping, local
