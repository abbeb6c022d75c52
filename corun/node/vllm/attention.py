"""How FlashAttention cuts the KV of a row into pieces that it sums apart (splits): fixed here, and read back.

By itself FlashAttention 3 looks at the whole batch to choose how many splits a row gets, so a row's bits depend on the
rows beside it. vLLM has a limit for captured graphs alone. This module makes vLLM's metadata builders keep the limit in
every step, and, for `own-length`, writes each row's number into the schedule that FlashAttention reads.

It runs in the engine's worker after the KV cache was made and before graphs are captured; a colocated node that cuts
rows also sets the limit before each step (`limit`). The builders serve steps in graphs and outside
(vllm/v1/worker/gpu/attn_utils.py: `build_attn_metadata`), so this is the one place to change. Must not know: roles, the
contract, gRPC.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from corun.node.vllm import pin

EVERY_STEP = 2**31
"""A number of tokens that no step has: vLLM keeps the limit on splits in all steps up to this size."""
ATTRIBUTES = ("max_num_splits", "use_full_cuda_graph", "max_cudagraph_size")
"""What decides the splits in both builders (flash_attn.py: `FlashAttentionMetadataBuilder.build`,
mla/flashattn_mla.py: `FlashAttnMLAMetadataBuilder._build_decode`)."""
LONG = 2**20
"""The tokens of a row that FlashAttention cuts by itself, whatever the device, beside rows of one token."""
PROBE_ROWS = 5
"""The rows of a small batch that is looked at, no multiple of four: schedules are padded to those."""
LAST_CUT = pin.PIECE_TOKENS * pin.SPLITS["own-length"]
EDGES = (1, pin.PIECE_TOKENS, pin.PIECE_TOKENS + 1, LAST_CUT, LAST_CUT + 1)
"""The tokens of rows on both sides of the first and the last edge of `own_length`."""


def own_length(lengths: torch.Tensor) -> torch.Tensor:
    """Return each row's number of splits, [rows] int32: a split for every 2048 tokens begun, at most 16.

    lengths: [rows] int32, the tokens that a decode row reads, its own included; an idle row has 0, and gets one split.
    """
    return torch.bucketize(lengths, _edges(lengths.device), out_int32=True)


@functools.cache
def _edges(device: torch.device) -> torch.Tensor:
    """Return [16] int32: -1, 2048, 4096, … A row has as many splits as there are edges below its number of tokens: one
    kernel counts them for all rows of a step."""
    edges = [-1, *range(pin.PIECE_TOKENS, LAST_CUT, pin.PIECE_TOKENS)]
    return torch.tensor(edges, dtype=torch.int32, device=device)


def builders_of(runner: Any) -> list[Any]:
    """Return all metadata builders of a V2 model runner (vllm/v1/worker/utils.py: `AttentionGroup`)."""
    return [builder for groups in runner.attn_groups for group in groups for builder in group.metadata_builders]


def fix(builders: Sequence[Any], most: int) -> str:
    """Make builders cut no row into more than `most` splits, a value of `pin.SPLITS`, and never by the batch.

    A limit that is not ours is left to vLLM; `policy` then says so.

    Returns:
        Why a builder cannot do it, in words; then the engine must not serve. Empty: all can.
    """
    if most not in pin.SPLIT_POLICY:
        return ""
    for builder in builders:
        if missing := _missing(builder):
            return f"unknown: {type(builder).__name__} has no {missing}"
        _limit(builder, most)
        if most > 1:
            if found := _other_layout(builder, most):
                return f"unknown: {found}"
            _cut_by_own_length(builder)
    return ""


def limit(builders: Sequence[Any], most: int) -> None:
    """Set the most splits of the next steps, in an engine whose steps of prompts cut nothing and whose others do."""
    for builder in builders:
        builder.max_num_splits = most


def _missing(builder: Any) -> str:
    """Return the first attribute that a builder lacks; empty if it has all of them."""
    for name in ATTRIBUTES:
        if not hasattr(builder, name):
            return name
    prompts = getattr(builder, "_prefill_backend", None)
    is_known = prompts is None or isinstance(getattr(prompts, "flash_attn_varlen_func", None), functools.partial)
    return "" if is_known else f"flash_attn_varlen_func for prompts, but {type(prompts).__name__}"


def _limit(builder: Any, most: int) -> None:
    """Set the limit for every step. A schedule is then kept in one buffer, as graphs need it."""
    builder.max_num_splits = most
    builder.use_full_cuda_graph = True
    builder.max_cudagraph_size = EVERY_STEP
    # Up to four values for each row, and a counter (hopper/flash_api.cpp: `mha_fwd_get_scheduler_metadata`).
    values = 1 + 4 * _rounded(builder.vllm_config.scheduler_config.max_num_seqs)
    builder.scheduler_metadata = torch.zeros(values, dtype=torch.int32, device=builder.device)
    if (prompts := getattr(builder, "_prefill_backend", None)) is not None:
        # MLA computes long chunks of prompts by a call of its own, which has no limit (mla/prefill/flash_attn.py).
        prompts.flash_attn_varlen_func = functools.partial(prompts.flash_attn_varlen_func, num_splits=1)


def _cut_by_own_length(builder: Any) -> None:
    """Write each row's number of splits into the schedule of every batch, on the stream, before anything reads it. With
    a limit of one split there are no such numbers."""
    build = builder.build

    def build_and_cut(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        if builder.max_num_splits > 1 and (rows := _rows(metadata)) is not None:
            _counts(rows).copy_(own_length(rows.seq_lens))
        return metadata

    builder.build = build_and_cut


def _rows(metadata: Any) -> Any:
    """Return the part of a batch's metadata that has its splits. MLA keeps it apart, and has None without such rows."""
    return getattr(metadata, "decode", metadata)


