"""Philox4x32-10, on words of any kind: the cipher behind every random number of this package.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC11): a block cipher with ten cheap rounds, applied to a counter.
"""

from typing import Any, TypeVar, cast

import torch

Word = TypeVar("Word")
"""A 32-bit number, or `[R]` of them, in a type of 64 bits or more: an int, an array of uint64, or
an int64 tensor, of which a product may wrap."""

WORD_BITS = 32
WORD_MASK = 0xFFFF_FFFF
_NUM_ROUNDS = 10

_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
"""What each key word grows by from round to round: the golden ratio and the root of three, - 1."""

FLOAT_BITS = 53
"""As many bits as a float64 holds exactly, so that every value is equally likely and below 1."""


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Encrypt a counter with ten rounds of Philox.

    Args:
        counter: Four 32-bit words, the lowest first, all of the same type.
        key: Two 32-bit words, of that type.

    Returns:
        Four 32-bit words of random bits, of the type that was given.
    """
    # `Any`, as no common type has these operators.
    c0, c1, c2, c3 = cast(tuple[Any, ...], counter)
    k0, k1 = cast(tuple[Any, ...], key)
    for _ in range(_NUM_ROUNDS):
        even = c0 * _MULTIPLIERS[0]
        odd = c2 * _MULTIPLIERS[1]
        # Masked, as a product that wrapped is negative: its bits are right all the same.
        c0 = (odd >> WORD_BITS) & WORD_MASK ^ c1 ^ k0
        c2 = (even >> WORD_BITS) & WORD_MASK ^ c3 ^ k1
        c1 = odd & WORD_MASK
        c3 = even & WORD_MASK
        # After the last round the key moves once too often, which nobody sees.
        k0 = (k0 + _KEY_STEPS[0]) & WORD_MASK
        k1 = (k1 + _KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3


def upper_bits(key: tuple[Word, Word], low: tuple[Word, Word], zero: Word) -> Word:
    """53 random bits, the upper ones of the first two words of the cipher, of a 64-bit counter."""
    words: tuple[Any, ...] = philox4x32((low[0], low[1], zero, zero), key)
    bits: Word = words[0] << FLOAT_BITS - WORD_BITS | words[1] >> 2 * WORD_BITS - FLOAT_BITS
    return bits


def uniform(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """See `nanovllm.kernels.ops.uniform`."""
    key = seed_low.long() & WORD_MASK, seed_high.long() & WORD_MASK
    low = position.long() & WORD_MASK
    zero = torch.zeros_like(low)
    return upper_bits(key, (low, zero), zero).double() * 2.0**-FLOAT_BITS
