"""Matrix products for few inputs, by tiles: `y [M, N] = x [M, K] @ weight [N, K].T`.

Buffers are given as addresses, so that one compiled function serves every layer. Inputs and
outputs have rows up to the next of 1, 2, 4 and the multiples of 8: the rows behind M are computed
too, on whatever they hold, and never looked at.
"""

from numba import njit

from nanovllm.runtime.native.phases import claim, finish, wait_for
from nanovllm.runtime.native.tiles import (
    INPUTS_ARE_BF16,
    ROWS_OF_EIGHT,
    ROWS_OF_FOUR,
    bf16_1x1,
    bf16_1x2,
    bf16_1x4,
    bf16_1x8,
    bf16_rx4,
    bf16_rx8,
    f32_1x1,
    f32_1x2,
    f32_1x4,
    f32_1x8,
    f32_rx4,
    f32_rx8,
)

LENGTH_MULTIPLE = 32
"""`K` is a multiple of this: the values that the widest tile reads at a time."""

CHUNK_BYTES = 2**17
"""Weight bytes that a thread claims at a time: long runs stream well, short ones share well."""

CHUNK_ROWS_MULTIPLE = 12
"""So that whole tiles of 3 or of 4 rows fill a chunk."""

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def padded_rows(num_inputs: int) -> int:
    """Rows that the buffers of so many inputs have."""
    if num_inputs <= 2:
        return num_inputs
    return 4 if num_inputs <= 4 else -(-num_inputs // 8) * 8


@njit(**_OPTIONS)
def rows_times_inputs(
    weight: int, stride: int, bf16: int | None, length: int, x: int, num_inputs: int, y: int,
    y_stride: int, num_rows: int,
) -> None:  # fmt: skip
    """Multiply some weight rows with every input.

    Args:
        weight: Address of the first row.
        stride: Bytes from one row to the next.
        bf16: None if the weight is float32, 1 if it is bfloat16. Numba compiles only the branch
            that the argument's type leaves.
        length: `K`.
        x: Address of the inputs, bfloat16 where `INPUTS_ARE_BF16` and the weight is, else float32.
        num_inputs: `M`.
        y: Address of the output of the first row and the first input, float32.
        y_stride: Bytes from one input's outputs to the next one's.
        num_rows: Weight rows to multiply.
    """
    x_stride = length * (2 if bf16 is not None and INPUTS_ARE_BF16 else 4)
    if num_inputs == 1:
        for n in range(num_rows):
            w, to = weight + n * stride, y + 4 * n
            if bf16 is not None:
                bf16_1x1(w, stride, x, x_stride, to, y_stride, length)
            else:
                f32_1x1(w, stride, x, x_stride, to, y_stride, length)
    elif num_inputs == 2:
        for n in range(num_rows):
            w, to = weight + n * stride, y + 4 * n
            if bf16 is not None:
                bf16_1x2(w, stride, x, x_stride, to, y_stride, length)
            else:
                f32_1x2(w, stride, x, x_stride, to, y_stride, length)
    elif num_inputs <= 4:
        whole = num_rows // ROWS_OF_FOUR * ROWS_OF_FOUR
        for n in range(0, whole, ROWS_OF_FOUR):
            w, to = weight + n * stride, y + 4 * n
            if bf16 is not None:
                bf16_rx4(w, stride, x, x_stride, to, y_stride, length)
            else:
                f32_rx4(w, stride, x, x_stride, to, y_stride, length)
        for n in range(whole, num_rows):
            w, to = weight + n * stride, y + 4 * n
            if bf16 is not None:
                bf16_1x4(w, stride, x, x_stride, to, y_stride, length)
            else:
                f32_1x4(w, stride, x, x_stride, to, y_stride, length)
    else:
        whole = num_rows // ROWS_OF_EIGHT * ROWS_OF_EIGHT
        for n in range(0, whole, ROWS_OF_EIGHT):
            for m in range(0, num_inputs, 8):
                w, of, to = weight + n * stride, x + m * x_stride, y + 4 * n + m * y_stride
                if bf16 is not None:
                    bf16_rx8(w, stride, of, x_stride, to, y_stride, length)
                else:
                    f32_rx8(w, stride, of, x_stride, to, y_stride, length)
        for n in range(whole, num_rows):
            for m in range(0, num_inputs, 8):
                w, of, to = weight + n * stride, x + m * x_stride, y + 4 * n + m * y_stride
                if bf16 is not None:
                    bf16_1x8(w, stride, of, x_stride, to, y_stride, length)
                else:
                    f32_1x8(w, stride, of, x_stride, to, y_stride, length)


@njit(**_OPTIONS)
def rows_of_chunk(stride: int) -> int:
    """Weight rows that a thread claims at a time."""
    rows = CHUNK_BYTES // stride // CHUNK_ROWS_MULTIPLE * CHUNK_ROWS_MULTIPLE
    return max(rows, CHUNK_ROWS_MULTIPLE)


@njit(**_OPTIONS)
def matmul_phase(
    counters: int, phase: int, weight: int, bf16: int | None, num_rows: int, length: int, x: int,
    num_inputs: int, y: int,
) -> None:  # fmt: skip
    """A phase that multiplies a whole weight, `[N, K]`; `y` is `[padded M, N]`."""
    stride = length * (2 if bf16 is not None else 4)
    chunk_rows = rows_of_chunk(stride)
    num_chunks = -(-num_rows // chunk_rows)
    chunk = claim(counters, phase)
    while chunk < num_chunks:
        first = chunk * chunk_rows
        rows_times_inputs(
            weight + first * stride, stride, bf16, length, x, num_inputs, y + 4 * first,
            4 * num_rows, min(chunk_rows, num_rows - first),
        )  # fmt: skip
        finish(counters, phase)
        chunk = claim(counters, phase)
    wait_for(counters, phase, num_chunks)
