"""Dot products of a few weight rows with a few input rows at a time, as LLVM vector code.

A tile is R weight rows times M input rows: R * M accumulators that stay in registers while the
rows are read once. Weight rows lie one after the other in memory, and while a tile is read, the
same part of the next one is prefetched: with that, a tile of several rows streams as fast as one
row does, and the arithmetic of several input rows hides behind the memory.

Two ways to multiply bfloat16: `vdpbf16ps`, where the CPU has AVX512-BF16, takes both sides as they
are; elsewhere the bits are shifted into float32. Everything else is left to LLVM, which cuts the
vectors to the CPU's own width.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_LANES = 16
_F32S = ir.VectorType(_F32, _LANES)
_POINTER = ir.IntType(8).as_pointer()


def _cpu_features() -> str:
    """LLVM's names of what the target CPU can do; Numba's own override comes first."""
    features: str = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    return features


HAS_BF16_DOT = "+avx512bf16" in _cpu_features()
"""Whether the CPU multiplies bfloat16 pairs itself."""

HAS_32_REGISTERS = "+avx512f" in _cpu_features() or "+neon" in _cpu_features()
"""Whether a tile of 24 accumulators fits into the vector registers."""


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know; LLVM only needs the name."""

    intrinsic_name = "bf16"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)

    def _to_string(self) -> str:
        return "bfloat"


class _Bf16Dot:
    """Both sides bfloat16, 32 at a time, by `vdpbf16ps`."""

    values_per_step, weight_bytes, input_bytes = 32, 2, 2
    _vector = ir.VectorType(_BFloat(), 32)

    def load_weight(self, b: Any, address: Any) -> Any:
        return b.load(b.inttoptr(address, self._vector.as_pointer()), align=2)

    load_input = load_weight

    def step(self, b: Any, total: Any, weight: Any, x: Any) -> Any:
        signature = ir.FunctionType(_F32S, [_F32S, self._vector, self._vector])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        dot = cgutils.get_or_insert_function(b.module, signature, name)
        return b.call(dot, [total, x, weight])


class _Float32Dot:
    """Both sides float32."""

    values_per_step, weight_bytes, input_bytes = _LANES, 4, 4

    def load_weight(self, b: Any, address: Any) -> Any:
        return b.load(b.inttoptr(address, _F32S.as_pointer()), align=4)

    load_input = load_weight

    def step(self, b: Any, total: Any, weight: Any, x: Any) -> Any:
        signature = ir.FunctionType(_F32S, [_F32S, _F32S, _F32S])
        fma = cgutils.get_or_insert_function(b.module, signature, "llvm.fmuladd.v16f32")
        return b.call(fma, [weight, x, total])


class _Bf16Shift(_Float32Dot):
    """Weights bfloat16, whose bits are the upper half of a float32; inputs float32."""

    weight_bytes = 2

    def load_weight(self, b: Any, address: Any) -> Any:
        halves = ir.VectorType(_I16, _LANES)
        words = ir.VectorType(_I32, _LANES)
        loaded = b.load(b.inttoptr(address, halves.as_pointer()), align=2)
        shifted = b.shl(b.zext(loaded, words), ir.Constant(words, [16] * _LANES))
        return b.bitcast(shifted, _F32S)


