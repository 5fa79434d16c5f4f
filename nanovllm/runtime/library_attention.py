"""`PagedAttention` by libraries that may be there, and what keeps each one from being used.

Chosen by feature, never by version: a library counts if the function that is called takes the
arguments that it is called with.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch

from nanovllm.runtime.paged_attention import AttentionShape, PagedAttention, TritonAttention

AMPERE = (8, 0)
"""Compute capability from which Triton's and FlashAttention's kernels run in bfloat16."""


@attrs.frozen
class FlashAttention:
    """The flash-attn package, version 2: `flash_attn_with_kvcache`, `flash_attn_varlen_func`."""

    shape: AttentionShape
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]

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
        attended: torch.Tensor = self.with_kvcache(
            query[:, None],  # one position a row
            _pages(key_cache, self.shape),
            _pages(value_cache, self.shape),
            cache_seqlens=context_lens,
            block_table=block_tables,
            softmax_scale=self.shape.scale,
            causal=True,
        )
        return attended[:, 0]

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
        attended: torch.Tensor = self.varlen(
            query,
            _pages(key_cache, self.shape),
            _pages(value_cache, self.shape),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=_running_sum(context_lens),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=self.shape.max_model_len,
            softmax_scale=self.shape.scale,
            causal=True,
            block_table=block_tables,
        )
        return attended


@attrs.frozen
class VarlenAttention:
    """torch's own `varlen_attn`, where it takes a block table."""

    shape: AttentionShape
    varlen_attn: Callable[..., Any]

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
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        return self.prefill(
            query, key_cache, value_cache, block_tables, context_lens, starts, max_seqlen_q=1
        )

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
        attended: torch.Tensor = self.varlen_attn(
            query,
            _pages(key_cache, self.shape),
            _pages(value_cache, self.shape),
            cu_seqlens_q,
            _running_sum(context_lens),
            max_seqlen_q,
            self.shape.max_model_len,
            scale=self.shape.scale,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
            seqused_k=context_lens,
            block_table=block_tables,
            # Splits are wrong for a batch of several unless one query meets more query heads than
            # K/V heads (flash-attention issue 1217); without them every case is right.
            num_splits=1,
        )
        return attended


def make_attention(name: str, shape: AttentionShape) -> PagedAttention:
    """The backend of that name in `nanovllm.backends.TABLE`, which must have no obstacle here."""
    if name == "flash_attn":
        flash_attn = importlib.import_module("flash_attn")
        return FlashAttention(
            shape, flash_attn.flash_attn_with_kvcache, flash_attn.flash_attn_varlen_func
        )
    if name == "varlen":
        return VarlenAttention(shape, importlib.import_module(_VARLEN_MODULE).varlen_attn)
    assert name == "triton", name
    return TritonAttention(shape)


_VARLEN_MODULE = "torch.nn.attention.varlen"
_VARLEN_ARGUMENTS = {"block_table", "seqused_k", "enable_gqa", "num_splits", "window_size"}


def obstacles(capability: tuple[int, int], head_dim: int) -> dict[str, str]:
    """Which of these backends can't be used, and why.

    Args:
        capability: Of the GPU, as `torch.cuda.get_device_capability` gives it.
        head_dim: Of the model.
    """
    found = {
        "triton": _triton_obstacle(head_dim),
        # The second learnt to read pages later than the first.
        "flash_attn": _missing("flash_attn", "flash_attn_with_kvcache", {"block_table"})
        or _missing("flash_attn", "flash_attn_varlen_func", {"block_table"}),
        "varlen": _missing(_VARLEN_MODULE, "varlen_attn", _VARLEN_ARGUMENTS),
    }
    if capability < AMPERE:
        said = f"it needs a GPU of compute capability 8.0, and this one has {capability}"
        found = dict.fromkeys(found, said)
    return {name: why for name, why in found.items() if why is not None}


def _triton_obstacle(head_dim: int) -> str | None:
    if head_dim % 16 or head_dim > 256:
        return f"its kernels take head sizes that are multiples of 16 up to 256, not {head_dim}"
    return _missing("triton", "jit", set())


def _missing(module: str, function: str, arguments: set[str]) -> str | None:
    """What is wrong with a function that has to be there and to take these arguments."""
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001  # a broken library is like a missing one
        return f"{module} can't be imported ({type(error).__name__}: {error})"
    lacking = sorted(arguments - inspect.signature(found).parameters.keys())
    return f"{function} of {module} does not take {', '.join(lacking)}" if lacking else None


def _pages(cache: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """A layer's cache by block: `[num_blocks, block_size, K, D]`."""
    return cache.view(-1, shape.block_size, shape.num_kv_heads, shape.head_dim)


def _running_sum(lens: torch.Tensor) -> torch.Tensor:
    """`[S + 1]` int32; the first is 0."""
    sums = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    return sums.int()
