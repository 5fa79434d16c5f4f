"""The first of the largest logits of a row, found where the logits are made.

Done after the step instead, by numpy and torch, it took 0.2 ms of each token: code and logits come
from memory then, as the step has just read all weights through the caches.
"""

from typing import Any

import numpy as np
from numba import njit

from nanovllm.runtime.native.buffers import floats, int32s
from nanovllm.runtime.native.options import OPTIONS

BEST_PART = 8192
"""Logits that a thread looks at at a time."""
_LEAST, _ALL_BUT_SIGN, _INFINITY = np.int32(-(2**31)), np.int32(2**31 - 1), np.int32(0x7F800000)


@njit(**OPTIONS)
def best_of_part(address: int, length: int, first: int, place: int, buffers: Any) -> None:
    """Write down the first of the largest of some logits; a NaN is larger than all.

    `first` is the id of the first of them, and `place` where the result goes.
    """
    logits, bits = floats(address, length), int32s(address, length)
    # As integers of the same order: a compiler makes vector instructions of these, but not of
    # float maxima, whose order is not total.
    peak, num_nan = _LEAST, 0
    for index in range(length):
        key = bits[index] ^ ((bits[index] >> 31) & _ALL_BUT_SIGN)
        peak = max(peak, key)
        num_nan += (bits[index] & _ALL_BUT_SIGN) > _INFINITY
    best = 0
    if num_nan > 0:
        while logits[best] == logits[best]:
            best += 1
    else:
        int32s(buffers.part_ids, place + 1)[place] = peak ^ ((peak >> 31) & _ALL_BUT_SIGN)
        largest = floats(buffers.part_ids, place + 1)[place]
        while logits[best] != largest:
            best += 1
    largest = logits[best]
    floats(buffers.part_peaks, place + 1)[place] = largest
    int32s(buffers.part_ids, place + 1)[place] = first + best


@njit(**OPTIONS)
def best_of_row(row: int, num_parts: int, buffers: Any) -> None:
    """Choose among the parts of a row, the first of equal ones."""
    start = row * num_parts
    peaks = floats(buffers.part_peaks, start + num_parts)
    ids = int32s(buffers.part_ids, start + num_parts)
    largest, best = peaks[start], ids[start]
    for place in range(start + 1, start + num_parts):
        # A NaN stays, and the first NaN wins.
        if largest == largest and not peaks[place] <= largest:
            largest, best = peaks[place], ids[place]
    floats(buffers.best_peaks, row + 1)[row] = largest
    int32s(buffers.best_ids, row + 1)[row] = best
