"""Paged attention of one position: the query heads that share a key/value head, together."""

from typing import Any

import numpy as np
from numba import njit

from nanovllm.runtime.native.matmul import rows_times_inputs
from nanovllm.runtime.native.tiles import (
    bf16_sum_1,
    bf16_sum_2,
    bf16_sum_4,
    f32_sum_1,
    f32_sum_2,
    f32_sum_4,
)
from nanovllm.runtime.native.values import float_of_bits

HEAD_DIM_MULTIPLE = 32
"""`D` is a multiple of this: the channels that are multiplied and added up at a time."""

OPTIONS = {"nogil": True, "error_model": "numpy"}


@njit(**OPTIONS)
def exp(x: Any) -> Any:
    """`e ** x` in float32 for x <= 88, to 2 units in the last place; 0 below -87.

    Written out so that LLVM vectorises loops over it: 2 ** n by the exponent's bits, times a
    polynomial for the rest (Cephes' `expf`: Moshier 1992, netlib).
    """
    x = max(x, np.float32(-87.33))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    tail = np.float32(1.9875691500e-4)
    tail = tail * rest + np.float32(1.3981999507e-3)
    tail = tail * rest + np.float32(8.3334519073e-3)
    tail = tail * rest + np.float32(4.1665795894e-2)
    tail = tail * rest + np.float32(1.6666665459e-1)
    tail = tail * rest + np.float32(5.0000001201e-1)
    power = float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return (tail * rest * rest + rest + np.float32(1)) * power


@njit(**OPTIONS)
def softmax(scores: Any, count: int, scale: Any) -> None:
    """`scores[:count]` to weights that sum to 1, in place."""
    peak = scores[0]
    for i in range(1, count):
        peak = max(peak, scores[i])
    for i in range(count):
        scores[i] = exp((scores[i] - peak) * scale)
    share = np.float32(1) / total(scores, count)
    for i in range(count):
        scores[i] *= share


@njit(**OPTIONS)
def total(values: Any, count: int) -> Any:
    """Sum of `values[:count]`, in eight sums that do not wait for each other."""
    a = b = c = d = e = f = g = h = np.float32(0)
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    for i in range(whole, count):
        a += values[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@njit(**OPTIONS)
def inverse_rms(values: Any, eps: Any) -> Any:
    """One over the root mean square; summed like `total`. The length is a multiple of 8."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for i in range(0, values.shape[0], 8):
        a += values[i] * values[i]
        b += values[i + 1] * values[i + 1]
        c += values[i + 2] * values[i + 2]
        d += values[i + 3] * values[i + 3]
        e += values[i + 4] * values[i + 4]
        f += values[i + 5] * values[i + 5]
        g += values[i + 6] * values[i + 6]
        h += values[i + 7] * values[i + 7]
    squares = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return np.float32(1) / np.sqrt(squares / np.float32(values.shape[0]) + eps)


@njit(**OPTIONS)
def attend(
    query: int, group: int, head_dim: int, keys: int, values: int, bf16: int | None, stride: int,
    table: Any, block_size: int, num_context: int, scale: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """Attend from one position with the heads of one group.

    Args:
        query: Address of the group's heads, `[group, D]`, in the type that tiles take.
        group: Query heads that share the key/value head.
        head_dim: `D`.
        keys: Address of the head's key in slot 0.
        values: Address of the head's value in slot 0.
        bf16: None if the cache is float32, 1 if it is bfloat16.
        stride: Bytes from one slot to the next.
        table: `[W]` int32, the sequence's block table.
        block_size: Positions a block.
        num_context: Positions to attend to.
        scale: Multiplies the scores.
        scores: `[padded group, at least num_context]` float32, scratch.
        out: `[group, D]` float32.
    """
    row_bytes = scores.shape[1] * 4
    for start in range(0, num_context, block_size):
        count = min(block_size, num_context - start)
        block = keys + table[start // block_size] * block_size * stride
        to = scores.ctypes.data + 4 * start
        rows_times_inputs(block, stride, bf16, head_dim, query, group, to, row_bytes, count)
    for head in range(group):
        softmax(scores[head], num_context, scale)
        out[head, :] = np.float32(0)
    for start in range(0, num_context, block_size):
        count = min(block_size, num_context - start)
        block = values + table[start // block_size] * block_size * stride
        _add_values(
            block, bf16, stride, scores.ctypes.data + 4 * start, row_bytes,
            out.ctypes.data, group, head_dim, count,
        )  # fmt: skip


@njit(**OPTIONS)
def _add_values(
    values: int, bf16: int | None, stride: int, weights: int, weights_stride: int, out: int,
    group: int, head_dim: int, count: int,
) -> None:  # fmt: skip
    """Add the weighted values of one block to the outputs of all heads of a group."""
    out_stride = 4 * head_dim
    value_bytes = 2 if bf16 is not None else 4
    for channel in range(0, head_dim, HEAD_DIM_MULTIPLE):
        v = values + channel * value_bytes
        head = 0
        while head < group:
            w, to = weights + head * weights_stride, out + head * out_stride + 4 * channel
            if group - head >= 4:
                if bf16 is not None:
                    bf16_sum_4(v, stride, w, weights_stride, to, out_stride, count)
                else:
                    f32_sum_4(v, stride, w, weights_stride, to, out_stride, count)
                head += 4
            elif group - head >= 2:
                if bf16 is not None:
                    bf16_sum_2(v, stride, w, weights_stride, to, out_stride, count)
                else:
                    f32_sum_2(v, stride, w, weights_stride, to, out_stride, count)
                head += 2
            else:
                if bf16 is not None:
                    bf16_sum_1(v, stride, w, weights_stride, to, out_stride, count)
                else:
                    f32_sum_1(v, stride, w, weights_stride, to, out_stride, count)
                head += 1
