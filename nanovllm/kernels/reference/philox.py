"""Philox4x32-10 in plain torch, on 32-bit words held in int64: see `nanovllm.runtime.philox`."""

import torch

MASK = 0xFFFF_FFFF
MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
NUM_ROUNDS = 10


def uniform(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """The upper 53 bits of the first two words of the cipher, as a number below 1."""
    k0, k1 = seed_low.long() & MASK, seed_high.long() & MASK
    c0 = position.long() & MASK
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(NUM_ROUNDS):
        # A product may wrap to a negative number: its bits are right, and the shift is masked.
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (odd >> 32) & MASK ^ c1 ^ k0
        c2 = (even >> 32) & MASK ^ c3 ^ k1
        c1, c3 = odd & MASK, even & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53
