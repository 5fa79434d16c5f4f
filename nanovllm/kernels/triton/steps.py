"""Both ends of a decode step: one program for all rows, since there are few numbers to a row."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import Kernel, Launch, run
from nanovllm.kernels.triton.overlap import begin

_BLOCK = 128
"""Rows of a program, however few there are, so that all buckets share one variant."""


# All of these are views of packed vectors, or differ between buckets.
@triton.jit(
    do_not_specialize=[
        "source",
        "token",
        "context_lens",
        "block_tables",
        "num_rows",
        "count",
        "table_stride",
    ]
)
def _decode_inputs(
    kept,
    source,
    token,
    context_lens,
    block_tables,
    num_rows,
    token_ids,
    positions,
    slots,
    count,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    place = tl.load(source + rows, mask=inside, other=-1)
    fetched = tl.load(kept + place, mask=inside & (place >= 0), other=0)
    given = tl.load(token + rows, mask=inside, other=0)
    tl.store(token_ids + rows, tl.maximum(tl.where(place >= 0, fetched, given), 0), mask=inside)
    position = tl.load(context_lens + rows, mask=inside, other=1) - 1  # -1: it counts from 0
    tl.store(positions + rows, position, mask=inside)
    # int64, as a table of many rows may be longer than an int32 counts.
    entry = block_tables + rows.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=inside, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    live = tl.load(num_rows)
    tl.store(slots + rows, tl.where(rows < live, slot, -1), mask=inside)


@triton.jit(do_not_specialize=["offset", "count"])
def _keep_tokens(token_ids, peak, offset, kept, count, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    begin(OVERLAPS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    token = tl.load(token_ids + rows, mask=inside, other=0).to(tl.int32)
    largest = tl.load(peak + rows, mask=inside, other=0.0)
    finite = tl.abs(largest) < float("inf")  # false for a NaN too
    tl.store(kept + tl.load(offset) + rows, tl.where(finite, token, -1), mask=inside)


DECODE_INPUTS = Kernel(_decode_inputs)
KEEP_TOKENS = Kernel(_keep_tokens)


def decode_inputs(
    kept: torch.Tensor,
    source: torch.Tensor,
    token: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `nanovllm.kernels.ops.decode_inputs`."""
    results = (
        source.new_empty(source.shape),
        source.new_empty(source.shape),
        source.new_empty(source.shape),
    )
    run(
        plan_decode_inputs(
            kept, source, token, context_lens, block_tables, num_rows, block_size, results
        )
    )
    return results


def plan_decode_inputs(
    kept: torch.Tensor,
    source: torch.Tensor,
    token: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: torch.Tensor,
    block_size: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[Launch, ...]:
    """The launch: a grid of groups of rows."""
    assert block_tables.stride(1) == 1
    arguments = {
        "kept": kept,
        "source": source,
        "token": token,
        "context_lens": context_lens,
        "block_tables": block_tables,
        "num_rows": num_rows,
        "token_ids": results[0],
        "positions": results[1],
        "slots": results[2],
        "count": len(source),
        "table_stride": block_tables.stride(0),
        "BLOCK_SIZE": block_size,
        "BLOCK": _BLOCK,
        "num_warps": 1,
    }
    return (Launch(DECODE_INPUTS, (-(-len(source) // _BLOCK),), arguments),)


def keep_tokens(
    token_ids: torch.Tensor, peak: torch.Tensor, offset: torch.Tensor, kept: torch.Tensor
) -> None:
    """See `nanovllm.kernels.ops.keep_tokens`."""
    run(plan_keep_tokens(token_ids, peak, offset, kept))


def plan_keep_tokens(
    token_ids: torch.Tensor, peak: torch.Tensor, offset: torch.Tensor, kept: torch.Tensor
) -> tuple[Launch, ...]:
    """The launch: a grid of groups of rows."""
    arguments = {
        "token_ids": token_ids,
        "peak": peak,
        "offset": offset,
        "kept": kept,
        "count": len(token_ids),
        "BLOCK": _BLOCK,
        "num_warps": 1,
    }
    return (Launch(KEEP_TOKENS, (-(-len(token_ids) // _BLOCK),), arguments),)
