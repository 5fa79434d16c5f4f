"""How this CPU multiplies weights of one type: the instructions inside a tile.

A step takes one word of a panel (see `panels`): for each of 16 weight rows, as many neighbouring
values as are multiplied at once. Beside it stand the same values of one input, copied into every
lane. Sixteen sums grow in the lanes of one register, and none ever has to be added up across lanes.

Two ways to multiply bfloat16: `vdpbf16ps`, where the CPU has AVX512-BF16, takes pairs as they are;
elsewhere both of a pair are widened to float32 first. Whole numbers of 8 bits are widened to 16 and
multiplied in pairs by `vpdpwssd`, or by what LLVM finds in its place. Everything else is left to
LLVM, which cuts the vectors to the CPU's own width.
"""

from typing import Any, Protocol

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config

F32, I8, I16, I32, I64 = (ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64)))
LANES = 16
F32S, I32S = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def _cpu_features() -> str:
    """LLVM's names of what the target CPU can do; Numba's own override comes first."""
    features: str = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    return features


HAS_BF16_DOT = "+avx512bf16" in _cpu_features()
"""Whether the CPU multiplies bfloat16 pairs itself."""

HAS_INT16_DOT = "+avx512vnni" in _cpu_features()
"""Whether the CPU multiplies int16 pairs and adds them to a sum in one instruction."""

