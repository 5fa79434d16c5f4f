"""Operators between the matrix products of a layer: norms, rope with the K/V store, activation."""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import layers


@operator("norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, in float32, times the weight.

    Args:
        x: `[T, E]`.
        weight: `[E]`.
        eps: Added to the mean square.

    Returns:
        `[T, E]`.
    """
    return layers.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@operator("norm", mutates_args=("residual",))
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to the residual stream, then normalise it as `rms_norm` does.

    Args:
        x: `[T, E]` what a layer's part adds.
        residual: `[T, E]` contiguous, updated in place.
        weight: `[E]`.
        eps: Added to the mean square.

    Returns:
        `[T, E]` the normalised sum.
    """
    return layers.add_rms_norm(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@operator("activation")
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the gate times up.

    Args:
        gate_up: `[T, 2 I]`, the gate first.

    Returns:
        `[T, I]`.
    """
    return layers.silu_mul(gate_up)


@silu_mul.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@operator("rope_store", mutates_args=("key_cache", "value_cache"))
def qkv_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """Normalise queries and keys per head, turn them by their position, store keys and values.

    Args:
        qkv: `[T, (H + 2 K) D]` the product of the fused projection: queries, keys, values.
        positions: `[T]` int32 or int64, below `num_positions`, those of padding too.
        slot_mapping: `[T]` int32 slots, no two equal but -1: write nowhere.
        cos_sin: `[num_positions, D]` float32, see `rope_table`.
        q_norm: `[D]`, or None in families without q/k norm.
        k_norm: `[D]`, or None; both or neither.
        eps: Added to the mean square of those norms.
        key_cache: `[num_slots, K, D]`, written in place.
        value_cache: `[num_slots, K, D]`, written in place.

    Returns:
        `[T, H, D]` the queries.
    """
    return layers.qkv_rope_store(
        qkv, positions, slot_mapping, cos_sin, q_norm, k_norm, eps, key_cache, value_cache
    )


@qkv_rope_store.register_fake
def _(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    _, num_kv_heads, head_dim = key_cache.shape
    return qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
