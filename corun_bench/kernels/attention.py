"""Attention of a decode step over a paged KV cache, with and without split-KV, called as vLLM's backends call it.

GPU: FlashAttention (vllm/v1/attention/backends/flash_attn.py); CPU: vLLM's own kernel (cpu_attn.py). A row of a batch
is a request: its query, its length and its blocks move together with it. A step computes the schedule once for all its
layers; the schedule is therefore part of the inputs and is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from corun_bench.kernels.ops import Kernel, Place
from corun_bench.kernels.plan import Task

_GPU_BLOCK, _CPU_BLOCK = 16, 128  # Tokens per block: vLLM's defaults.
# vllm/config/attention.py: flash_attn_max_num_splits_for_cuda_graph, the limit of stock vLLM's decode graphs.
_STOCK_SPLITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """A decode step's inputs."""

    queries: torch.Tensor
    """The queries, [rows, heads, head size]."""
    lengths: torch.Tensor
    """The number of tokens that each row reads, [rows]."""
    blocks: torch.Tensor
    """The block table, [rows, blocks of the longest context]."""
    starts: torch.Tensor
    """The index at which each query begins, [rows + 1]."""
    longest: int


class _Pool:
    """Random requests with lengths from half of the longest context to all of it.

    Row -1 is the idle row: it reads one token of block 0.
    """

    def __init__(self, task: Task, place: Place, pool: int, block: int) -> None:
        heads, _, head_dim, context = task.shape
        device, width = place.device, -(-context // block)
        chance = torch.Generator().manual_seed(place.seed)
        lengths = torch.randint(context // 2, context + 1, (pool,), generator=chance, dtype=torch.int32)
        blocks = torch.randperm(pool * width, generator=chance, dtype=torch.int32) + 1
        self.queries = place.normal(pool + 1, heads, head_dim, dtype=getattr(torch, task.dtype))
        self.lengths = torch.cat([lengths, lengths.new_ones(1)]).to(device)
        self.blocks = torch.cat([blocks.view(pool, width), blocks.new_zeros(1, width)]).to(device)
        self.num_blocks = pool * width + 1

    def batch(self, rows: Sequence[int]) -> _Batch:
        index = torch.tensor(rows, device=self.queries.device)
        lengths = self.lengths[index]
        return _Batch(
            queries=self.queries[index],
            lengths=lengths,
            blocks=self.blocks[index],
            starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=index.device),
            longest=int(lengths.max()),
        )


def build(task: Task, place: Place, pool: int) -> Kernel:
    """Return the decode attention of a task, with `pool` different requests."""
    return (_on_cpu if place.device.type == "cpu" else _on_gpu)(task, place, pool)


def _on_gpu(task: Task, place: Place, pool: int) -> Kernel:
    utils = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    _, kv_heads, head_dim, context = task.shape
    requests = _Pool(task, place, pool, _GPU_BLOCK)
    keys, values = _gpu_cache(requests.num_blocks, kv_heads, head_dim, task, place)
    version = utils.get_flash_attn_version(head_size=head_dim)
    # Batch-invariant mode uses no schedule made in advance, and only FlashAttention 3 can use one.
    ahead = version == 3 and task.variant != "bi"
    splits = 1 if task.variant != "std" else _STOCK_SPLITS if ahead else 0

    def prepare(rows: Sequence[int]) -> Callable[[], torch.Tensor]:
        batch = requests.batch(rows)
        longest = context if task.places else batch.longest
        schedule = _schedule(utils, batch, task, longest, splits) if ahead else None
        output = torch.empty_like(batch.queries)

        def launch() -> torch.Tensor:
            utils.flash_attn_varlen_func(
                q=batch.queries,
                k=keys,
                v=values,
                out=output,
                cu_seqlens_q=batch.starts,
                max_seqlen_q=1,
                seqused_k=batch.lengths,
                max_seqlen_k=longest,
                softmax_scale=head_dim**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=batch.blocks,
                scheduler_metadata=schedule,
                fa_version=version,
                num_splits=splits,
            )
            return output

        return launch

    policy = f"at most {splits} splits" if splits > 1 else "one split" if splits else "splits by its heuristic"
    return Kernel(implementation=f"FlashAttention {version}, {policy}", prepare=prepare)


def _schedule(utils: Any, batch: _Batch, task: Task, longest: int, splits: int) -> Any:
    heads, kv_heads, head_dim, _ = task.shape
    return utils.get_scheduler_metadata(
        batch_size=len(batch.queries),
        max_seqlen_q=1,
        max_seqlen_k=longest,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        headdim=head_dim,
        cache_seqlens=batch.lengths,
        qkv_dtype=batch.queries.dtype,
        cu_seqlens_q=batch.starts,
        page_size=_GPU_BLOCK,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )


def _gpu_cache(num_blocks: int, kv_heads: int, head_dim: int, task: Task, place: Place) -> tuple[Any, Any]:
    """Return keys and values, [blocks, block, KV heads, head size] each, side by side in memory as in vLLM's cache."""
    canonical = importlib.import_module("vllm.utils.torch_utils").canonicalize_singleton_dim_strides
    cache = place.normal(num_blocks, _GPU_BLOCK, kv_heads, 2 * head_dim, dtype=getattr(torch, task.dtype))
    keys, values = cache.split(head_dim, dim=-1)
    return canonical(keys), canonical(values)


def _on_cpu(task: Task, place: Place, pool: int) -> Kernel:
    ops = importlib.import_module("vllm._custom_ops")
    heads, kv_heads, head_dim, _ = task.shape
    dtype: torch.dtype = getattr(torch, task.dtype)
    isa = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa(dtype, _CPU_BLOCK, head_dim)
    requests = _Pool(task, place, pool, _CPU_BLOCK)
    keys, values = _cpu_cache(ops, isa, requests.num_blocks, kv_heads, head_dim, dtype, place)
    split = task.variant == "std"  # VLLM_CPU_ATTN_SPLIT_KV

    def prepare(rows: Sequence[int]) -> Callable[[], torch.Tensor]:
        batch = requests.batch(rows)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(rows),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            seq_lens=batch.lengths,
            dtype=dtype,
            query_start_loc=batch.starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=split,
        )
        output = torch.empty_like(batch.queries)

        def launch() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(
                query=batch.queries,
                key_cache=keys,
                value_cache=values,
                output=output,
                query_start_loc=batch.starts,
                seq_lens=batch.lengths,
                scale=head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=batch.blocks,
                softcap=0,
                scheduler_metadata=schedule,
                s_aux=None,
            )
            return output

        return launch

    policy = "with" if split else "without"
    return Kernel(implementation=f"vLLM's attention for CPUs ({isa}) {policy} split-KV", prepare=prepare)


def _cpu_cache(
    ops: Any, isa: str, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the layout of the instruction set, written by vLLM."""
    cache = torch.zeros(num_blocks, kv_heads, 2 * _CPU_BLOCK, head_dim, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    for block in range(num_blocks):
        own = Place(device=place.device, seed=place.seed + block)
        both = own.normal(2, _CPU_BLOCK, kv_heads, head_dim, dtype=dtype)
        slots = torch.arange(block * _CPU_BLOCK, (block + 1) * _CPU_BLOCK)
        ops.cpu_attn_reshape_and_cache(both[0], both[1], keys, values, slots, isa)
    return keys, values
