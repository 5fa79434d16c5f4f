"""Counter-based random numbers: Philox4x32-10. No state: the same key and counter, the same number.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC11): a block cipher with ten cheap rounds, applied to a counter. The key is a request's seed
and the counter a token's position, so that a draw can be made again at any time, on any row, in
any batch, without knowing what was drawn before.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Word = TypeVar("Word", int, NDArray[np.uint64])
"""A 32-bit number, or `[R]` of them, in a type that holds 64 bits: a product must not wrap."""

_WORD_BITS = 32
_WORD_MASK = 0xFFFF_FFFF
_NUM_ROUNDS = 10

_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
"""What each key word grows by from round to round: the golden ratio and the root of three, - 1."""

_FLOAT_BITS = 53
"""As many bits as a float64 holds exactly, so that every value is equally likely and below 1."""

_UNIT = 2.0**-_FLOAT_BITS

_FEW_ROWS = 12
"""Up to here plain integers beat numpy, whose calls cost the same for one row as for many."""


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Encrypt a counter with ten rounds of Philox.

    Args:
        counter: Four 32-bit words, the lowest first: all `int`, or all `[R]` uint64.
        key: Two 32-bit words, of the same type.

    Returns:
        Four 32-bit words of random bits, of the type that was given.
    """
    # `Any`, because numpy's annotations call a product with an `int` signed, which it is not.
    c0, c1, c2, c3 = cast(tuple[Any, ...], counter)
    k0, k1 = cast(tuple[Any, ...], key)
    for _ in range(_NUM_ROUNDS):
        even = c0 * _MULTIPLIERS[0]
        odd = c2 * _MULTIPLIERS[1]
        c0 = (odd >> _WORD_BITS) ^ c1 ^ k0
        c2 = (even >> _WORD_BITS) ^ c3 ^ k1
        c1 = odd & _WORD_MASK
        c3 = even & _WORD_MASK
        # After the last round the key moves once too often, which nobody sees.
        k0 = (k0 + _KEY_STEPS[0]) & _WORD_MASK
        k1 = (k1 + _KEY_STEPS[1]) & _WORD_MASK
    return c0, c1, c2, c3


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
        return np.array([_bits(_words(s), _words(p), 0) for s, p in pairs], np.float64) * _UNIT
    key = _columns(_words(seed) for seed in seeds)
    low = _columns(_words(position) for position in positions)
    return _bits(key, low, np.zeros(len(seeds), np.uint64)).astype(np.float64) * _UNIT


def _words(number: int) -> tuple[int, int]:
    """The low and the high word of a number modulo 2**64."""
    return number & _WORD_MASK, (number >> _WORD_BITS) & _WORD_MASK


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    low, high = np.array(list(pairs), np.uint64).T
    return low, high


def _bits(key: tuple[Word, Word], low: tuple[Word, Word], zero: Word) -> Word:
    """53 random bits: the upper ones of the first two words of the cipher."""
    words: tuple[Any, ...] = philox4x32((low[0], low[1], zero, zero), key)
    bits: Word = words[0] << _FLOAT_BITS - _WORD_BITS | words[1] >> 2 * _WORD_BITS - _FLOAT_BITS
    return bits
