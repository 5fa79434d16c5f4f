"""Attention over the paged K/V cache on a GPU: one interface, one class per library that has it.

Every one of them can be captured: nothing here looks at a length on the host, and what a launch
is shaped by (splits, the longest context) is planned from the limits and not from live rows.
"""

from typing import Protocol

import attrs
import torch

from graphs import plan_splits
from nanovllm.kernels import ops
from nanovllm.kernels.geometry import decode_tile
from nanovllm.model.config import ModelConfig


class PagedAttention(Protocol):
    """Attention of one model; a layer's caches are `[num_slots, K, D]`."""

    @property
    def block_size(self) -> int:
        """Positions of a block."""

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """One query per row: `[B, H, D]`, tables `[B, M]` int32, lengths `[B]` int32 from 1."""

    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
    ) -> torch.Tensor:
        """The last positions of each row, packed: `[T, H, D]`, `cu_seqlens_q` `[S + 1]` int32."""


@attrs.frozen
class AttentionShape:
    """What launches are planned from.

    Attributes:
        num_kv_heads: `K`.
        head_dim: `D`.
        block_size: Positions of a block.
        max_model_len: The longest context there may be.
        num_sms: Multiprocessors of the device.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    max_model_len: int
    num_sms: int

    @classmethod
    def of(
        cls, model: ModelConfig, *, block_size: int, max_model_len: int, num_sms: int
    ) -> "AttentionShape":
        """The one of a model on a device."""
        return cls(model.num_kv_heads, model.head_dim, block_size, max_model_len, num_sms)

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float(self.head_dim**-0.5)


@attrs.frozen
class TritonAttention:
    """This package's own kernels: any block size, any GPU that Triton supports."""

    shape: AttentionShape

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self.shape.block_size

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """See `PagedAttention`."""
        shape = self.shape
        tile = decode_tile(
            head_dim=shape.head_dim,
            item_bytes=key_cache.element_size(),
            group_size=query.shape[1] // shape.num_kv_heads,
        )
        # No split of a context is shorter than what the kernel reads at once.
        num_splits = plan_splits(
            len(query), shape.num_kv_heads, shape.max_model_len, shape.num_sms, tile.num_positions
        )
        attended: torch.Tensor = ops.paged_decode(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            shape.block_size,
            shape.scale,
            num_splits,
        )
        return attended

    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
    ) -> torch.Tensor:
        """See `PagedAttention`."""
        attended: torch.Tensor = ops.paged_prefill(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            cu_seqlens_q,
            max_seqlen_q,
            self.shape.block_size,
            self.shape.scale,
        )
        return attended
