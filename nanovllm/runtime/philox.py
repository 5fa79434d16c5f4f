"""Counter-based random numbers on the host. No state: the same key and counter, the same number.

The key of the cipher is a request's seed and the counter a token's position, so that a draw can be
made again at any time, on any row, in any batch, without knowing what was drawn before.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm.kernels.reference.philox import FLOAT_BITS, WORD_BITS, WORD_MASK, upper_bits

_UNIT = 2.0**-FLOAT_BITS

_FEW_ROWS = 12
"""Up to here plain integers beat numpy, whose calls cost the same for one row as for many."""


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Draw one number per row from its seed and position alone.

    Args:
        seeds: `[R]` the key of each row. Any integer: taken modulo 2**64.
        positions: `[R]` the counter of each row. Any integer: taken modulo 2**64.

    Returns:
        `[R]` float64 in [0, 1): multiples of 2**-53.
    """
    if len(seeds) <= _FEW_ROWS:
        pairs = zip(seeds, positions, strict=True)
        return np.array([upper_bits(_words(s), _words(p), 0) for s, p in pairs], np.float64) * _UNIT
    key = _columns(_words(seed) for seed in seeds)
    low = _columns(_words(position) for position in positions)
    return upper_bits(key, low, np.zeros(len(seeds), np.uint64)).astype(np.float64) * _UNIT


def _words(number: int) -> tuple[int, int]:
    """The low and the high word of a number modulo 2**64."""
    return number & WORD_MASK, (number >> WORD_BITS) & WORD_MASK


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    low, high = np.array(list(pairs), np.uint64).T
    return low, high
