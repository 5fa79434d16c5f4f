"""A row times a weight matrix, with the operation before or after it in the same kernel.

One row needs each weight once, so all that counts is how soon and how evenly they come from memory.
A program takes a few outputs: their weights, all of them for most models, are on their way into
registers before it waits for the kernel that computes its row (see `overlap`). On an H200 the
products of a 0.6B model take 0.32 ms so, 0.76 as cuBLAS does them, and 0.20 at the speed of memory.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import Kernel
from nanovllm.kernels.triton.overlap import let_next_begin, wait_for_previous


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """As `activation` does it: rounded in between, as two operations would."""
    wide = gate.to(dtype).to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@triton.jit
def _weights(weight, outputs, channels, inside, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """`[N, C]` weights of some outputs, from channel `FIRST` on."""
    place = weight + outputs.to(tl.int64)[:, None] * SIZE + FIRST + channels[None, :]
    return tl.load(place, mask=inside[:, None] & (FIRST + channels < SIZE)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_outputs"])
def _row_linear(
    x,
    norm,
    weight,
    bias,
    residual,
    output,
    num_outputs,
    eps,
    SIZE: tl.constexpr,
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
    channels = tl.arange(0, BLOCK_K)
    dtype = output.dtype.element_ty
    tile = _weights(weight, outputs, channels, inside, SIZE, 0)
    if GATES:  # the rows of the gate, then as many of what it lets through
        tile_up = _weights(weight, num_outputs + outputs, channels, inside, SIZE, 0)
    wait_for_previous(OVERLAPS)

    scale = 1.0
    if NORMS:
        squares = 0.0
        for first in tl.static_range(0, SIZE, BLOCK_K):
            values = tl.load(x + first + channels, mask=first + channels < SIZE, other=0.0)
            squares += tl.sum(values.to(tl.float32) * values.to(tl.float32))
        scale = tl.rsqrt(squares / SIZE + eps)
    total = tl.zeros([BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.static_range(0, SIZE, BLOCK_K):
        now = tile
        if GATES:
            now_up = tile_up
        if first + BLOCK_K < SIZE:  # on their way while these are multiplied
            tile = _weights(weight, outputs, channels, inside, SIZE, first + BLOCK_K)
            if GATES:
                tile_up = _weights(
                    weight, num_outputs + outputs, channels, inside, SIZE, first + BLOCK_K
                )
        is_channel = first + channels < SIZE
        values = tl.load(x + first + channels, mask=is_channel, other=0.0).to(tl.float32)
        if NORMS:
            weights = tl.load(norm + first + channels, mask=is_channel, other=0.0).to(tl.float32)
            normed = (values * scale).to(dtype).to(tl.float32)
            values = (normed * weights).to(dtype).to(tl.float32)
        total += tl.sum(now.to(tl.float32) * values[None, :], axis=1)
        if GATES:
            total_up += tl.sum(now_up.to(tl.float32) * values[None, :], axis=1)

    if BIASED:
        total += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
        if GATES:
            total_up += tl.load(bias + num_outputs + outputs, mask=inside, other=0.0).to(tl.float32)
    if GATES:
        total = silu_times(total, total_up, dtype)
    result = total.to(dtype)
    if ADDS:
        stream = tl.load(residual + outputs, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + stream).to(dtype)
    tl.store(output + outputs, result, mask=inside)


ROW_LINEAR = Kernel(_row_linear, fuses=True)
