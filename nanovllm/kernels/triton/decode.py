"""Paged attention of one query per sequence, each context shared by several programs (split K/V).

A program takes one split of one sequence's context for one key/value head, whose query heads are
the rows of its matrix products. Which split holds which positions follows from the live length, on
the device: the grid is the bucket's, and programs whose split is empty leave at once. A second
kernel joins the splits (Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import decode_tile, next_power_of_2
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_LOG2_E = 1.4426950408889634


@triton.jit
def _positions_per_split(context, num_splits, BLOCK_N: tl.constexpr):
    """How many positions each split takes but the last: whole tiles, at least one."""
    num_tiles = tl.cdiv(context, BLOCK_N)
    return tl.maximum(tl.cdiv(num_tiles, num_splits), 1) * BLOCK_N


@triton.jit(do_not_specialize=["block_tables", "context_lens", "table_stride"])
def _paged_decode(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    output,
    log_sums,
    scale_log2,
    slot_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_lens + row)
    length = _positions_per_split(context, num_splits, BLOCK_N)
    start = split * length
    end = tl.minimum(start + length, context)
    if SPLITS:  # noqa: SIM102  decided when the kernel is compiled, the other when it runs
        if start >= end:
            return

    member = tl.arange(0, BLOCK_G)
    channels = tl.arange(0, BLOCK_D)
    is_channel = channels < HEAD_DIM
    is_result = (member < GROUP)[:, None] & is_channel[None, :]
    head = row * NUM_HEADS + kv_head * GROUP + member  # counted over all rows
    queries = tl.load(
        query + head[:, None] * HEAD_DIM + channels[None, :], mask=is_result, other=0.0
    )
    table = block_tables + row * table_stride
    keys = key_cache + kv_head * head_stride
    values = value_cache + kv_head * head_stride

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        is_context = position < end
        # Behind the context the table holds anything. int64: a cache may exceed 2**31 values.
        block = tl.load(table + position // BLOCK_SIZE, mask=is_context, other=0).to(tl.int64)
        offset = (block * BLOCK_SIZE + position % BLOCK_SIZE) * slot_stride
        key = tl.load(
            keys + offset[None, :] + channels[:, None],
            mask=is_context[None, :] & is_channel[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision="tf32x3") * scale_log2
        scores = tl.where(is_context[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(weights, axis=1)
        # A weight of 0 does not silence a NaN: what lies behind the context is not loaded at all.
        value = tl.load(
            values + offset[:, None] + channels[None, :],
            mask=is_context[:, None] & is_channel[None, :],
            other=0.0,
        )
        total = total * shrink[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="tf32x3")
        peak = new_peak

    mass = tl.where(mass == 0.0, 1.0, mass)  # no context: zeros
    total = total / mass[:, None]
    if SPLITS:
        part = head * num_splits + split
        tl.store(log_sums + part, peak + tl.log2(mass), mask=member < GROUP)
        target = output + part[:, None] * HEAD_DIM + channels[None, :]
        tl.store(target, total, mask=is_result)
    else:
        target = output + head[:, None] * HEAD_DIM + channels[None, :]
        tl.store(target, total.to(output.dtype.element_ty), mask=is_result)


@triton.jit(do_not_specialize=["context_lens", "num_splits"])
def _join_splits(
    parts,
    log_sums,
    context_lens,
    output,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = row * NUM_HEADS + tl.program_id(1)
    context = tl.load(context_lens + row)
    length = _positions_per_split(context, num_splits, BLOCK_N)
    splits = tl.arange(0, BLOCK_S)
    is_live = splits < tl.cdiv(context, length)  # the others have written nothing
    log_sum = tl.load(log_sums + head * num_splits + splits, mask=is_live, other=float("-inf"))
    peak = tl.max(log_sum)
    share = tl.exp2(log_sum - tl.where(peak == float("-inf"), 0.0, peak))  # no context: all 0
    mass = tl.sum(share)
    channels = tl.arange(0, BLOCK_D)
    is_channel = channels < HEAD_DIM
    part = tl.load(
        parts + (head * num_splits + splits[:, None]) * HEAD_DIM + channels[None, :],
        mask=is_live[:, None] & is_channel[None, :],
        other=0.0,
    )
    total = tl.sum(part * share[:, None], axis=0) / tl.where(mass == 0.0, 1.0, mass)
    target = output + head * HEAD_DIM + channels
    tl.store(target, total.to(output.dtype.element_ty), mask=is_channel)


PAGED_DECODE = Kernel(_paged_decode, fuses=True)
JOIN_SPLITS = Kernel(_join_splits, fuses=True)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    scale: float,
    num_splits: int,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.paged_decode`."""
    output = torch.empty_like(query)
    run(
        plan_paged_decode(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            block_size,
            scale,
            num_splits,
            output,
        )
    )
    return output


def plan_paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    scale: float,
    num_splits: int,
    output: torch.Tensor,
) -> tuple[Launch, ...]:
    """One launch, or two with the splits' results in between, which are allocated here."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    assert query.is_contiguous()
    assert block_tables.stride(1) == 1
    assert context_lens.is_contiguous()
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(2) == 1
    group_size = num_heads // num_kv_heads
    tile = decode_tile(
        head_dim=head_dim, item_bytes=key_cache.element_size(), group_size=group_size
    )
    is_split = num_splits > 1
    parts, log_sums = output, None
    if is_split:
        shape = (num_rows, num_heads, num_splits)
        parts = query.new_empty((*shape, head_dim), dtype=torch.float32)
        log_sums = query.new_empty(shape, dtype=torch.float32)
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "context_lens": context_lens,
        "output": parts,
        "log_sums": log_sums,
        "scale_log2": scale * _LOG2_E,
        "slot_stride": key_cache.stride(0),
        "head_stride": key_cache.stride(1),
        "table_stride": block_tables.stride(0),
        "NUM_HEADS": num_heads,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_G": tile.num_rows,
        "BLOCK_N": tile.num_positions,
        "BLOCK_D": tile.num_channels,
        "SPLITS": is_split,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    attend = Launch(PAGED_DECODE, (num_rows, num_kv_heads, num_splits), arguments)
    if not is_split:
        return (attend,)
    arguments = {
        "parts": parts,
        "log_sums": log_sums,
        "context_lens": context_lens,
        "output": output,
        "num_splits": num_splits,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_S": next_power_of_2(num_splits),
        "BLOCK_N": tile.num_positions,
        "BLOCK_D": tile.num_channels,
        "num_warps": 4,
    }
    return attend, Launch(JOIN_SPLITS, (num_rows, num_heads), arguments)
