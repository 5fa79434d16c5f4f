"""The K/V cache as the native step lays it out: in panels, like the weights.

A block holds the keys and values of its positions head by head. To scores, the keys of 16 positions
are a panel whose rows are positions; to sums, the values of 16 channels are a panel whose rows run
over the positions. Where blocks are no multiple of 16 positions long, a head's keys and values lie
position by position instead, and are put into panels when they are read: right, but slower.
"""

from typing import Any

from numba import njit

from nanovllm.runtime.native.buffers import cells, item_bytes
from nanovllm.runtime.native.options import INLINE, OPTIONS
from nanovllm.runtime.native.panels import PANEL_ROWS
from nanovllm.runtime.native.values import narrow

GROUP = PANEL_ROWS
"""Positions that are read together."""


@njit(**OPTIONS)
def write_position(
    key: Any, value: Any, offset: int, block_size: int, keys: Any, values: Any
) -> None:
    """Store a head of a position, `[D]` float32, at a place of its block.

    `keys` and `values` are all numbers of this head and block, `[block_size * D]`.
    """
    size = key.shape[0]
    if block_size % GROUP == 0:
        _write_in_panels(key, value, offset, block_size, keys, values)
        return
    for d in range(size):
        keys[offset * size + d] = narrow(key[d], keys)
        values[offset * size + d] = narrow(value[d], values)


@njit(**OPTIONS)
def _write_in_panels(
    key: Any, value: Any, offset: int, num_positions: int, keys: Any, values: Any
) -> None:
    """One of so many positions into panels."""
    size = key.shape[0]
    unit = 2 if keys.itemsize == 2 else 1
    lane = offset % GROUP
    to_key = (offset - lane) * size + lane * unit
    to_value = (offset - offset % unit) * GROUP + offset % unit
    for d in range(size):
        keys[to_key + (d - d % unit) * GROUP + d % unit] = narrow(key[d], keys)
        panel = (d - d % GROUP) * num_positions
        values[to_value + panel + d % GROUP * unit] = narrow(value[d], values)


@njit(**INLINE)
def find_groups(
    kind: Any, table: Any, first: int, count: int, block_size: int, head: int, num_heads: int,
    size: int, keys: int, values: int, gathered: int, num_gathered: int, key_groups: Any,
    value_groups: Any,
) -> int:  # fmt: skip
    """Where the panels of a part of a context lie.

    Args:
        kind: A number of the type of the cache.
        table: `[W]` int32, the sequence's block table.
        first: First position of the part, a multiple of 16.
        count: Positions.
        block_size: Positions of a block.
        head: K/V head, of `num_heads`.
        num_heads: `K`.
        size: `D`.
        keys: Address of the layer's keys.
        values: Address of the layer's values.
        gathered: Address of scratch for keys and values of `num_gathered` positions, for blocks
            that are no panels.
        num_gathered: At least `count`, a multiple of 16.
        key_groups: Written: address of the panel of each 16 positions.
        value_groups: Written: address of the first of their panels of channels.

    Returns:
        Bytes from one panel of channels to the next.
    """
    item = item_bytes(kind)
    num_groups = -(-count // GROUP)
    if block_size % GROUP == 0:
        for g in range(num_groups):
            position = first + g * GROUP
            start = (table[position // block_size] * num_heads + head) * block_size * size
            offset = position % block_size
            key_groups[g] = keys + (start + offset * size) * item
            value_groups[g] = values + (start + offset * GROUP) * item
        return block_size * GROUP * item
    room = num_gathered * size
    to_keys, to_values = gathered, gathered + room * item
    target_keys, target_values = cells(kind, to_keys, room), cells(kind, to_values, room)
    for o in range(count):
        position = first + o
        block = table[position // block_size] * num_heads + head
        start = (block * block_size + position % block_size) * size * item
        _write_in_panels(
            cells(kind, keys + start, size), cells(kind, values + start, size), o, num_gathered,
            target_keys, target_values,
        )  # fmt: skip
    for g in range(num_groups):
        key_groups[g] = to_keys + g * GROUP * size * item
        value_groups[g] = to_values + g * GROUP * GROUP * item
    return num_gathered * GROUP * item
