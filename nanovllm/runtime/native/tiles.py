"""Vector code: a few weight rows times a few inputs at a time, with all sums kept in registers.

A tile is P panels of 16 weight rows times M inputs: P * M registers of sums, while each weight is
read once and each input value once. Sixteen sums at a time are enough to keep the multipliers of a
CPU with AVX-512 busy all the time, and a panel read from one end to the other streams at the speed
of the memory, so that up to 8 inputs take no longer than one.

Every sum runs through its row in one order, whatever the tile: a row of a batch gets the same bits
whoever its neighbours are.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.runtime.native.atomics import emit_fetch
from nanovllm.runtime.native.kinds import (
    F32,
    F32S,
    I8,
    I32,
    I32S,
    I64,
    LANES,
    kind_of,
    load,
    multiply_add,
    splat,
    zeros,
)

CACHE_LINE = 64
GROUPS_AHEAD = 4
"""How many groups of positions ahead values are fetched: their panels do not follow each other."""

SCALES_BYTES = 4 * LANES
"""Of a group of int8 weights: a float32 for each row of the panel, in front of the group."""

_POINTER = I8.as_pointer()
Tile = Callable[..., None]


def _make_product(num_panels: int, num_inputs: int) -> Tile:
    """An intrinsic that multiplies whole rows.

    `tile(kind, panel, panel_stride, x, x_stride, scales, scales_stride, y, y_stride, length, group,
    ahead)`: all but the first int64. `kind` is a number of the weights' type. Addresses, strides in
    bytes between panels and between inputs; `length` in values, a multiple of 32. `scales` and
    `group`, values a scale, are for int8 only. While a word is read, the one that many bytes
    `ahead` is fetched. Writes M rows of 16 P float32 to `y`.
    """

    @intrinsic
    def tile(
        _typing: Any, kind: Any, panel: Any, panel_stride: Any, x: Any, x_stride: Any,
        scales: Any, scales_stride: Any, y: Any, y_stride: Any, length: Any, group: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        how = kind_of(kind)

        def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
            (_, panel, panel_stride, x, x_stride, scales, scales_stride, y, y_stride, length,
             group, ahead) = arguments  # fmt: skip
            panels = _rows(b, panel, panel_stride, num_panels)
            inputs = _rows(b, x, x_stride, num_inputs)
            targets = [
                b.add(row, I64(4 * LANES * place))
                for row in _rows(b, y, y_stride, num_inputs)
                for place in range(num_panels)
            ]
            starts = [zeros(how.sums)] * len(targets)
            if how.sums == F32S:
                sums = _products(b, how, panels, inputs, length, ahead, starts)
                for target, total in zip(targets, sums, strict=True):
                    _store(b, total, target)
                return context.get_dummy_value()
            # Sums of all groups so far: on the stack, as the rows of `y` may share cache lines.
            totals = [cgutils.alloca_once_value(b, zeros(F32S)) for _ in targets]
            input_scales = _rows(b, scales, scales_stride, num_inputs)
            group_bytes = b.add(b.mul(group, I64(LANES * how.weight_bytes)), I64(SCALES_BYTES))

            def one_group(index: Any, _: list[Any]) -> list[Any]:
                here = [b.add(one, b.mul(group_bytes, index)) for one in panels]
                words = [b.add(one, I64(SCALES_BYTES)) for one in here]
                at = b.mul(b.mul(group, index), I64(how.input_dtype.itemsize))
                sums = _products(
                    b, how, words, [b.add(one, at) for one in inputs], group, ahead, starts
                )
                row_scales = [load(b, address, F32S, 4) for address in here]
                place = 0
                for address in input_scales:
                    scale = load(b, b.add(address, b.mul(index, I64(4))), F32, 4)
                    spread = splat(b, scale, F32S)
                    for row_scale in row_scales:
                        total, worth = b.sitofp(sums[place], F32S), b.fmul(row_scale, spread)
                        before = b.load(totals[place])
                        b.store(multiply_add(b, total, worth, before), totals[place])
                        place += 1
                return []

            _for_range(b, b.udiv(length, group), 1, [], one_group)
            for target, total in zip(targets, totals, strict=True):
                _store(b, b.load(total), target)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 11), codegen

    return tile


def _make_weighted_sum(num_panels: int, num_inputs: int) -> Tile:
    """An intrinsic that adds up values over the positions of a context, each times its weight.

    `add(kind, groups, offset, panel_stride, x, x_stride, y, y_stride, count)`: all but the first
    int64. `groups` is the address of addresses, one for each 16 positions: `offset` bytes behind it
    lie panels of 16 channels each, whose rows run over these positions. `x` are M rows of weights.
    Writes M rows of 16 P float32, sums over the first `count` positions, to `y`. What lies behind
    them is not looked at; but there are `GROUPS_AHEAD` more addresses behind those in use, of what
    is fetched in advance.
    """

    @intrinsic
    def add(
        _typing: Any, kind: Any, groups: Any, offset: Any, panel_stride: Any, x: Any, x_stride: Any,
        y: Any, y_stride: Any, count: Any,
    ) -> Any:  # fmt: skip
        how = kind_of(kind)
        word_bytes = LANES * how.unit * how.weight_bytes

        def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
            _, groups, offset, panel_stride, x, x_stride, y, y_stride, count = arguments
            inputs = _rows(b, x, x_stride, num_inputs)

            def panels_of(group: Any) -> list[Any]:
                base = load(b, b.add(groups, b.mul(group, I64(8))), I64, 8)
                return _rows(b, b.add(base, offset), panel_stride, num_panels)

            def step(panels: list[Any], position: Any, sums: list[Any], mask: Any) -> list[Any]:
                at = b.mul(position, I64(how.input_dtype.itemsize))
                values = [how.load(b, address, mask) for address in panels]
                done = []
                for place, address in enumerate(inputs):
                    weight = how.spread(b, b.add(address, at))
                    for row, value in enumerate(values):
                        done.append(how.step(b, sums[place * num_panels + row], value, weight))
                return done

            def whole_group(group: Any, sums: list[Any]) -> list[Any]:
                panels, later = panels_of(group), panels_of(b.add(group, I64(GROUPS_AHEAD)))
                for unit in range(LANES // how.unit):
                    at = [b.add(address, I64(unit * word_bytes)) for address in panels]
                    for address in later:
                        emit_fetch(b, b.add(address, I64(unit * word_bytes)))
                    first = b.add(b.mul(group, I64(LANES)), I64(unit * how.unit))
                    sums = step(at, first, sums, None)
                return sums

            starts = [zeros(F32S)] * (num_panels * num_inputs)
            num_whole = b.lshr(count, I64(4))  # groups of LANES
            sums = _for_range(b, num_whole, 1, starts, whole_group)

            def one_unit(unit: Any, sums: list[Any]) -> list[Any]:
                panels = panels_of(num_whole)
                at = [b.add(address, b.mul(unit, I64(word_bytes))) for address in panels]
                first = b.add(b.mul(num_whole, I64(LANES)), b.mul(unit, I64(how.unit)))
                mask = None
                if how.unit == 2:
                    # The second of the last pair may be past the end, where anything lies.
                    inside = b.icmp_signed("<", b.add(first, I64(1)), count)
                    mask = splat(b, b.select(inside, I32(0xFFFFFFFF), I32(0xFFFF)), I32S)
                return step(at, first, sums, mask)

            rest = b.and_(count, I64(LANES - 1))
            num_units = b.lshr(b.add(rest, I64(how.unit - 1)), I64(how.unit - 1))
            sums = _for_range(b, num_units, 1, sums, one_unit)
            place = 0
            for row in _rows(b, y, y_stride, num_inputs):
                for panel in range(num_panels):
                    _store(b, sums[place], b.add(row, I64(4 * LANES * panel)))
                    place += 1
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 8), codegen

    return add


def _products(
    b: Any, how: Any, panels: list[Any], inputs: list[Any], length: Any, ahead: Any,
    starts: list[Any],
) -> list[Any]:  # fmt: skip
    """Sums over `length` values of every panel times every input, input by input."""
    word_bytes = LANES * how.unit * how.weight_bytes
    words = CACHE_LINE // word_bytes

    def one_line(index: Any, sums: list[Any]) -> list[Any]:
        line = b.mul(index, I64(CACHE_LINE))
        at = b.mul(index, I64(words * how.unit * how.input_dtype.itemsize))
        for address in panels:
            emit_fetch(b, b.add(b.add(address, line), ahead))
        for word in range(words):
            weights = [
                how.load(b, b.add(b.add(address, line), I64(word * word_bytes)))
                for address in panels
            ]
            done = []
            for place, address in enumerate(inputs):
                here = b.add(b.add(address, at), I64(word * how.unit * how.input_dtype.itemsize))
                x = how.spread(b, here)
                for row, weight in enumerate(weights):
                    done.append(how.step(b, sums[place * len(panels) + row], weight, x))
            sums = done
        return sums

    num_lines = b.udiv(length, I64(words * how.unit))
    return _for_range(b, num_lines, 1, starts, one_line)


def _for_range(
    b: Any, stop: Any, step: int, carried: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:  # fmt: skip
    """Repeat `body(index, carried) -> carried` for index from 0 below `stop`."""
    before, head = b.block, b.append_basic_block("head")
    inside, after = b.append_basic_block("inside"), b.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(I64(0), before)
    values = [b.phi(value.type) for value in carried]
    for value, start in zip(values, carried, strict=True):
        value.add_incoming(start, before)
    b.cbranch(b.icmp_signed("<", index, stop), inside, after)
    b.position_at_end(inside)
    done = body(index, values)
    index.add_incoming(b.add(index, I64(step)), b.block)
    for value, one in zip(values, done, strict=True):
        value.add_incoming(one, b.block)
    b.branch(head)
    b.position_at_end(after)
    return values


def _rows(b: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [b.add(start, b.mul(stride, I64(place))) for place in range(count)]


def _store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, F32S.as_pointer()), align=4)


product_1x1 = _make_product(1, 1)
product_1x2 = _make_product(1, 2)
product_1x4 = _make_product(1, 4)
product_1x8 = _make_product(1, 8)
product_2x8 = _make_product(2, 8)
sum_2x1 = _make_weighted_sum(2, 1)
sum_2x2 = _make_weighted_sum(2, 2)
sum_2x4 = _make_weighted_sum(2, 4)
sum_2x8 = _make_weighted_sum(2, 8)