def _counts(rows: Any) -> torch.Tensor:
    """Return the view of a schedule that has the number of splits of each row, [rows] int32.

    FlashAttention 3 keeps {query tokens, splits, heads in L2 (causal only)}, each padded to a multiple of four rows,
    and a counter (hopper/flash_api.cpp). Rows are not sorted.
    """
    count = rows.seq_lens.shape[0]
    counts: torch.Tensor = rows.scheduler_metadata[_rounded(count) : _rounded(count) + count]
    return counts


def _rounded(rows: int) -> int:
    return -(-rows // 4) * 4


def _other_layout(builder: Any, most: int) -> str:
    """Return in words how the schedule differs from the one that `_counts` knows; empty if it does not.

    With more than one split allowed, the schedule must grow by one value a row. And of one long row among rows of one
    token, FlashAttention itself must cut the long one alone, at whatever place it is.
    """
    largest = builder.vllm_config.scheduler_config.max_num_seqs
    for count in sorted({min(PROBE_ROWS, largest), largest}):
        for place in (0, count - 1):
            sizes = []
            for builder.max_num_splits in (1, most):
                lengths = [LONG if index == place else 1 for index in range(count)]
                rows = _rows(builder.build(0, _batch(builder.device, [1] * count, lengths)))
                if rows.scheduler_metadata is None:
                    return "there is no schedule: it is not FlashAttention 3"
                sizes.append(rows.scheduler_metadata.numel())
            if sizes[1] - sizes[0] != _rounded(count):
                return f"the schedule of {count} rows has {sizes[1]} values, and {sizes[0]} without splits"
            found = _counts(rows).tolist()
            if [index for index, splits in enumerate(found) if splits != 1] != [place] or not 1 < found[place] <= most:
                return f"row {place} of {count} is long, but the schedule has {found} as numbers of splits"
    return ""


def policy(builders: Sequence[Any]) -> str:
    """Return in the contract's words how builders cut rows now: each builds the metadata of known batches.

    The batches are single decode rows, as many as there can be, and the longest chunk of a prompt, if the engine may
    have one under the limit that is set now (`limit`). What is not equal for all of them, or has no words in the
    contract, is said as it is.
    """
    found = {_policy_of(builder, *batch) for builder in builders for batch in _probes(builder)}
    found |= {"MLA's prompts by the batch" for builder in builders if not _cuts_no_prompts(builder)}
    return " and ".join(sorted(found)) or "unknown: there is no attention"


def _probes(builder: Any) -> list[tuple[list[int], list[int]]]:
    """Return batches as (query tokens, tokens that are read) of each row."""
    scheduler, transfer = builder.vllm_config.scheduler_config, builder.vllm_config.kv_transfer_config
    largest, longest = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if transfer is not None and (transfer.kv_role == "kv_consumer" or builder.max_num_splits != pin.SPLITS["none"]):
        longest = 0  # A decode engine computes no prompts, and a colocated node none while rows are cut.
    mixed = [EDGES[index % len(EDGES)] for index in range(largest)]
    batches = [*(([1], [length]) for length in EDGES), ([1] * largest, mixed)]
    return batches + ([([longest], [longest])] if longest > largest else [])


def _cuts_no_prompts(builder: Any) -> bool:
    prompts = getattr(builder, "_prefill_backend", None)
    return prompts is None or prompts.flash_attn_varlen_func.keywords.get("num_splits") == 1


def _policy_of(builder: Any, queries: list[int], lengths: list[int]) -> str:
    metadata = builder.build(0, _batch(builder.device, queries, lengths))
    rows = _rows(metadata)
    most = pin.SPLITS["none"] if rows is None else rows.max_num_splits
    if most == 1:
        return pin.SPLIT_POLICY[most]
    # Only decode rows may be cut.
    expected = own_length(rows.seq_lens) if max(queries) == 1 else torch.ones_like(rows.seq_lens)
    if most in pin.SPLIT_POLICY and rows.scheduler_metadata is not None and torch.equal(_counts(rows), expected):
        return pin.SPLIT_POLICY[most]
    return f"at most {most} splits by the batch" if most else "splits by the batch"


def _batch(device: torch.device, queries: Sequence[int], lengths: Sequence[int]) -> CommonAttentionMetadata:
    """Return what a builder is given for a batch of rows. It computes nothing, and no KV is read."""
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    used = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=used.to(device),
        seq_lens_cpu_upper_bound=used,
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros((len(queries), 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=device),
        is_prefilling=torch.tensor([query == length for query, length in zip(queries, lengths, strict=True)]),
    )
