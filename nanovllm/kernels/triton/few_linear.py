"""A few rows times a weight matrix, with the operation before or after it in the same kernel.

Like `row_linear`, by matrix units: outputs are the rows of the product and the rows of `x` its
columns, of which a unit takes at least eight. The channels are shared among the warps of
a program as a batch of products, which are added up at the end.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import Kernel
from nanovllm.kernels.triton.overlap import let_next_begin, wait_for_previous
from nanovllm.kernels.triton.row_linear import silu_times


@triton.jit
def _weights(weight, outputs, channels, inside, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """`[P, N, C]` weights of some outputs, from channel `FIRST` on; `channels` is `[P, C]`."""
    place = weight + outputs.to(tl.int64)[None, :, None] * SIZE + FIRST + channels[:, None, :]
    is_channel = FIRST + channels < SIZE
    return tl.load(place, mask=inside[None, :, None] & is_channel[:, None, :], other=0.0)


@triton.jit
def _inputs(x, rows, count, channels, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """`[P, C, M]` channels of all rows, from channel `FIRST` on."""
    place = x + rows[None, None, :] * SIZE + FIRST + channels[:, :, None]
    is_channel = FIRST + channels < SIZE
    return tl.load(place, mask=is_channel[:, :, None] & (rows < count)[None, None, :], other=0.0)


@triton.jit(do_not_specialize=["count", "num_outputs"])
def _few_linear(
    x,
    norm,
    weight,
    bias,
    residual,
    output,
    count,
    num_outputs,
    eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMS: tl.constexpr,
    GATES: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < num_outputs
    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    dtype = output.dtype.element_ty
    tile = _weights(weight, outputs, channels, inside, SIZE, 0)
    if GATES:  # the rows of the gate, then as many of what it lets through
        tile_up = _weights(weight, num_outputs + outputs, channels, inside, SIZE, 0)
    wait_for_previous(OVERLAPS)

    if NORMS:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for first in tl.static_range(0, SIZE, PARTS * BLOCK_K):
            values = _inputs(x, rows, count, channels, SIZE, first).to(tl.float32)
            squares += tl.sum(tl.sum(values * values, axis=1), axis=0)
        scale = tl.rsqrt(squares / SIZE + eps)
    total = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    total_up = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.static_range(0, SIZE, PARTS * BLOCK_K):
        now = tile
        if GATES:
            now_up = tile_up
        if first + PARTS * BLOCK_K < SIZE:  # on their way while these are multiplied
            tile = _weights(weight, outputs, channels, inside, SIZE, first + PARTS * BLOCK_K)
            if GATES:
                tile_up = _weights(
                    weight,
                    num_outputs + outputs,
                    channels,
                    inside,
                    SIZE,
                    first + PARTS * BLOCK_K,
                )
        values = _inputs(x, rows, count, channels, SIZE, first)
        if NORMS:
            weights = tl.load(norm + first + channels, mask=first + channels < SIZE, other=0.0)
            normed = (values.to(tl.float32) * scale[None, None, :]).to(dtype).to(tl.float32)
            values = (normed * weights.to(tl.float32)[:, :, None]).to(dtype)
        total = tl.dot(now, values, total)
        if GATES:
            total_up = tl.dot(now_up, values, total_up)

    result = tl.sum(total, axis=0)
    result_up = tl.sum(total_up, axis=0)
    if BIASED:
        result += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATES:
            others = tl.load(bias + num_outputs + outputs, mask=inside, other=0.0)
            result_up += others.to(tl.float32)[:, None]
    if GATES:
        result = silu_times(result, result_up, dtype)
    result = result.to(dtype)
    place = rows[None, :] * num_outputs + outputs[:, None]
    exists = inside[:, None] & (rows < count)[None, :]
    if ADDS:
        stream = tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + stream).to(dtype)
    tl.store(output + place, result, mask=exists)


FEW_LINEAR = Kernel(_few_linear, fuses=True)
