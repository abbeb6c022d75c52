"""The attention of a decode step over a paged KV cache, called as vLLM's backends call it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from corun_bench.kernels.functions import Kernel, Place
from corun_bench.kernels.invariance import Launch
from corun_bench.kernels.plan import Task

_GPU_BLOCK, _CPU_BLOCK = 16, 128  # Tokens per block: vLLM's defaults.
# vllm/config/attention.py: flash_attn_max_num_splits_for_cuda_graph, the limit of stock vLLM's decode graphs.
_STOCK_SPLITS = 32

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Launch]
"""Makes the launch of a decode step from its queries [rows, heads, head size], the number of tokens that each row reads
[rows], the block table [rows, blocks of the longest context], and the index at which each query begins [rows + 1]."""


def attention(task: Task, place: Place, pool: int) -> Kernel:
    """Return the attention of a decode step over a paged KV cache, called as vLLM's backends call it.

    A row of a batch is a request: its query, its length and its blocks move together with it. Lengths are from half of
    the longest context to all of it; the idle row reads one token of block 0. A step computes the schedule once for all
    its layers; the schedule is therefore part of the inputs and is not timed.
    """
    heads, _, head_dim, context = task.shape
    on_cpu = place.device.type == "cpu"
    width = -(-context // (_CPU_BLOCK if on_cpu else _GPU_BLOCK))
    chance = torch.Generator().manual_seed(place.seed)
    drawn = torch.randint(context // 2, context + 1, (pool,), generator=chance, dtype=torch.int32)
    shuffled = torch.randperm(pool * width, generator=chance, dtype=torch.int32) + 1
    queries = place.normal(pool + 1, heads, head_dim, dtype=getattr(torch, task.dtype))
    lengths = torch.cat([drawn, drawn.new_ones(1)]).to(place.device)
    blocks = torch.cat([shuffled.view(pool, width), shuffled.new_zeros(1, width)]).to(place.device)
    name, attend = (_cpu_attention if on_cpu else flash_attention)(task, place, pool * width + 1)

    def prepare(rows: Sequence[int]) -> Launch:
        index = torch.tensor(rows, device=place.device)
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=place.device)
        return attend(queries[index], lengths[index], blocks[index], starts)

    return name, prepare


def flash_attention(task: Task, place: Place, num_blocks: int) -> tuple[str, Attend]:
    """Return FlashAttention on a GPU (vllm/v1/attention/backends/flash_attn.py)."""
    utils = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    canonical = importlib.import_module("vllm.utils.torch_utils").canonicalize_singleton_dim_strides
    heads, kv_heads, head_dim, context = task.shape
    # [blocks, block, KV heads, head size] each, side by side in memory as in vLLM's cache.
    cache = place.normal(num_blocks, _GPU_BLOCK, kv_heads, 2 * head_dim, dtype=getattr(torch, task.dtype))
    keys, values = map(canonical, cache.split(head_dim, dim=-1))
    version = utils.get_flash_attn_version(head_size=head_dim)
    # Batch-invariant mode uses no schedule made in advance, and only FlashAttention 3 can use one.
    ahead = version == 3 and task.variant != "bi"
    splits = 1 if task.variant != "std" else _STOCK_SPLITS if ahead else 0

    window = (-1, -1)
    model = {"num_heads_q": heads, "num_heads_kv": kv_heads, "headdim": head_dim, "page_size": _GPU_BLOCK}

    def attend(queries: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor) -> Launch:
        longest = context if task.places else int(lengths.max())
        batch = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "max_seqlen_k": longest}
        batch |= {"causal": True, "num_splits": splits}
        schedule = None
        if ahead:
            schedule = utils.get_scheduler_metadata(
                **model,
                **batch,
                batch_size=len(queries),
                cache_seqlens=lengths,
                qkv_dtype=queries.dtype,
                window_size=window,
            )
        tensors = {"q": queries, "k": keys, "v": values, "out": torch.empty_like(queries), "block_table": blocks}
        tensors |= {"seqused_k": lengths, "scheduler_metadata": schedule}

        def launch() -> torch.Tensor:
            utils.flash_attn_varlen_func(
                **tensors, **batch, softmax_scale=head_dim**-0.5, window_size=list(window), fa_version=version
            )
            return tensors["out"]

        return launch

    policy = f"at most {splits} splits" if splits > 1 else "one split" if splits else "splits by its heuristic"
    return f"FlashAttention {version}, {policy}", attend


def _cpu_attention(task: Task, place: Place, num_blocks: int) -> tuple[str, Attend]:
    """Return vLLM's own kernel for CPUs (cpu_attn.py)."""
    ops = importlib.import_module("vllm._custom_ops")
    heads, kv_heads, head_dim, _ = task.shape
    dtype: torch.dtype = getattr(torch, task.dtype)
    isa = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa(dtype, _CPU_BLOCK, head_dim)
    # The layout is that of the instruction set, so vLLM writes the cache.
    cache = torch.zeros(num_blocks, kv_heads, 2 * _CPU_BLOCK, head_dim, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    for block in range(num_blocks):
        own = Place(device=place.device, seed=place.seed + block)
        both = own.normal(2, _CPU_BLOCK, kv_heads, head_dim, dtype=dtype)
        slots = torch.arange(block * _CPU_BLOCK, (block + 1) * _CPU_BLOCK)
        ops.cpu_attn_reshape_and_cache(both[0], both[1], keys, values, slots, isa)
    split = task.variant == "std"  # VLLM_CPU_ATTN_SPLIT_KV

    model = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "isa": isa}
    plain = {"alibi_slopes": None, "softcap": 0, "s_aux": None, "sliding_window": -1, "scale": head_dim**-0.5}

    def attend(queries: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor) -> Launch:
        batch = {"seq_lens": lengths, "query_start_loc": starts, "causal": True}
        schedule = ops.cpu_attn_get_scheduler_metadata(
            **model, **batch, num_reqs=len(queries), sliding_window_size=-1, enable_kv_split=split
        )
        tensors = {"query": queries, "key_cache": keys, "value_cache": values, "output": torch.empty_like(queries)}
        tensors |= {"block_table": blocks, "scheduler_metadata": schedule}

        def launch() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(**tensors, **batch, **plain)
            return tensors["output"]

        return launch

    return f"vLLM's attention for CPUs ({isa}) {'with' if split else 'without'} split-KV", attend
