"""Attention over paged keys and values in plain torch, all sequences at once."""

import torch


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
    """One query per sequence: a prefill of one position each."""
    del num_splits  # how a device shares the work; the result is the same
    cu_seqlens_q = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    return paged_prefill(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        1,
        block_size,
        scale,
    )


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
    """Several queries per sequence, the last ones of its context, each seeing those before it."""
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = len(context_lens), key_cache.shape[1]
    device = query.device

    # Queries as [S, Q, H, D], padded to the longest; what stands in the padding is never read.
    starts, lens_q = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    steps = torch.arange(max_seqlen_q, device=device)
    padded = query[(starts[:, None] + steps).clamp(max=num_tokens - 1)]
    padded = padded.view(num_seqs, max_seqlen_q, num_kv_heads, -1, head_dim)

    # Keys and values as [S, W, K, D], W positions of the whole table.
    columns = torch.arange(block_tables.shape[1] * block_size, device=device)
    context = context_lens.long()[:, None]
    blocks = block_tables[:, columns // block_size].long()
    # Behind the context a table holds anything, so the mask comes before the look-up.
    in_context = columns < context  # [S, W]
    slots = torch.where(in_context, blocks * block_size + columns % block_size, 0)
    keys = key_cache[slots]
    # Weights of 0 do not silence a NaN, so the values behind the context become 0 themselves.
    values = torch.where(in_context[..., None, None], value_cache[slots], 0)

    last = context - lens_q[:, None] + steps  # [S, Q] the last position that a query sees: its own
    visible = (columns <= last[..., None]) & in_context[:, None]  # [S, Q, W]
    scores = torch.einsum("sqkgd,swkd->skgqw", padded, keys).float() * scale
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1)
    # A sequence without context has no weights; it gets zeros.
    weights = weights.masked_fill(~visible[:, None, None], 0.0).to(values.dtype)
    attended = torch.einsum("skgqw,swkd->sqkgd", weights, values)

    tokens = torch.arange(num_tokens, device=device)
    row = torch.searchsorted(cu_seqlens_q[1:].long(), tokens, right=True).clamp(max=num_seqs - 1)
    step = (tokens - starts[row]).clamp(max=max_seqlen_q - 1)
    return attended[row, step].reshape(num_tokens, num_heads, head_dim)
