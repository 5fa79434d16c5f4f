"""Operators that multiply few rows by a weight, with what stands beside the product in a layer.

For `geometry.FEW_ROWS` rows at most. More of them are worth the products of a library, with the
operators of `layer_ops` in between.
"""

import torch

from nanovllm.kernels.operator import operator
from nanovllm.kernels.reference import layers


@operator("linear")
def norm_linear(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise as `rms_norm` does, then multiply.

    Args:
        x: `[T, C]` contiguous.
        norm: `[C]` weight of the norm.
        eps: Added to the mean square.
        weight: `[N, C]` contiguous.
        bias: `[N]`, or None.

    Returns:
        `[T, N]`.
    """
    return layers.norm_linear(x, norm, eps, weight, bias)


@norm_linear.register_fake
def _(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    return x.new_empty(len(x), len(weight))


@operator("linear")
def norm_gate_up(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise as `rms_norm` does, multiply, then activate as `silu_mul` does.

    Args:
        x: `[T, C]` contiguous.
        norm: `[C]` weight of the norm.
        eps: Added to the mean square.
        weight: `[2 I, C]` contiguous, the gate first.
        bias: `[2 I]`, or None.

    Returns:
        `[T, I]`.
    """
    return layers.silu_mul(layers.norm_linear(x, norm, eps, weight, bias))


@norm_gate_up.register_fake
def _(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    return x.new_empty(len(x), len(weight) // 2)


@operator("linear", mutates_args=("residual",))
def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> None:
    """Multiply, and add to the residual stream.

    Args:
        x: `[T, C]` contiguous.
        weight: `[E, C]` contiguous.
        bias: `[E]`, or None.
        residual: `[T, E]` contiguous, updated in place.
    """
    residual.add_(torch.nn.functional.linear(x, weight, bias))


@linear_add.register_fake
def _(*_: object) -> None:
    return None
