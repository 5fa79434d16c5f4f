"""The inputs of a decode step as one int32 vector: where each named field lies. Pure.

    | scalars | column | column | ... | table row 0 | table row 1 | ... |

One vector means one copy to the device per step. Its size is fixed by the largest bucket, and so
is the place of every field: a smaller bucket sees the first rows of each. The table comes last, so
that a step of bucket `b` needs only the first `num_words(b)` words on the device.

Views are offered of a numpy vector (`numpy_views`, or a `graphs.packing.StepBuffer`, which also
clears what a step leaves unused) and of a torch tensor (`torch_views`), at the same offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from graphs.errors import LayoutError

if TYPE_CHECKING:
    import torch

Int32Vector = npt.NDArray[np.int32]
DType = Literal["int32", "float32"]

_ALIGN_WORDS = 32
"""Columns start on 128 bytes, a device's cache line; kernels specialise on aligned pointers."""


@attrs.frozen
class Fill:
    """Padding rows of this field hold `value`."""

    value: float


@attrs.frozen
class Keep:
    """Padding rows of this field keep what they held: the program must not look at them."""


PadPolicy = Fill | Keep
ZERO = Fill(0)
KEEP = Keep()


@attrs.frozen
class Scalar:
    """One number per step."""

    name: str
    dtype: DType = "int32"


@attrs.frozen
class Column:
    """One number per row.

    Attributes:
        name: What it is looked up by.
        pad: What padding rows hold.
        dtype: "float32" is stored bit for bit in the int32 vector.
    """

    name: str
    pad: PadPolicy
    dtype: DType = "int32"


@attrs.frozen
class Table:
    """`width` int32 per row, of which a live row may use fewer, from the left.

    Attributes:
        name: What it is looked up by.
        width: Numbers per row, `M`. Rows lie `M` words apart in every bucket.
        pad: What padding rows hold, and live rows behind what they use.
    """

    name: str
    width: int
    pad: Fill


@attrs.frozen
class StepLayout:
    """Where each field of a step lies.

    Attributes:
        max_num_rows: Rows of the largest bucket.
        scalars: Fields of the whole step.
        columns: Fields with one number per row.
        table: The field with `M` numbers per row.
    """

    max_num_rows: int
    scalars: tuple[Scalar, ...]
    columns: tuple[Column, ...]
    table: Table
    _offsets: dict[str, int] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        _check(self)
        offsets = {scalar.name: index for index, scalar in enumerate(self.scalars)}
        end = len(self.scalars)
        for column in self.columns:
            offsets[column.name] = _aligned(end)
            end = offsets[column.name] + self.max_num_rows
        offsets[self.table.name] = _aligned(end)
        object.__setattr__(self, "_offsets", offsets)

    @property
    def names(self) -> frozenset[str]:
        """Of all fields."""
        return frozenset(self._offsets)

    def offset_words(self, name: str) -> int:
        """Where a field starts."""
        return self._offsets[name]

    def num_words(self, bucket: int | None = None) -> int:
        """Words that a step of this bucket reads, from the start; all of them by default."""
        rows = self.max_num_rows if bucket is None else self._checked_bucket(bucket)
        return self._offsets[self.table.name] + rows * self.table.width

    def numpy_views(
        self, vector: Int32Vector, bucket: int | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """View a vector by field: scalars `[]`, columns `[B]`, the table `[B, M]`.

        The vector is `[num_words()]` int32; `B` is the bucket, by default `max_num_rows`.
        """
        rows = self.max_num_rows if bucket is None else self._checked_bucket(bucket)
        self._check_vector(vector.shape, vector.dtype == np.int32)
        as_dtype: Mapping[DType, npt.NDArray[Any]] = {
            "int32": vector,
            "float32": vector.view(np.float32),
        }
        views: dict[str, npt.NDArray[Any]] = {}
        for scalar in self.scalars:
            at = self._offsets[scalar.name]
            views[scalar.name] = as_dtype[scalar.dtype][at : at + 1].reshape(())
        for column in self.columns:
            at = self._offsets[column.name]
            views[column.name] = as_dtype[column.dtype][at : at + rows]
        at, width = self._offsets[self.table.name], self.table.width
        views[self.table.name] = vector[at : at + rows * width].reshape(rows, width)
        return views

    def torch_views(
        self, vector: torch.Tensor, bucket: int | None = None
    ) -> dict[str, torch.Tensor]:
        """View a `[num_words()]` int32 tensor by field, shaped like `numpy_views`."""
        import torch

        rows = self.max_num_rows if bucket is None else self._checked_bucket(bucket)
        self._check_vector(tuple(vector.shape), vector.dtype == torch.int32)
        as_dtype = {"int32": vector, "float32": vector.view(torch.float32)}
        views = {}
        for scalar in self.scalars:
            views[scalar.name] = as_dtype[scalar.dtype][self._offsets[scalar.name]]
        for column in self.columns:
            at = self._offsets[column.name]
            views[column.name] = as_dtype[column.dtype][at : at + rows]
        at, width = self._offsets[self.table.name], self.table.width
        views[self.table.name] = vector[at : at + rows * width].view(rows, width)
        return views

    def _checked_bucket(self, bucket: int) -> int:
        if not 1 <= bucket <= self.max_num_rows:
            raise LayoutError(
                f"`bucket` is {bucket}, but this layout has rows 1 to {self.max_num_rows}."
            )
        return bucket

    def _check_vector(self, shape: tuple[int, ...], is_int32: bool) -> None:
        if shape != (self.num_words(),) or not is_int32:
            raise LayoutError(
                f"the vector has shape {list(shape)}{'' if is_int32 else ' and is not int32'}; "
                f"this layout needs [{self.num_words()}] int32."
            )


def _check(layout: StepLayout) -> None:
    if layout.max_num_rows < 1:
        raise LayoutError(f"`max_num_rows` is {layout.max_num_rows}; it must be at least 1.")
    if layout.table.width < 1:
        raise LayoutError(
            f"table `{layout.table.name}` is {layout.table.width} wide; it must be at least 1."
        )
    names = [scalar.name for scalar in layout.scalars]
    names += [column.name for column in layout.columns]
    names.append(layout.table.name)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LayoutError(f"fields {twice} are there more than once; name each field once.")


def _aligned(word: int) -> int:
    return -(-word // _ALIGN_WORDS) * _ALIGN_WORDS
