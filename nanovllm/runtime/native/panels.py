"""Panels: how weights lie in memory, so that tiles read them from one end to the other.

A panel is 16 rows of a weight, each row in a lane of a vector register. It is stored value by value
along the rows: first that value of all 16 rows, then the next. Types of 16 and of 8 bits are
multiplied in pairs, and so are stored in units of two neighbouring values.

    row 0: a0 a1 a2 a3 ...        pairs:  a0 a1 b0 b1 ... p0 p1 | a2 a3 b2 b3 ... p2 p3 | ...
    row 1: b0 b1 b2 b3 ...        float32:   a0 b0 ... p0 | a1 b1 ... p1 | ...

An int8 row has a scale for each group of its values. The 16 scales of a group lie in front of it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.runtime.native.arena import Arena

PANEL_ROWS = 16

LENGTH_MULTIPLE = 32
"""Rows are a multiple of this long."""

UNITS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
"""Types that weights are stored in, and the neighbouring values that lie together."""

_MAX_INT8 = 127


class PanelLinear:
    """A weight `[N, K]` in panels; see `nanovllm.model.linear.Linear`.

    Attributes:
        weight: `[panels, bytes of a panel]` uint8. Rows past N are zeros.
        bias: `[N]` or None.
        num_rows: `N`.
        length: `K`.
        dtype: What the values are stored as: float32, bfloat16 or int8.
        group: Values that share a scale, with int8; otherwise 0.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        int8_group: int = 0,
        arena: Arena | None = None,
    ) -> None:
        """Pack a weight.

        Args:
            weight: Float32 or bfloat16 with K a multiple of 32 and of the group. Not kept.
            bias: `[N]` or None.
            int8_group: Not 0 to round it to int8 with a scale for so many values.
            arena: Where its memory comes from.
        """
        self.bias = bias
        self.num_rows, self.length = weight.shape
        self.group = int8_group
        self.dtype = torch.int8 if int8_group else weight.dtype
        num_panels = -(-self.num_rows // PANEL_ROWS)
        self.weight = (arena or Arena()).empty(
            num_panels, panel_bytes(self.length, self.dtype, int8_group)
        )
        for first in range(0, num_panels, _PANELS_AT_A_TIME):
            rows = weight[first * PANEL_ROWS : (first + _PANELS_AT_A_TIME) * PANEL_ROWS]
            missing = -len(rows) % PANEL_ROWS
            if missing:
                rows = torch.cat([rows, rows.new_zeros(missing, self.length)])
            target = self.weight[first : first + _PANELS_AT_A_TIME]
            if int8_group:
                _pack_int8(rows, int8_group, target)
            else:
                _pack(rows, target)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in plain torch, for comparison: the native step reads the panels itself."""
        return torch.nn.functional.linear(x, self.unpacked().to(x.dtype), self.bias)

    def unpacked(self) -> torch.Tensor:
        """`[N, K]`, the values that are multiplied: float32 where they are stored as int8."""
        unit, num_panels = UNITS[self.dtype], len(self.weight)
        if not self.group:
            units = self.weight.view(self.dtype).view(num_panels, -1, PANEL_ROWS, unit)
            return units.transpose(1, 2).reshape(-1, self.length)[: self.num_rows].clone()
        groups = self.weight.view(num_panels, self.length // self.group, -1)
        scale_bytes = 4 * PANEL_ROWS
        scales = groups[..., :scale_bytes].contiguous().view(torch.float32)  # [panels, groups, 16]
        values = groups[..., scale_bytes:].contiguous().view(torch.int8)
        values = values.view(num_panels, -1, self.group // unit, PANEL_ROWS, unit)
        rows = values.permute(0, 3, 1, 2, 4).flatten(3) * scales.permute(0, 2, 1)[..., None]
        return rows.reshape(-1, self.length)[: self.num_rows].clone()


_PANELS_AT_A_TIME = 256
"""So that packing needs little memory beside the weight and its panels."""


def panel_bytes(length: int, dtype: torch.dtype, int8_group: int = 0) -> int:
    """Bytes of a panel of rows of this length."""
    num_bytes = PANEL_ROWS * length * dtype.itemsize
    return num_bytes + (4 * PANEL_ROWS * length // int8_group if int8_group else 0)


def _pack(rows: torch.Tensor, target: torch.Tensor) -> None:
    unit = UNITS[rows.dtype]
    lanes = rows.view(-1, PANEL_ROWS, rows.shape[1] // unit, unit).transpose(1, 2)
    target.view(rows.dtype).view(lanes.shape).copy_(lanes)


def _pack_int8(rows: torch.Tensor, group: int, target: torch.Tensor) -> None:
    """Round to the nearest of 255 steps between the largest value of a group and its negative."""
    num_groups = rows.shape[1] // group
    values = rows.float().view(-1, PANEL_ROWS, num_groups, group)
    scales = values.abs().amax(dim=-1) / _MAX_INT8  # [panels, 16, groups]
    steps = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_()
    pairs = steps.view(-1, PANEL_ROWS, num_groups, group // 2, 2).permute(0, 2, 3, 1, 4)
    groups = target.view(len(target), num_groups, -1)
    scale_bytes = 4 * PANEL_ROWS
    groups[..., :scale_bytes] = scales.transpose(1, 2).contiguous().view(torch.uint8)
    groups[..., scale_bytes:] = pairs.to(torch.int8).flatten(2).view(torch.uint8)


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as numpy sees it; bfloat16 as uint16, which numpy has."""
    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def kind_number(dtype: torch.dtype) -> Any:
    """A number by whose type compiled code tells how weights are stored."""
    numbers = {
        torch.float32: np.float32(0),
        torch.bfloat16: np.uint16(0),
        torch.int8: np.int8(0),
    }
    return numbers[dtype]
