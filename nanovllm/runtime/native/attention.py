"""Paged attention: a few positions of a sequence, with the query heads that share a K/V head.

The rows of a query tile are these positions times these heads: all of them read the same keys and
values, once. A context is worked through in parts of 256 positions, so that scores stay in the
cache: each part gives a peak, a sum and weighted values, and parts are merged in order (the
rescaling of Milakov and Gimelshein 2018, arXiv:1805.02867). Where there are few query tiles,
threads share the parts; the bits are the same.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from nanovllm.runtime.native.buffers import floats, row_of, tile_inputs
from nanovllm.runtime.native.kinds import HAS_32_REGISTERS
from nanovllm.runtime.native.matmul import multiply, padded_rows
from nanovllm.runtime.native.options import INLINE, OPTIONS
from nanovllm.runtime.native.pages import GROUP
from nanovllm.runtime.native.panels import PANEL_ROWS
from nanovllm.runtime.native.softmax import exp, weigh
from nanovllm.runtime.native.tiles import GROUPS_AHEAD, sum_2x1, sum_2x2, sum_2x4, sum_2x8

HEAD_DIM_MULTIPLE = 32
"""`D` is a multiple of this: two panels of channels are added up at a time."""

PART = 256
"""Positions of a context that are worked through at a time."""

BLOCK_ROWS = 8 if HAS_32_REGISTERS else 4
"""Rows that values are added up for at a time."""

TILE_POSITIONS = 8
"""Most positions of a query tile."""


@register_jitable
def result_bytes(num_rows: int, head_dim: int) -> int:
    """Of the result of a part: for each row a peak, a sum, and `D` weighted sums, all float32."""
    return 4 * num_rows * (2 + head_dim)


@njit(**INLINE)
def attend_part(
    kind: Any, queries: int, num_heads: int, num_rows: int, head_dim: int, first_position: int,
    scale: Any, first: int, count: int, key_groups: Any, value_groups: Any, panel_stride: int,
    scores: int, weights: int, result: int,
) -> None:  # fmt: skip
    """One query tile and one part of its context.

    Args:
        kind: A number of the type of the cache.
        queries: Address of `[rows, D]`, row by row the heads of the tile's positions, in the type
            that the kind takes; readable up to the padding of the rows.
        num_heads: Heads of a position, which share the K/V head.
        num_rows: Positions of the tile times heads.
        head_dim: `D`.
        first_position: Of the tile.
        scale: Multiplies the scores.
        first: First position of the part.
        count: Positions of the part that any row attends to.
        key_groups: Addresses of the part's keys; see `pages.find_groups`.
        value_groups: The same for values.
        panel_stride: Bytes from one panel of channels to the next.
        scores: Address of `[padded rows, PART]` float32, scratch.
        weights: The same in the type that the kind takes.
        result: Address of the result, padded rows: `[rows]` peaks, largest scores; `[rows]` sums of
            the exponentials, 0 if the row sees nothing here; `[rows, D]` sums of the values, each
            times its exponential.
    """
    capacity = padded_rows(num_rows)
    query_stride = head_dim * tile_inputs(kind, queries, 1).itemsize
    num_groups = -(-count // GROUP)
    for g in range(0, num_groups, 2):
        second = min(g + 1, num_groups - 1)  # the last may stand alone
        ahead = key_groups[min(g + GROUPS_AHEAD, num_groups - 1)] - key_groups[g]
        multiply(
            kind, key_groups[g], key_groups[second] - key_groups[g], min(2, num_groups - g),
            head_dim, 0, queries, query_stride, 0, 0, num_rows, scores + 4 * PANEL_ROWS * g,
            4 * PART, ahead,
        )  # fmt: skip
    peaks, sums = floats(result, num_rows), floats(result + 4 * capacity, num_rows)
    num_weights = count + count % 2  # values are read in pairs
    for row in range(num_rows):
        seen = min(first_position + row // num_heads + 1 - first, count)
        row_weights = tile_inputs(kind, weights, (row + 1) * PART)[row * PART :]
        row_scores = row_of(scores, row, PART)
        if seen > 0:
            peaks[row], sums[row] = weigh(row_scores, seen, num_weights, scale, row_weights)
        else:
            peaks[row], sums[row] = np.float32(-np.inf), np.float32(0)
            row_weights[:num_weights] = 0  # the same bits in every type
    weight_stride = query_stride // head_dim * PART
    _add_values(
        kind, value_groups.ctypes.data, panel_stride, weights, weight_stride, num_rows, head_dim,
        count, result + 8 * capacity,
    )  # fmt: skip


@njit(**INLINE)
def _add_values(
    kind: Any, groups: int, panel_stride: int, weights: int, weight_stride: int, num_rows: int,
    head_dim: int, count: int, out: int,
) -> None:  # fmt: skip
    """`out = weights @ values` for all channels, two panels at a time."""
    out_stride = 4 * head_dim
    for panel in range(0, head_dim // PANEL_ROWS, 2):
        offset = panel * panel_stride
        for row in range(0, num_rows, BLOCK_ROWS):
            x, y = weights + row * weight_stride, out + row * out_stride + 4 * PANEL_ROWS * panel
            rows = num_rows - row
            if rows == 1:
                sum_2x1(kind, groups, offset, panel_stride, x, weight_stride, y, out_stride, count)
            elif rows == 2:
                sum_2x2(kind, groups, offset, panel_stride, x, weight_stride, y, out_stride, count)
            elif rows <= 4 or not HAS_32_REGISTERS:
                sum_2x4(kind, groups, offset, panel_stride, x, weight_stride, y, out_stride, count)
            else:
                sum_2x8(kind, groups, offset, panel_stride, x, weight_stride, y, out_stride, count)


@njit(**OPTIONS)
def merge(result: int, later: int, num_rows: int, head_dim: int, scale: Any) -> None:
    """Merge the result of a later part into that of the parts before it, in place."""
    capacity = padded_rows(num_rows)
    peaks, sums = floats(result, num_rows), floats(result + 4 * capacity, num_rows)
    later_peaks, later_sums = floats(later, num_rows), floats(later + 4 * capacity, num_rows)
    for row in range(num_rows):
        if later_sums[row] == 0:
            continue
        peak = max(peaks[row], later_peaks[row])
        mine = exp((peaks[row] - peak) * scale)
        theirs = exp((later_peaks[row] - peak) * scale)
        peaks[row] = peak
        sums[row] = sums[row] * mine + later_sums[row] * theirs
        total = attended_row(result, row, num_rows, head_dim)
        other = attended_row(later, row, num_rows, head_dim)
        for d in range(head_dim):
            total[d] = total[d] * mine + other[d] * theirs


@njit(**OPTIONS)
def attended_row(result: int, row: int, num_rows: int, head_dim: int) -> Any:
    """The weighted sums of one row of a result, `[D]`."""
    return row_of(result + 8 * padded_rows(num_rows), row, head_dim)


@njit(**OPTIONS)
def finish_row(result: int, row: int, num_rows: int, head_dim: int) -> Any:
    """Divide a row by its sum, so that its weights add up to 1; returns it, `[D]`."""
    attended = attended_row(result, row, num_rows, head_dim)
    share = np.float32(1) / floats(result + 4 * padded_rows(num_rows), num_rows)[row]
    for d in range(head_dim):
        attended[d] *= share
    return attended
