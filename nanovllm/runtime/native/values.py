"""Reading and writing numbers that are kept as float32, as the bits of bfloat16, or as integers.

What an overload does is chosen by an array's type when a kernel is compiled, so that one source
serves every type: uint16 holds bfloat16, int16 holds inputs of int8 weights.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from nanovllm.runtime.native.options import OPTIONS
from nanovllm.runtime.native.panels import PANEL_ROWS


def widen(value: Any) -> Any:
    """The float32 of a stored number. For kernels only."""
    raise TypeError("only for compiled code")


def narrow(value: Any, like: Any) -> Any:
    """A float32, or what is stored already, as it is stored in an array of the type of `like`.

    For kernels only.
    """
    raise TypeError("only for compiled code")


@intrinsic
def _bits_of(_typing: Any, value: Any) -> Any:
    def codegen(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """The float32 that has these bits, given as uint32."""

    def codegen(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


# Numba wants the very parameters of an overload on what it returns, annotations included: none.
@overload(widen, inline="always")
def _widen(value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if value == types.uint16:
        return lambda value: float_of_bits(types.uint32(value) << types.uint32(16))
    return lambda value: value


@overload(narrow, inline="always")
def _narrow(value, like):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if like.dtype == types.uint16 and value != types.uint16:

        def round_to_even(value, like):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            bits = _bits_of(value)
            last_kept = (bits >> types.uint32(16)) & types.uint32(1)
            return types.uint16((bits + types.uint32(0x7FFF) + last_kept) >> types.uint32(16))

        return round_to_even
    return lambda value, like: value


MAX_INT16 = 32767
"""Largest input of int8 weights. 64 products with a weight of 127 still fit an int32."""


def store_input(source: Any, target: Any, scales: Any, group: int) -> None:
    """Write float32 numbers as a matrix product reads them. For kernels only.

    `target` is float32, bfloat16, or int16 with a number of `scales` for each `group` of values.
    """
    raise TypeError("only for compiled code")


@njit(**OPTIONS)
def _round_group(source: Any, target: Any) -> Any:
    """Round to int16, the largest to `MAX_INT16`; returns what a step is worth."""
    # Absolute values are in the order of their bits, and so are whole numbers to LLVM.
    bits = np.int32(0)
    for i in range(source.shape[0]):
        bits = max(bits, np.int32(_bits_of(source[i]) & np.uint32(0x7FFFFFFF)))
    if bits >= np.int32(0x7F800000):  # infinite or no number: so is what comes of it
        target[:] = 1
        return np.float32(np.nan)
    largest = float_of_bits(np.uint32(bits))
    inverse = np.float32(MAX_INT16) / largest if largest > 0 else np.float32(0)
    for i in range(source.shape[0]):
        target[i] = np.int16(np.int32(np.floor(source[i] * inverse + np.float32(0.5))))
    return largest / np.float32(MAX_INT16)


@overload(store_input)
def _store_input(source, target, scales, group):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if target.dtype == types.int16:

        def store_rounded(source, target, scales, group):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            for place in range(source.shape[0] // group):
                first, end = place * group, (place + 1) * group
                scales[place] = _round_group(source[first:end], target[first:end])

        return store_rounded

    def store_narrowed(source, target, scales, group):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for i in range(source.shape[0]):
            target[i] = narrow(source[i], target)

    return store_narrowed


def read_row(panel: Any, lane: int, group: int, target: Any) -> None:
    """Read one row of a weight out of its panel, as float32. For kernels only.

    `panel` is flat, in the type of the weight; `group` values have a scale, with int8.
    """
    raise TypeError("only for compiled code")


@overload(read_row)
def _read_row(panel, lane, group, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    rows = PANEL_ROWS
    if panel.dtype == types.int8:

        def read_scaled(panel, lane, group, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            scales = panel.view(np.float32)
            group_bytes = rows * (4 + group)
            for i in range(target.shape[0]):
                start = i // group * group_bytes
                place = start + 4 * rows + (i % group // 2 * rows + lane) * 2 + i % 2
                target[i] = np.float32(panel[place]) * scales[start // 4 + lane]

        return read_scaled
    unit = 2 if panel.dtype == types.uint16 else 1

    def read_plain(panel, lane, group, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for i in range(target.shape[0]):
            target[i] = widen(panel[(i // unit * rows + lane) * unit + i % unit])

    return read_plain