def _make_tile(num_rows: int, num_inputs: int, kind: Any) -> Callable[..., None]:
    """An intrinsic `tile(weight, weight_stride, x, x_stride, y, y_stride, length)`.

    All are int64: addresses, strides in bytes, and the length in values, a multiple of the kind's
    `values_per_step`. Writes `num_inputs` rows of `num_rows` float32 dot products to `y`.
    """

    @intrinsic
    def tile(
        _typing: Any, weight: Any, weight_stride: Any, x: Any, x_stride: Any, y: Any,
        y_stride: Any, length: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
            weight, weight_stride, x, x_stride, y, y_stride, length = arguments
            weights = [b.add(weight, b.mul(weight_stride, _I64(i))) for i in range(num_rows)]
            inputs = [b.add(x, b.mul(x_stride, _I64(i))) for i in range(num_inputs)]
            next_tile = b.mul(weight_stride, _I64(num_rows))
            before, loop = b.block, b.append_basic_block("loop")
            after = b.append_basic_block("after")
            b.branch(loop)
            b.position_at_end(loop)
            index = b.phi(_I64)
            index.add_incoming(_I64(0), before)
            totals = [b.phi(_F32S) for _ in range(num_rows * num_inputs)]
            for total in totals:
                total.add_incoming(ir.Constant(_F32S, [ir.Constant(_F32, 0.0)] * _LANES), before)
            weight_offset = b.mul(index, _I64(kind.weight_bytes))
            input_offset = b.mul(index, _I64(kind.input_bytes))
            loaded = []
            for address in weights:
                here = b.add(address, weight_offset)
                if num_rows > 1:  # the CPU's own prefetcher follows a single row by itself
                    _prefetch(b, b.add(here, next_tile))
                loaded.append(kind.load_weight(b, here))
            sums = []
            for place, address in enumerate(inputs):
                value = kind.load_input(b, b.add(address, input_offset))
                for row in range(num_rows):
                    total = totals[place * num_rows + row]
                    sums.append(kind.step(b, total, loaded[row], value))
            following = b.add(index, _I64(kind.values_per_step))
            index.add_incoming(following, loop)
            for total, done in zip(totals, sums, strict=True):
                total.add_incoming(done, loop)
            b.cbranch(b.icmp_signed("<", following, length), loop, after)
            b.position_at_end(after)
            targets = [
                b.add(b.add(y, b.mul(y_stride, _I64(place))), _I64(4 * row))
                for place in range(num_inputs)
                for row in range(num_rows)
            ]
            _store_sums(b, sums, targets)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _prefetch(b: Any, address: Any) -> None:
    """Ask for a cache line that is read soon. An address past the end does no harm."""
    signature = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0i8")
    # For reading, kept in the outer caches, data.
    b.call(prefetch, [b.inttoptr(address, _POINTER), _I32(0), _I32(2), _I32(1)])


def _store_sums(b: Any, vectors: list[Any], targets: list[Any]) -> None:
    """Add up the lanes of each vector. Four at a time share the shuffles."""
    while len(vectors) >= 4:
        group, vectors = vectors[:4], vectors[4:]
        low = _add_halves(b, group[0], group[1])
        high = _add_halves(b, group[2], group[3])
        both = _add_pairs(b, low, high)
        eight = b.fadd(_shuffle(b, both, both, range(8)), _shuffle(b, both, both, range(8, 16)))
        four = b.fadd(_shuffle(b, eight, eight, range(4)), _shuffle(b, eight, eight, range(4, 8)))
        for lane in range(4):
            target = b.inttoptr(targets.pop(0), _F32.as_pointer())
            b.store(b.extract_element(four, _I32(lane)), target)
    for vector in vectors:
        signature = ir.FunctionType(_F32, [_F32, _F32S])
        add = cgutils.get_or_insert_function(b.module, signature, "llvm.vector.reduce.fadd.v16f32")
        total = b.call(add, [ir.Constant(_F32, -0.0), vector], fastmath=("reassoc",))
        b.store(total, b.inttoptr(targets.pop(0), _F32.as_pointer()))


def _add_halves(b: Any, first: Any, second: Any) -> Any:
    """In each quarter of the lanes: two partial sums of `first` beside two of `second`."""
    even = [lane for q in range(0, 16, 4) for lane in (q, q + 16, q + 1, q + 17)]
    odd = [lane + 2 for lane in even]
    return b.fadd(_shuffle(b, first, second, even), _shuffle(b, first, second, odd))


def _add_pairs(b: Any, first: Any, second: Any) -> Any:
    """In each quarter of the lanes: the sums of both pairs of `first`, then those of `second`."""
    low = [lane for q in range(0, 16, 4) for lane in (q, q + 1, q + 16, q + 17)]
    high = [lane + 2 for lane in low]
    return b.fadd(_shuffle(b, first, second, low), _shuffle(b, first, second, high))


def _shuffle(b: Any, first: Any, second: Any, lanes: Any) -> Any:
    mask = list(lanes)
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(mask)), mask))


BF16_KIND = _Bf16Dot() if HAS_BF16_DOT else _Bf16Shift()
F32_KIND = _Float32Dot()

INPUTS_ARE_BF16 = HAS_BF16_DOT
"""Whether tiles of bfloat16 weights take bfloat16 inputs too; float32 otherwise."""

# Measured on 2 cores with AVX512-BF16, all linear layers of SmolLM2-135M, in milliseconds: one row
# at a time takes 8.7 for 1 input and 8.8 for 2, then 11.0 for 4 and 15.6 for 8; four rows 9.7 for
# 4, three rows 9.6 for 8, 12.3 for 16 and 24 for 32. The memory alone takes 9.
ROWS_OF_FOUR = 4 if HAS_32_REGISTERS else 1
ROWS_OF_EIGHT = 3 if HAS_32_REGISTERS else 1

