"""Matrix products by tiles: `y [M, N] = x [M, K] @ weight [N, K].T`, the weight in panels.

Buffers are given as addresses, so that one compiled function serves every layer. Inputs and
outputs have rows up to the next of 1, 2, 4 and the multiples of 8: the rows behind M are computed
too, on whatever they hold, and never looked at.
"""

from typing import Any

from numba import njit
from numba.extending import register_jitable

from nanovllm.runtime.native.kinds import HAS_32_REGISTERS
from nanovllm.runtime.native.options import INLINE, OPTIONS
from nanovllm.runtime.native.panels import PANEL_ROWS
from nanovllm.runtime.native.phases import claim, finish, wait_for
from nanovllm.runtime.native.tiles import (
    product_1x1,
    product_1x2,
    product_1x4,
    product_1x8,
    product_2x8,
)

CHUNK_BYTES = 2**16
"""Weight bytes that a thread claims at a time: long runs stream well, short ones share well."""

MAX_CHUNK_INPUTS = 128
"""Inputs of a chunk: so that many threads find enough chunks in a long prompt."""

INPUT_BYTES = 3 * 2**17
"""And no more bytes of them than stay in a core's cache while panels stream by."""

MANY_INPUTS = 16
"""From so many inputs on a product is bound by arithmetic, and chunks are made small."""

AHEAD_BYTES = 4096
FEW_AHEAD_BYTES = 3072
"""How far ahead of the reading weights are fetched: of all inputs, and of one or two, which are
read the fastest (2 inputs: 0.96 of the time of 4,096; 4 and 8 are best with that)."""


@register_jitable
def padded_rows(num_inputs: int) -> int:
    """Rows that the buffers of so many inputs have."""
    if num_inputs <= 2:
        return num_inputs
    return 4 if num_inputs <= 4 else -(-num_inputs // 8) * 8


@njit(**OPTIONS)
def multiply(
    kind: Any, weight: int, panel_stride: int, num_panels: int, length: int, group: int, x: int,
    x_stride: int, scales: int, scales_stride: int, num_inputs: int, y: int, y_stride: int,
    ahead: int,
) -> None:  # fmt: skip
    """Multiply some panels with every input.

    Args:
        kind: A number of the type of the weights; see `panels.kind_number`.
        weight: Address of the first panel.
        panel_stride: Bytes from one panel to the next.
        num_panels: Panels to multiply.
        length: `K`.
        group: Values a scale, with int8.
        x: Address of the inputs, in the type that the kind takes.
        x_stride: Bytes from one input to the next.
        scales: Address of the inputs' own scales, with int8.
        scales_stride: Bytes from one input's scales to the next one's.
        num_inputs: `M`.
        y: Address of the output of the first row and the first input, float32.
        y_stride: Bytes from one input's outputs to the next one's.
        ahead: How many bytes ahead of the reading panels are fetched.
    """
    row_bytes = 4 * PANEL_ROWS
    if num_inputs == 1:
        for n in range(num_panels):
            product_1x1(
                kind, weight + n * panel_stride, 0, x, x_stride, scales, scales_stride,
                y + n * row_bytes, y_stride, length, group, ahead,
            )  # fmt: skip
    elif num_inputs == 2:
        for n in range(num_panels):
            product_1x2(
                kind, weight + n * panel_stride, 0, x, x_stride, scales, scales_stride,
                y + n * row_bytes, y_stride, length, group, ahead,
            )  # fmt: skip
    elif num_inputs <= 4 or not HAS_32_REGISTERS:
        for n in range(num_panels):
            for m in range(0, num_inputs, 4):
                product_1x4(
                    kind, weight + n * panel_stride, 0, x + m * x_stride, x_stride,
                    scales + m * scales_stride, scales_stride, y + m * y_stride + n * row_bytes,
                    y_stride, length, group, ahead,
                )  # fmt: skip
    else:
        in_pairs = num_panels // 2 * 2
        for n in range(0, in_pairs, 2):
            for m in range(0, num_inputs, 8):
                product_2x8(
                    kind, weight + n * panel_stride, panel_stride, x + m * x_stride, x_stride,
                    scales + m * scales_stride, scales_stride, y + m * y_stride + n * row_bytes,
                    y_stride, length, group, ahead,
                )  # fmt: skip
        if in_pairs < num_panels:
            for m in range(0, num_inputs, 8):
                product_1x8(
                    kind, weight + in_pairs * panel_stride, 0, x + m * x_stride, x_stride,
                    scales + m * scales_stride, scales_stride,
                    y + m * y_stride + in_pairs * row_bytes, y_stride, length, group, ahead,
                )  # fmt: skip


@njit(**INLINE)
def chunk_panels(panel_stride: int, num_inputs: int) -> int:
    """Panels that a thread claims at a time, an even number."""
    if num_inputs >= MANY_INPUTS:
        return 2
    return max(CHUNK_BYTES // panel_stride // 2 * 2, 2)


@njit(**INLINE)
def matmul_phase(
    counters: int, phase: int, kind: Any, weight: int, panel_stride: int, num_rows: int,
    length: int, group: int, x: int, x_stride: int, scales: int, num_inputs: int, y: int,
    y_stride: int,
) -> None:  # fmt: skip
    """A phase that multiplies a whole weight; see `multiply`.

    `num_rows` is N with its padding to whole panels.
    """
    num_panels = num_rows // PANEL_ROWS
    scales_stride = 4 * length // group if group > 0 else 0
    at_a_time = chunk_panels(panel_stride, num_inputs)
    num_parts = -(-num_panels // at_a_time)
    at_once = max(min(MAX_CHUNK_INPUTS, INPUT_BYTES // x_stride // 8 * 8), 8)
    num_chunks = num_parts * -(-num_inputs // at_once)
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        # All panels with some inputs, then with the next: the inputs stay in the cache.
        n, m = chunk % num_parts * at_a_time, chunk // num_parts * at_once
        multiply(
            kind, weight + n * panel_stride, panel_stride, min(at_a_time, num_panels - n), length,
            group, x + m * x_stride, x_stride, scales + m * scales_stride, scales_stride,
            min(at_once, num_inputs - m), y + m * y_stride + 4 * PANEL_ROWS * n, y_stride,
            FEW_AHEAD_BYTES if num_inputs <= 2 else AHEAD_BYTES,
        )  # fmt: skip
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_for(counters, phase, num_chunks)
