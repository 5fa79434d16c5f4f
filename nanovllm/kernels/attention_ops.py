"""Operators that attend over the paged K/V cache."""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import attention


@operator("decode")
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
    """Attend with one query per sequence to all positions of its context.

    Args:
        query: `[B, H, D]`.
        key_cache: `[num_slots, K, D]`; the queries' own positions are stored already.
        value_cache: `[num_slots, K, D]`.
        block_tables: `[B, M]` int32, the last dimension contiguous. Behind a sequence's own
            blocks it may hold anything, and so may the cache behind a context.
        context_lens: `[B]` int32 positions, the query's own included, at most `M * block_size`.
            0 gives zeros.
        block_size: Positions of a block.
        scale: Multiplies the products of queries and keys.
        num_splits: Programs that share each context on a device, 1 to 64; the CPU has no use for
            it. It must not follow live lengths: a captured step keeps it for good.

    Returns:
        `[B, H, D]`.
    """
    return attention.paged_decode(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        block_size,
        scale,
        num_splits,
    )


@paged_decode.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


@operator("prefill")
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
    """Attend with the last positions of each sequence, each to all positions up to its own.

    Args:
        query: `[T, H, D]` the queries of all sequences, packed.
        key_cache: `[num_slots, K, D]`; the queries' own positions are stored already.
        value_cache: `[num_slots, K, D]`.
        block_tables: `[S, M]` int32, see `paged_decode`.
        context_lens: `[S]` int32 positions, those of the queries included.
        cu_seqlens_q: `[S + 1]` int32 running sum of the queries; the first is 0. Behind the last,
            at most T, stands padding, whose results may be anything; a sequence of no query is
            padding too, and has a context of 0.
        max_seqlen_q: The most queries that one sequence has.
        block_size: Positions of a block.
        scale: Multiplies the products of queries and keys.

    Returns:
        `[T, H, D]`.
    """
    return attention.paged_prefill(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        block_size,
        scale,
    )


@paged_prefill.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)
