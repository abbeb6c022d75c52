"""Workers of which one rule of the contract can be broken at a time, and mended again. For tests only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

from corun.node.kv.stamps import DIGEST
from corun.node.vllm import pin, selftest
from decode_node import sampling
from decode_node import worker as decode
from prefill_node import certify as prefill
from prefill_node.scheduler import PrefillScheduler
from prefill_node.worker import PrefillWorker
from tests.e2e.breaking import ALLOW_SPLIT_K, BLIND

Break = Callable[[Any], Any]


class _SplitOn:
    """vLLM's `envs` with split-KV on, whatever the environment says."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs

    def __getattr__(self, name: str) -> Any:
        return True if name == "VLLM_CPU_ATTN_SPLIT_KV" else getattr(self._envs, name)


def split_kv(worker: Any) -> Any:
    from vllm.v1.attention.backends import cpu_attn

    return mock.patch.object(cpu_attn, "envs", _SplitOn(cpu_attn.envs))


def unpadded_body(worker: Any) -> Any:
    runner = worker.model_runner
    stock = type(runner)._determine_batch_execution_and_padding.__get__(runner)
    return mock.patch.object(runner, "_determine_batch_execution_and_padding", stock)


def eager_body(worker: Any) -> Any:
    """The V2 runner without its graph, on as many rows as there are requests."""
    from vllm.v1.worker.gpu import model_runner

    dispatch = model_runner.dispatch_cg_and_sync_dp

    def eager(*args: Any, **kwargs: Any) -> Any:
        return dispatch(*args, **{**kwargs, "need_eager": True})

    return mock.patch.object(model_runner, "dispatch_cg_and_sync_dp", eager)


def unpadded_lm_head(worker: Any) -> Any:
    """lm_head sees as many rows as there are requests; only its result is padded."""
    if not current_platform.is_cpu():
        columns = decode.columns
        return mock.patch.object(decode, "columns", lambda batch, rows: columns(batch, batch.num_reqs))
    model = worker.model_runner.model
    rows = worker.vllm_config.scheduler_config.max_num_seqs

    def padded_after(hidden: torch.Tensor) -> torch.Tensor:
        logits = type(model).compute_logits(model, hidden)
        return torch.nn.functional.pad(logits, (0, 0, 0, rows - len(logits)))

    return mock.patch.object(model, "compute_logits", padded_after)


def sampler_of_one_generator(worker: Any) -> Any:
    """vLLM's V1 sampler ignores every seed of a batch in which one row has none."""

    class StockSampler(Sampler):  # type: ignore[misc]
        def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            live = worker.model_runner.input_batch.num_reqs
            metadata = replace(sampling_metadata, max_num_logprobs=0)  # The trace needs the drawn token's.
            return super().forward(logits[:live], metadata, *args, **kwargs)

    return mock.patch.object(worker.model_runner, "sampler", StockSampler())


def neighbours_draw(worker: Any) -> Any:
    """Randomness that rows take from one stream, in turn."""
    generator = torch.Generator().manual_seed(1)

    def variate(seed: int, position: int) -> float:
        return float(torch.rand((), generator=generator))

    return mock.patch.object(sampling, "variate", variate)


Ran = tuple[selftest.TestSequence, selftest.Trace]
Run = Callable[..., Ran]


def _second_run(broken: Callable[[Run, Any, str, Any, Any], Ran]) -> Any:
    """Breaks only the second run of each prompt, so that it is compared with a whole one."""
    run = prefill.Bench.run
    seen: set[str] = set()

    def patched(bench: Any, name: str, prompt: Any, contents: Any = None) -> Ran:
        if contents is None or name not in seen:
            seen.add(name)
            return run(bench, name, prompt, contents)
        return broken(run, bench, name, prompt, contents)

    return mock.patch.object(prefill.Bench, "run", patched)


def batched_prefill(worker: Any) -> Any:
    """Another prompt shares the step, as under a scheduler without isolation."""

    def broken(run: Run, bench: Any, name: str, prompt: Any, contents: Any) -> Ran:
        stepper, count = bench._stepper, min(16, bench._chunk - len(prompt) % bench._chunk)
        step = stepper.step
        other = selftest.TestSequence(
            name="other",
            prompt=prompt[:1] * count,
            blocks=(stepper.num_blocks - 1,),
            computed=0,
            sampling=bench._sampling,
        )

        def crowded(tokens: Any, ended: Any = (), **others: Any) -> Any:
            room = sum(n for _, n in tokens) + count <= bench._chunk
            return step([*tokens, (other, count)] if room and not other.computed else tokens, ended, **others)

        with mock.patch.object(stepper, "step", crowded):
            return run(bench, name, prompt, contents)

    return _second_run(broken)


def moving_chunks(worker: Any) -> Any:
    """Chunk boundaries depend on something else than the prompt's own length."""

    def broken(run: Run, bench: Any, *args: Any) -> Ran:
        with mock.patch.object(bench, "_chunk", bench._chunk // 2):
            return run(bench, *args)

    return _second_run(broken)


class _Breakable:
    breaks: ClassVar[dict[str, Break]]

    def init_device(self) -> None:
        if ALLOW_SPLIT_K in os.environ:
            pin.GPU_SWITCHES.clear()
        super().init_device()  # type: ignore[misc]

    def rules(self) -> list[str]:
        return list(self.breaks)

    def certify_broken(self, rule: str) -> str:
        """The self-test's finding with this rule broken; with none for an empty name."""
        if not rule:
            return str(self.certify())  # type: ignore[attr-defined]
        with self.breaks[rule](self):
            return str(self.certify())  # type: ignore[attr-defined]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def overflow(self, zeroing: bool) -> None:
        """Leaves NaN in all KV, as a model that overflows would in its own; without `zeroing` it stays there."""
        runner = self.model_runner  # type: ignore[attr-defined]
        for cache in runner.kv_caches:
            cache.fill_(torch.nan)
        if not zeroing:
            runner._zero_block_ids = lambda blocks: None


class BreakableDecodeWorker(_Breakable, decode.FixedShapeWorker):
    breaks: ClassVar[dict[str, Break]] = (
        {
            "split-KV on": split_kv,
            "unpadded body": unpadded_body,
            "unpadded lm_head": unpadded_lm_head,
            "seeds ignored": sampler_of_one_generator,
            "randomness shared": neighbours_draw,
        }
        if current_platform.is_cpu()
        else {"unpadded body": eager_body, "unpadded lm_head": unpadded_lm_head}
    )


class BreakablePrefillWorker(_Breakable, PrefillWorker):
    breaks: ClassVar[dict[str, Break]] = {"batched prefill": batched_prefill, "moving chunks": moving_chunks}

    def digests(self, blocks: Sequence[int]) -> list[int]:
        """Return the digests that the node wrote for the contents of these blocks."""
        found: list[int] = get_kv_transfer_group().table.rows[list(blocks), DIGEST].tolist()
        return found


class BreakablePrefillScheduler(PrefillScheduler):
    """Its prefix cache tells the blocks of the scope `BLIND` apart by their place alone."""

    def add_request(self, request: Any) -> None:
        if BLIND in (request.cache_salt or ""):
            request.block_hashes = [f"{BLIND} {place}".encode() for place in range(len(request.block_hashes))]
        super().add_request(request)
