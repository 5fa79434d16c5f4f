"""Operators between the matrix products of a layer: norms, rope with the K/V store, activation."""

from typing import Any

import torch

from nanovllm.kernels.reference import layers


@torch.library.custom_op("nanovllm::rms_norm", mutates_args=(), device_types="cpu")
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


@rms_norm.register_kernel("cuda")
def _(*args: Any) -> torch.Tensor:
    from nanovllm.kernels.triton import norm as kernels

    return kernels.rms_norm(*args)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nanovllm::add_rms_norm", mutates_args=("residual",), device_types="cpu")
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


@add_rms_norm.register_kernel("cuda")
def _(*args: Any) -> torch.Tensor:
    from nanovllm.kernels.triton import norm as kernels

    return kernels.add_rms_norm(*args)


@add_rms_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nanovllm::silu_mul", mutates_args=(), device_types="cpu")
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the gate times up.

    Args:
        gate_up: `[T, 2 I]`, the gate first.

    Returns:
        `[T, I]`.
    """
    return layers.silu_mul(gate_up)


@silu_mul.register_kernel("cuda")
def _(*args: Any) -> torch.Tensor:
    from nanovllm.kernels.triton import activation as kernels

    return kernels.silu_mul(*args)


@silu_mul.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@torch.library.custom_op(
    "nanovllm::qkv_rope_store", mutates_args=("key_cache", "value_cache"), device_types="cpu"
)
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


@qkv_rope_store.register_kernel("cuda")
def _(*args: Any) -> torch.Tensor:
    from nanovllm.kernels.triton import rope_store as kernels

    return kernels.qkv_rope_store(*args)


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