bf16_1x1 = _make_tile(1, 1, BF16_KIND)
bf16_1x2 = _make_tile(1, 2, BF16_KIND)
bf16_1x4 = _make_tile(1, 4, BF16_KIND)
bf16_1x8 = _make_tile(1, 8, BF16_KIND)
bf16_rx4 = _make_tile(ROWS_OF_FOUR, 4, BF16_KIND)
bf16_rx8 = _make_tile(ROWS_OF_EIGHT, 8, BF16_KIND)
f32_1x1 = _make_tile(1, 1, F32_KIND)
f32_1x2 = _make_tile(1, 2, F32_KIND)
f32_1x4 = _make_tile(1, 4, F32_KIND)
f32_1x8 = _make_tile(1, 8, F32_KIND)
f32_rx4 = _make_tile(ROWS_OF_FOUR, 4, F32_KIND)
f32_rx8 = _make_tile(ROWS_OF_EIGHT, 8, F32_KIND)

_SUM_WIDTH = 2 * _LANES
"""Value channels that `_make_weighted_sum` adds up at a time."""


def _make_weighted_sum(num_heads: int, kind: Any) -> Callable[..., None]:
    """An intrinsic `add(values, stride, weights, weights_stride, out, out_stride, count)`.

    Adds to `out`, `num_heads` rows of 32 float32, the sum over `count` rows of 32 values, each
    times its weight: what attention does with values. All int64: addresses, strides in bytes.
    """
    value_bytes = kind.weight_bytes

    @intrinsic
    def add(
        _typing: Any, values: Any, stride: Any, weights: Any, weights_stride: Any, out: Any,
        out_stride: Any, count: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
            values, stride, weights, weights_stride, out, out_stride, count = arguments
            before, loop = b.block, b.append_basic_block("loop")
            after = b.append_basic_block("after")
            targets, starts = [], []
            for head in range(num_heads):
                for half in range(2):
                    address = b.add(b.add(out, b.mul(out_stride, _I64(head))), _I64(half * 64))
                    targets.append(b.inttoptr(address, _F32S.as_pointer()))
                    starts.append(b.load(targets[-1], align=4))
            b.branch(loop)
            b.position_at_end(loop)
            index = b.phi(_I64)
            index.add_incoming(_I64(0), before)
            totals = [b.phi(_F32S) for _ in targets]
            for total, start in zip(totals, starts, strict=True):
                total.add_incoming(start, before)
            row = b.add(values, b.mul(stride, index))
            halves = [
                kind.load_weight(b, b.add(row, _I64(half * _LANES * value_bytes)))
                for half in range(2)
            ]
            signature = ir.FunctionType(_F32S, [_F32S, _F32S, _F32S])
            fma = cgutils.get_or_insert_function(b.module, signature, "llvm.fmuladd.v16f32")
            sums = []
            for head in range(num_heads):
                place = b.add(
                    b.add(weights, b.mul(weights_stride, _I64(head))), b.mul(index, _I64(4))
                )
                weight = b.load(b.inttoptr(place, _F32.as_pointer()), align=4)
                single = b.insert_element(ir.Constant(_F32S, ir.Undefined), weight, _I32(0))
                spread = _shuffle(b, single, single, [0] * _LANES)
                sums += [
                    b.call(fma, [halves[half], spread, totals[2 * head + half]])
                    for half in range(2)
                ]
            following = b.add(index, _I64(1))
            index.add_incoming(following, loop)
            for total, done in zip(totals, sums, strict=True):
                total.add_incoming(done, loop)
            b.cbranch(b.icmp_signed("<", following, count), loop, after)
            b.position_at_end(after)
            for target, done in zip(targets, sums, strict=True):
                b.store(done, target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return add


bf16_sum_1 = _make_weighted_sum(1, _Bf16Shift())
bf16_sum_2 = _make_weighted_sum(2, _Bf16Shift())
bf16_sum_4 = _make_weighted_sum(4, _Bf16Shift())
f32_sum_1 = _make_weighted_sum(1, F32_KIND)
f32_sum_2 = _make_weighted_sum(2, F32_KIND)
f32_sum_4 = _make_weighted_sum(4, F32_KIND)
