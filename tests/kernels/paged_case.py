"""Paged caches as an engine leaves them: blocks scattered, everything that is not a context NaN."""

import attrs
import torch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One unit in the last place of values around 1, absolute and relative; 16 in float32."""

NOWHERE = 2**31 - 1
"""A block id that no cache has: what stands in a table behind a sequence's own blocks."""


@attrs.frozen(eq=False)
class PagedCase:
    """Arguments of the attention operators, and each sequence's keys and values in order."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    block_size: int
    scale: float
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def cache(self):
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.context_lens

    def decode(self, operator, num_splits):
        return operator(*self.cache, self.block_size, self.scale, num_splits)

    def prefill(self, operator):
        return operator(
            *self.cache, self.cu_seqlens_q, self.max_seqlen_q, self.block_size, self.scale
        )


def paged_case(
    context_lens,
    lens_q=None,
    *,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    seed=0,
):
    """One sequence per context length, with `lens_q` queries each, or one."""
    lens_q = [1] * len(context_lens) if lens_q is None else lens_q
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator).to(dtype)

    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    # One layer's view of a cache of two layers.
    cache = torch.full((2, 2, num_blocks * block_size, num_kv_heads, head_dim), float("nan"))
    key_cache, value_cache = cache.to(dtype)[1]
    # A part of a wider table, as the view of a packed vector is.
    tables = torch.full((len(needed), max(needed) + 4), NOWHERE, dtype=torch.int32)
    block_tables = tables[:, : max(needed) + 1]
    keys, values, taken = [], [], 0
    for row, length in enumerate(context_lens):
        own = ids[taken : taken + needed[row]]
        taken += needed[row]
        block_tables[row, : len(own)] = own
        slots = (own.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        keys.append(normal(length, num_kv_heads, head_dim))
        values.append(normal(length, num_kv_heads, head_dim))
        key_cache[slots], value_cache[slots] = keys[-1], values[-1]
    cu_seqlens_q = torch.zeros(len(lens_q) + 1, dtype=torch.int32)
    cu_seqlens_q[1:] = torch.tensor(lens_q).cumsum(0)
    return PagedCase(
        query=normal(sum(lens_q), num_heads, head_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max(lens_q),
        block_size=block_size,
        scale=head_dim**-0.5,
        keys=keys,
        values=values,
    )


def assert_near(expected, actual):
    """Equal within the type's tolerance; a NaN is near nothing."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
