"""Paged attention of several queries per sequence, causal, over whatever is cached before them.

A program takes some consecutive queries of one sequence, times the query heads of one key/value
head, as the rows of its matrix products. Sequences of any lengths are packed, so the grid has room
for one more tile per sequence than the queries fill, and a program finds its sequence by bisection.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.geometry import prefill_tile
from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_LOG2_E = 1.4426950408889634


@triton.jit
def _sequence_of_tile(tile, cu_seqlens_q, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not behind `tile`.

    Sequence s begins at tile `cu_seqlens_q[s] // BLOCK_Q + s`: the + s leaves each sequence before
    it room for a last tile that is not full.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(
    do_not_specialize=["block_tables", "context_lens", "cu_seqlens_q", "table_stride", "num_seqs"]
)
def _paged_prefill(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    cu_seqlens_q,
    output,
    scale_log2,
    slot_stride,
    head_stride,
    table_stride,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(tile, cu_seqlens_q, num_seqs, BLOCK_Q)
    start_q = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start_q
    first_q = (tile - (start_q // BLOCK_Q + sequence)) * BLOCK_Q
    if first_q >= num_queries:
        return
    context = tl.load(context_lens + sequence)
    num_before = context - num_queries  # positions before the first query

    member = tl.arange(0, BLOCK_M)
    step = first_q + member // GROUP
    is_query = (member < BLOCK_Q * GROUP) & (step < num_queries)
    channels = tl.arange(0, BLOCK_D)
    is_channel = channels < HEAD_DIM
    is_result = is_query[:, None] & is_channel[None, :]
    head = (start_q + step).to(tl.int64) * NUM_HEADS + kv_head * GROUP + member % GROUP
    place = head[:, None] * HEAD_DIM + channels[None, :]
    queries = tl.load(query + place, mask=is_result, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = key_cache + kv_head * head_stride
    values = value_cache + kv_head * head_stride

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The last query of the tile sees the most: all positions before it, and its own.
    end = num_before + tl.minimum(first_q + BLOCK_Q, num_queries)
    for first in range(0, end, BLOCK_N):
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
        # Every row sees position 0, which is in the first turn: its peak is finite from then on.
        is_visible = position[None, :] <= num_before + step[:, None]
        scores = tl.where(is_visible & is_context[None, :], scores, float("-inf"))
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

    total = total / mass[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=is_result)


PAGED_PREFILL = Kernel(_paged_prefill, fuses=True)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.paged_prefill`."""
    output = torch.empty_like(query)
    run(
        plan_paged_prefill(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            cu_seqlens_q,
            max_seqlen_q,
            block_size,
            scale,
            output,
        )
    )
    return output


def plan_paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    block_size: int,
    scale: float,
    output: torch.Tensor,
) -> tuple[Launch, ...]:
    """The launch: a grid of tiles of queries and key/value heads."""
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = len(context_lens), key_cache.shape[1]
    assert query.is_contiguous()
    assert block_tables.stride(1) == 1
    assert context_lens.is_contiguous()
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(2) == 1
    group_size = num_heads // num_kv_heads
    tile = prefill_tile(
        head_dim=head_dim,
        item_bytes=key_cache.element_size(),
        group_size=group_size,
        max_seqlen_q=max_seqlen_q,
    )
    num_queries = tile.num_rows // group_size
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "context_lens": context_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "output": output,
        "scale_log2": scale * _LOG2_E,
        "slot_stride": key_cache.stride(0),
        "head_stride": key_cache.stride(1),
        "table_stride": block_tables.stride(0),
        "num_seqs": num_seqs,
        "NUM_HEADS": num_heads,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.num_rows,
        "BLOCK_Q": num_queries,
        "BLOCK_N": tile.num_positions,
        "BLOCK_D": tile.num_channels,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    num_tiles = num_tokens // num_queries + num_seqs
    return (Launch(PAGED_PREFILL, (num_tiles, num_kv_heads), arguments),)