HAS_32_REGISTERS = "+avx512f" in _cpu_features() or "+neon" in _cpu_features()
"""Whether a tile of 16 sums of 16 lanes fits into the vector registers."""


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know; LLVM only needs the name."""

    intrinsic_name = "bf16"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)

    def _to_string(self) -> str:
        return "bfloat"


def splat(b: Any, value: Any, vector: Any) -> Any:
    """A vector of 16 copies."""
    single = b.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return b.shuffle_vector(single, single, ir.Constant(I32S, [0] * LANES))


def zeros(vector: Any) -> Any:
    """A vector of 16 zeros."""
    return ir.Constant(vector, [ir.Constant(vector.element, 0)] * LANES)


def load(b: Any, address: Any, what: Any, align: int) -> Any:
    """Read a value of type `what`."""
    return b.load(b.inttoptr(address, what.as_pointer()), align=align)


def multiply_add(b: Any, first: Any, second: Any, total: Any) -> Any:
    """`first * second + total`, lane by lane, rounded once where the CPU can."""
    signature = ir.FunctionType(F32S, [F32S, F32S, F32S])
    fma = cgutils.get_or_insert_function(b.module, signature, "llvm.fmuladd.v16f32")
    return b.call(fma, [first, second, total])


class Kind(Protocol):
    """Weights of one type.

    Attributes:
        unit: Neighbouring values of a row that lie together and are multiplied at once.
        weight_bytes: Of a weight.
        input_dtype: Of the inputs.
        sums: LLVM's type of 16 sums, float32 or int32.
    """

    unit: int
    weight_bytes: int
    input_dtype: np.dtype[Any]
    sums: Any

    def load(self, b: Any, address: Any, mask: Any = None) -> Any:
        """Read a word of a panel: a unit of 16 rows. `mask` leaves of each unit what counts."""

    def spread(self, b: Any, address: Any) -> Any:
        """Read a unit of an input into every lane."""

    def step(self, b: Any, total: Any, weights: Any, x: Any) -> Any:
        """`total` and the products of what `load` and `spread` gave."""


class _Bf16Dot:
    """Weights and inputs bfloat16, in pairs, by `vdpbf16ps`."""

    unit, weight_bytes, input_dtype, sums = 2, 2, np.dtype(np.uint16), F32S
    _pairs = ir.VectorType(_BFloat(), 2 * LANES)

    def load(self, b: Any, address: Any, mask: Any = None) -> Any:
        words = load(b, address, I32S, 2)
        return b.bitcast(words if mask is None else b.and_(words, mask), self._pairs)

    def spread(self, b: Any, address: Any) -> Any:
        return b.bitcast(splat(b, load(b, address, I32, 2), I32S), self._pairs)

    def step(self, b: Any, total: Any, weights: Any, x: Any) -> Any:
        signature = ir.FunctionType(F32S, [F32S, self._pairs, self._pairs])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        dot = cgutils.get_or_insert_function(b.module, signature, name)
        return b.call(dot, [total, x, weights])


class _Bf16Shift:
    """Weights bfloat16, whose bits are the upper half of a float32; inputs float32."""

    unit, weight_bytes, input_dtype, sums = 2, 2, np.dtype(np.float32), F32S

    def load(self, b: Any, address: Any, mask: Any = None) -> Any:
        words = load(b, address, I32S, 2)
        if mask is not None:
            words = b.and_(words, mask)
        first = b.shl(words, ir.Constant(I32S, [16] * LANES))
        second = b.and_(words, ir.Constant(I32S, [0xFFFF0000] * LANES))
        return b.bitcast(first, F32S), b.bitcast(second, F32S)

    def spread(self, b: Any, address: Any) -> Any:
        return [splat(b, load(b, b.add(address, I64(at)), F32, 4), F32S) for at in (0, 4)]

    def step(self, b: Any, total: Any, weights: Any, x: Any) -> Any:
        total = multiply_add(b, weights[0], x[0], total)
        return multiply_add(b, weights[1], x[1], total)


class _Float32:
    """Weights and inputs float32."""

    unit, weight_bytes, input_dtype, sums = 1, 4, np.dtype(np.float32), F32S

    def load(self, b: Any, address: Any, mask: Any = None) -> Any:
        del mask  # a unit of one value has no second half
        return load(b, address, F32S, 4)

    def spread(self, b: Any, address: Any) -> Any:
        return splat(b, load(b, address, F32, 4), F32S)

    def step(self, b: Any, total: Any, weights: Any, x: Any) -> Any:
        return multiply_add(b, weights, x, total)


class _Int8:
    """Weights int8, inputs int16, sums int32; what they are worth is said by scales."""

    unit, weight_bytes, input_dtype, sums = 2, 1, np.dtype(np.int16), I32S
    _pairs = ir.VectorType(I16, 2 * LANES)

    def load(self, b: Any, address: Any, mask: Any = None) -> Any:
        del mask  # no cache is kept in int8
        return b.sext(load(b, address, ir.VectorType(I8, 2 * LANES), 1), self._pairs)

    def spread(self, b: Any, address: Any) -> Any:
        return splat(b, load(b, address, I32, 2), I32S)

    def step(self, b: Any, total: Any, weights: Any, x: Any) -> Any:
        if HAS_INT16_DOT:
            signature = ir.FunctionType(I32S, [I32S, I32S, I32S])
            name = "llvm.x86.avx512.vpdpwssd.512"
            dot = cgutils.get_or_insert_function(b.module, signature, name)
            return b.call(dot, [total, b.bitcast(weights, I32S), x])
        # LLVM knows this pattern: it is one `pmaddwd` on every x86-64.
        products = []
        for half in (0, 1):
            lanes = ir.Constant(I32S, list(range(half, 2 * LANES, 2)))
            factors = [
                b.sext(b.shuffle_vector(pairs, pairs, lanes), I32S)
                for pairs in (weights, b.bitcast(x, self._pairs))
            ]
            products.append(b.mul(*factors))
        return b.add(total, b.add(*products))


_BF16: Kind = _Bf16Dot() if HAS_BF16_DOT else _Bf16Shift()
_KINDS: dict[Any, Kind] = {types.float32: _Float32(), types.uint16: _BF16, types.int8: _Int8()}


def kind_of(weight_type: Any) -> Kind:
    """How weights of a Numba type are multiplied; uint16 holds the bits of bfloat16."""
    return _KINDS[weight_type]
