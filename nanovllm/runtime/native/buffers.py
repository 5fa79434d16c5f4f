"""What a step reads and writes: records of addresses and sizes, and views of what lies there.

To compiled code a record is one pointer. An array is seven values, and a step has dozens of them:
handed from function to function they took minutes to compile.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

from nanovllm.runtime.native.kinds import kind_of
from nanovllm.runtime.native.options import OPTIONS

Array = npt.NDArray[Any]

FLOAT_PADDING = 16
"""float32 behind each row of what tiles write, for the same reason as `memory.ROW_PADDING`."""


def _record_type(numbers: str, **others: Any) -> Any:
    """Fields of int64, and others whose types are given."""
    return np.dtype([*((name, np.int64) for name in numbers.split()), *others.items()], align=True)


MODEL = _record_type(
    "num_layers hidden_size inner_size num_kv_heads heads_per_group head_dim vocab_size"
    " logits_width"
    # Values that share a scale, with int8.
    " int8_group"
    # Panels of the embedding and of the output projection, and bytes from one to the next.
    " embedding lm_head lm_head_stride"
    # `[L, 4]` int64: first panels of the linear layers; then bytes from one panel to the next.
    " panels qkv_stride output_stride gate_up_stride down_stride"
    # float32, `[L, .]`; 0 where the family has none.
    " qkv_bias output_bias gate_up_bias down_bias"
    " input_norms post_norms query_norms key_norms final_norm"
    # `[D / 2]` float32.
    " frequencies",
    attention_factor=np.float32,
    eps=np.float32,
    scale=np.float32,
)
"""A model's sizes and the addresses of its weights."""

BUFFERS = _record_type(
    # The K/V cache, `[L, 2, cache_width]`, and the positions of a block.
    "cache cache_width block_size"
    # The batch, int32: `[T]` tokens, positions, and the block and place where their K/V go;
    " ids positions blocks offsets"
    # `[S, table_width]` the blocks of each sequence; `[R]` positions whose logits are wanted;
    " tables table_width logits_of"
    # `[tiles]` a query tile's first position, how many they are, and their row of `tables`.
    " tile_starts tile_sizes tile_rows"
    # Rows of float32 with padding: `E`, `E`, `(H + 2 K) D` and `2 I` long; without it: `D / 2`,
    # `D / 2` and logits.
    " hidden change qkv gate_up cos sin logits"
    # What linear layers read, in the type that their tiles take: rows of `E`, `H D` and `I` with
    # some bytes of padding; and, for int8, float32 scales, a row of `K / int8_group` each.
    " normed heads inner row_padding normed_scales heads_scales inner_scales"
    # `[K, query_rows, group, D]` in the type that tiles of the cache take.
    " queries query_rows"
    # Where threads share a context: `[units, max_parts]` of the result of a part, `part_bytes`.
    " parts max_parts part_bytes"
    # `[R]` float32 and int32: the largest logit of a row and its id; and those of parts of rows.
    " best_peaks best_ids part_peaks part_ids"
)
"""The K/V cache, the batch, and scratch memory."""

MEMBER = _record_type(
    # `[tile rows, PART]` float32, and the same in the type that tiles of the cache take.
    "scores weights"
    # `[2, PART, D]` in the type of the cache.
    " gathered"
    # `[PART / 16]` int64, `value_groups` with more behind them (see `tiles`).
    " key_groups value_groups"
    # A row of float32, `E` or `I` long.
    " row"
    # Two results of a part: of all parts so far, and of the newest.
    " result newest"
)
"""Scratch memory that each thread has for itself."""


def make_record(kind: Any, **fields: Any) -> Any:
    """A record; arrays are given by their addresses and have to outlive it."""
    record = np.zeros((), kind)
    for name, value in fields.items():
        record[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return record[()]


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    def codegen(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@njit(**OPTIONS)
def floats(address: int, length: int) -> Any:
    """A view of float32."""
    return carray(_pointer(address), (length,), np.float32)


@njit(**OPTIONS)
def row_of(address: int, row: int, length: int) -> Any:
    """One row of `[., length]` float32; empty where there are none, at address 0."""
    if address == 0:
        return floats(address, 0)
    return floats(address + 4 * row * length, length)


@njit(**OPTIONS)
def wide_row(address: int, row: int, length: int) -> Any:
    """One row of scratch memory: `[., length + FLOAT_PADDING]` float32, without the padding."""
    return floats(address + 4 * row * (length + FLOAT_PADDING), length)


@njit(**OPTIONS)
def int32s(address: int, length: int) -> Any:
    """A view of int32."""
    return carray(_pointer(address), (length,), np.int32)


@njit(**OPTIONS)
def int64s(address: int, length: int) -> Any:
    """A view of int64."""
    return carray(_pointer(address), (length,), np.int64)


def cells(kind: Any, address: int, length: int) -> Any:
    """A view of numbers as they are stored: of the type of `kind`. For kernels only."""
    raise TypeError("only for compiled code")


def tile_inputs(kind: Any, address: int, length: int) -> Any:
    """A view of numbers as tiles of this kind take them. For kernels only."""
    raise TypeError("only for compiled code")


# Numba wants the very parameters of an overload on what it returns, annotations included: none.
@overload(cells)
def _cells(kind, address, length):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    dtype = np.dtype(str(kind))
    return lambda kind, address, length: carray(_pointer(address), (length,), dtype)


@overload(tile_inputs)
def _tile_inputs(kind, address, length):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    dtype = kind_of(kind).input_dtype
    return lambda kind, address, length: carray(_pointer(address), (length,), dtype)


@njit(**OPTIONS)
def item_bytes(kind: Any) -> int:
    """Bytes of a number as it is stored."""
    return cells(kind, 0, 1).itemsize
