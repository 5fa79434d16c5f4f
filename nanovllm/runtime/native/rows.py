"""What a step does to one position outside of matrix products: norms, rope, gates."""

from typing import Any

import numpy as np
from numba import njit

from nanovllm.runtime.native.buffers import (
    cells,
    floats,
    int32s,
    item_bytes,
    row_of,
    tile_inputs,
    wide_row,
)
from nanovllm.runtime.native.options import INLINE, OPTIONS
from nanovllm.runtime.native.pages import write_position
from nanovllm.runtime.native.panels import PANEL_ROWS
from nanovllm.runtime.native.softmax import exp, inverse_rms
from nanovllm.runtime.native.values import narrow, read_row, store_input


@njit(**INLINE)
def start_row(kind: Any, m: int, model: Any, buffers: Any) -> None:
    """Embedding, cosines and sines of position `m`."""
    size, half = model.hidden_size, model.head_dim // 2
    token_id = int32s(buffers.ids, m + 1)[m]
    position = np.float32(int32s(buffers.positions, m + 1)[m])
    panel = model.embedding + token_id // PANEL_ROWS * model.lm_head_stride
    read_row(
        cells(kind, panel, model.lm_head_stride // item_bytes(kind)), token_id % PANEL_ROWS,
        model.int8_group, wide_row(buffers.hidden, m, size),
    )  # fmt: skip
    cos, sin = row_of(buffers.cos, m, half), row_of(buffers.sin, m, half)
    frequencies = floats(model.frequencies, half)
    for i in range(half):
        angle = position * frequencies[i]
        cos[i] = np.cos(angle) * model.attention_factor
        sin[i] = np.sin(angle) * model.attention_factor


@njit(**OPTIONS)
def add_and_norm(
    kind: Any, m: int, has_change: bool, bias: int, bias_layer: int, norm: int, layer: int, to: int,
    model: Any, buffers: Any, member: Any,
) -> None:  # fmt: skip
    """`hidden += change + bias` of position `m`, then its norm to row `to` of what comes next.

    Without a change there is nothing to add. `bias` and `norm` are addresses of `[L, E]`.
    """
    size = model.hidden_size
    hidden, change = wide_row(buffers.hidden, m, size), wide_row(buffers.change, m, size)
    if has_change:
        for i in range(size):
            hidden[i] += change[i]
        added = row_of(bias, bias_layer, size)
        for i in range(added.shape[0]):
            hidden[i] += added[i]
    scale = inverse_rms(hidden, model.eps)
    weight = row_of(norm, layer, size)
    normed = floats(member.row, size)
    for i in range(size):
        normed[i] = hidden[i] * scale * weight[i]
    write_inputs(kind, normed, 0, buffers.normed, buffers.normed_scales, to, size, model, buffers)


@njit(**INLINE)
def gate(kind: Any, layer: int, m: int, model: Any, buffers: Any, member: Any) -> None:
    """`inner [I] = silu(gate) * up` of position `m`, from `gate_up [2 I]`."""
    size = model.inner_size
    gate_up = wide_row(buffers.gate_up, m, 2 * size)
    bias = row_of(model.gate_up_bias, layer, 2 * size)
    for i in range(bias.shape[0]):
        gate_up[i] += bias[i]
    gates, ups, gated = gate_up[:size], gate_up[size:], floats(member.row, size)
    for i in range(size):
        # Past -87 a sigmoid is 0 to float32 anyway.
        denominator = np.float32(1) + exp(min(-gates[i], np.float32(87)))
        gated[i] = gates[i] / denominator * ups[i]
    write_inputs(kind, gated, 0, buffers.inner, buffers.inner_scales, m, size, model, buffers)


@njit(**OPTIONS)
def write_inputs(
    kind: Any, source: Any, first: int, target: int, scales: int, row: int, length: int, model: Any,
    buffers: Any,
) -> None:  # fmt: skip
    """Write float32 into a row of what a linear layer reads, from its value `first` on.

    `target` and `scales` are the addresses of the rows, which are `length` values long.
    """
    item = tile_inputs(kind, target, 1).itemsize
    start = target + row * (length * item + buffers.row_padding) + first * item
    group = model.int8_group
    size = source.shape[0]
    num_scales = size // group if group > 0 else 0
    to = scales + 4 * (row * length + first) // max(group, 1)
    store_input(source, tile_inputs(kind, start, size), floats(to, num_scales), group)


@njit(**OPTIONS)
def _norm_and_turn(head: Any, norm: Any, eps: Any, cos: Any, sin: Any) -> None:
    """Norm and rope of one query or key head, in place; `norm` may be empty."""
    size, half = head.shape[0], cos.shape[0]
    if norm.shape[0]:
        scale = inverse_rms(head, eps)
        for i in range(size):
            head[i] *= scale * norm[i]
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@njit(**INLINE)
def prepare_heads(cache_kind: Any, layer: int, m: int, model: Any, buffers: Any) -> None:
    """Position `m`'s heads: bias, norm and rope; queries to their buffer, K/V to the cache."""
    size, num_kv_heads, group = model.head_dim, model.num_kv_heads, model.heads_per_group
    num_heads = num_kv_heads * group
    width = (num_heads + 2 * num_kv_heads) * size
    qkv = wide_row(buffers.qkv, m, width)
    bias = row_of(model.qkv_bias, layer, width)
    query_norm, key_norm = (
        row_of(model.query_norms, layer, size), row_of(model.key_norms, layer, size)
    )  # fmt: skip
    cos, sin = row_of(buffers.cos, m, size // 2), row_of(buffers.sin, m, size // 2)
    for i in range(bias.shape[0]):
        qkv[i] += bias[i]
    for head in range(num_heads):
        one = qkv[head * size : (head + 1) * size]
        _norm_and_turn(one, query_norm, model.eps, cos, sin)
        place = (head // group * buffers.query_rows + m) * group + head % group
        target = tile_inputs(cache_kind, buffers.queries, (place + 1) * size)[place * size :]
        for d in range(size):
            target[d] = narrow(one[d], target)
    block_size, item = buffers.block_size, item_bytes(cache_kind)
    block = int32s(buffers.blocks, m + 1)[m]
    offset = int32s(buffers.offsets, m + 1)[m]
    keys = buffers.cache + 2 * layer * buffers.cache_width * item
    values = keys + buffers.cache_width * item
    for head in range(num_kv_heads):
        first = (num_heads + head) * size
        second = first + num_kv_heads * size
        one = qkv[first : first + size]
        _norm_and_turn(one, key_norm, model.eps, cos, sin)
        start = (block * num_kv_heads + head) * block_size * size
        write_position(
            one, qkv[second : second + size], offset, block_size,
            cells(cache_kind, keys + start * item, block_size * size),
            cells(cache_kind, values + start * item, block_size * size),
        )  # fmt: skip
