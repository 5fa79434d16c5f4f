"""The most likely tokens that together reach a given weight, found without sorting.

A sort of a vocabulary takes milliseconds, as long as a small model's decode step. Here a float32
logit is read as a 32-bit integer of the same order, and the last logit that is kept is found digit
by digit, the upper bits first: the weights are added up by digit, and the digit is the one at
which the running sum reaches the target.
"""

import torch

_PASSES = ((21, 11), (10, 11), (0, 10))
"""Position and number of the bits of each digit."""

_SIGN = -(2**31)


def keep_nucleus(logits: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Set the weights outside of the nucleus to 0.

    The nucleus is the shortest beginning of the order of `runtime.ranking` (largest logit first,
    lowest id first among equals) whose weight reaches the target.

    Args:
        logits: `[R, V]` float32, no NaN.
        weights: `[R, V]` int64: falls with the logit, and is equal for equal logits.
        target: `[R, 1]` int64, from 1 to the sum of the weights.

    Returns:
        `[R, V]` int64.
    """
    keys = _falling_keys(logits)
    cut = torch.zeros_like(target)
    inside = weights
    for shift, num_bits in _PASSES:
        digits = ((keys >> shift) & ((1 << num_bits) - 1)).long()
        digit, target = _pass_target(digits, 1 << num_bits, inside, target)
        inside = inside * (digits == digit)
        cut |= digit << shift
    # With the sign bit turned, the order of unsigned integers is that of signed ones.
    above = (keys ^ _SIGN) < (cut + _SIGN).int()
    # Only ties are left inside. Keep one as long as those before it do not reach what is missing.
    needed = inside.cumsum(dim=-1) - inside < target
    return weights * above + inside * needed


def _falling_keys(logits: torch.Tensor) -> torch.Tensor:
    """`[R, V]` int32: as unsigned integers smaller for larger logits, and equal for equal ones."""
    # Adding 0 turns -0.0, which equals 0.0 and has other bits, into it.
    bits = (logits + 0.0).view(torch.int32)
    # As signed integers floats rise from 0.0 on, and fall with the sign bit set: turn these round.
    rising = bits ^ ((bits >> 31) & ~_SIGN)
    return ~rising ^ _SIGN


def _pass_target(
    digits: torch.Tensor, num_digits: int, weights: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the digit at which the running sum of weights, by digit, reaches the target.

    Args:
        digits: `[R, V]` int64 from 0 to `num_digits` - 1.
        num_digits: How many there may be.
        weights: `[R, V]` int64.
        target: `[R, 1]` int64, from 1 to the sum of the weights.

    Returns:
        `[R, 1]` int64 the digit, and `[R, 1]` int64 what the digits before it leave of the target.
    """
    mass = weights.new_zeros(len(weights), num_digits).scatter_add_(1, digits, weights)
    cumulative = mass.cumsum(dim=-1)
    digit = torch.searchsorted(cumulative, target)
    before = cumulative.gather(1, digit) - mass.gather(1, digit)
    return digit, target - before
