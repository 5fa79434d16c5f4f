"""Reading and writing numbers that are kept as float32, or as the bits of bfloat16 in uint16.

`widen` and `narrow` are chosen by the array's type when a kernel is compiled, so one source serves
both types.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload


def widen(value: Any) -> Any:
    """The float32 of a stored number. For kernels only."""
    raise TypeError("only for compiled code")


def narrow(value: Any, like: Any) -> Any:
    """A float32 as it is stored in an array of the type of `like`. For kernels only."""
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
    if like.dtype == types.uint16:

        def round_to_even(value, like):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            bits = _bits_of(value)
            last_kept = (bits >> types.uint32(16)) & types.uint32(1)
            return types.uint16((bits + types.uint32(0x7FFF) + last_kept) >> types.uint32(16))

        return round_to_even
    return lambda value, like: value
