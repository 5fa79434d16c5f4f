"""`StepBuffer`: one host vector that steps are packed into, over and over.

It keeps one promise, which is what makes a replay safe: after `pack`, every row that is not live
holds its padding, whatever earlier and larger steps left there. Only rows and table columns that
an earlier step wrote are cleared, so a step pays for what changed and not for the whole vector.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from graphs.errors import LayoutError
from graphs.layout import Fill, Int32Vector, StepLayout


class StepBuffer:
    """A vector with the layout of a step, and the memory of which part of it is in use.

    Attributes:
        layout: Where each field lies.
        vector: `[layout.num_words()]` int32. Nothing but `pack` may write to it.
    """

    def __init__(self, layout: StepLayout, vector: Int32Vector | None = None) -> None:
        """Fill the vector with padding.

        Args:
            layout: Where each field lies.
            vector: Memory to use, as of a pinned tensor; by default new memory.
        """
        self.layout = layout
        self.vector = np.zeros(layout.num_words(), np.int32) if vector is None else vector
        views = layout.numpy_views(self.vector)
        self.vector[:] = 0
        self._scalars = [(scalar.name, views[scalar.name]) for scalar in layout.scalars]
        self._columns = [(column.name, views[column.name]) for column in layout.columns]
        self._pads = [
            (views[column.name], column.pad.value)
            for column in layout.columns
            if isinstance(column.pad, Fill)
        ]
        self._table, self._table_pad = views[layout.table.name], layout.table.pad.value
        for view, value in (*self._pads, (self._table, self._table_pad)):
            view[:] = value
        # Rows from here down, and table columns from here right, hold padding.
        self._num_dirty_rows = 0
        self._num_dirty_columns = 0

    def pack(self, num_rows: int, values: Mapping[str, npt.ArrayLike]) -> None:
        """Write a step.

        Args:
            num_rows: Live rows, 0 to `layout.max_num_rows`.
            values: For every field of the layout: a number for a scalar, `[num_rows]` for a
                column, `[num_rows, m]` for the table, where `m` is at most its width. Arrays are
                faster than lists. Integers of other widths are cut to 32 bits.

        Raises:
            LayoutError: If a field is missing, unknown or of another shape. The vector may then
                be half written, and the next `pack` makes it whole.
        """
        if values.keys() != self.layout.names:
            raise LayoutError(
                f"a step needs the fields {sorted(self.layout.names)}, not {sorted(values)}."
            )
        if not 0 <= num_rows <= self.layout.max_num_rows:
            raise LayoutError(
                f"the step has {num_rows} rows; this layout holds 0 to {self.layout.max_num_rows}."
            )
        num_dirty = self._num_dirty_rows
        # Set before anything is written: should a write fail, the next step clears after it.
        self._num_dirty_rows = max(num_dirty, num_rows)
        for name, view in self._scalars:
            view[()] = values[name]
        for name, view in self._columns:
            column = np.asarray(values[name])
            if column.shape != (num_rows,):
                raise self._shape_error(name, column, f"[{num_rows}]")
            if column.dtype.kind == "f" and view.dtype.kind != "f" and num_rows:
                raise LayoutError(f"field `{name}` is int32 but was given {column.dtype}.")
            view[:num_rows] = column
        for view, value in self._pads:
            view[num_rows:num_dirty] = value
        self._pack_table(num_rows, num_dirty, values)
        self._num_dirty_rows = num_rows

    def _pack_table(
        self, num_rows: int, num_dirty: int, values: Mapping[str, npt.ArrayLike]
    ) -> None:
        name, width = self.layout.table.name, self.layout.table.width
        table = np.asarray(values[name])
        if table.ndim != 2 or table.shape[0] != num_rows or table.shape[1] > width:
            raise self._shape_error(name, table, f"[{num_rows}, 0 to {width}]")
        used, dirty = table.shape[1], self._num_dirty_columns
        self._num_dirty_columns = max(used, dirty)
        self._table[:num_rows, :used] = table
        # A longer predecessor's blocks, to the right of and below this step's.
        self._table[:num_rows, used:dirty] = self._table_pad
        self._table[num_rows:num_dirty, : max(used, dirty)] = self._table_pad
        self._num_dirty_columns = used

    def _shape_error(self, name: str, given: npt.NDArray[np.generic], wanted: str) -> LayoutError:
        return LayoutError(
            f"field `{name}` has shape {list(given.shape)}; the step needs {wanted}."
        )
