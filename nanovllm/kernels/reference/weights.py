"""Probabilities as integers, so that sums of them are exact.

A weight is `exp((logit - peak) / temperature)` in float32, times 2**40, rounded down. Integer sums
come out the same in any order, so that neither the number of rows, nor threads, nor a device's way
of adding up can move a result. What is less likely than 2**-40 of the most likely token counts as
impossible.
"""

import torch

WEIGHT_ONE = 2**40
"""The weight of a row's most likely token. The sum of 2**22 of them still fits an int64."""

MAX_TEMPERATURE = 1e30
"""More would be infinite in float32, and -inf / inf is NaN. Every distribution is flat by then."""

_LEAST_POWER = -64.0
"""`exp` of it is far below the least weight, 2**-40, and still a normal float32."""


def weigh(
    logits: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    min_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn logits into weights.

    Args:
        logits: `[R, C]` float32, none above the row's peak, no NaN. Not changed.
        peak: `[R, 1]` float32, finite: the largest logit of the row.
        temperature: `[R, 1]` float32 above 0 and not infinite, or one number.
        min_weight: `[R, 1]` float32: lesser weights become 0. None: all stay.

    Returns:
        `[R, C]` int64: `WEIGHT_ONE` at the peak, 0 where the logit is -inf.
    """
    powers = (logits - peak).div_(temperature)
    # Changes nothing but the time: `exp` is slow on -inf, of which a structure's rows are full.
    powers.clamp_(min=_LEAST_POWER)
    weights = powers.exp_().mul_(WEIGHT_ONE)
    if min_weight is not None:
        weights.mul_(weights >= min_weight)
    return weights.long()


def pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative weights.

    Args:
        weights: `[R, C]` int64, not all 0.
        u: `[R, 1]` float64 from 0 to 1 - 2**-53.

    Returns:
        `[R]` int64: the first index whose cumulative weight is above u times the sum. Its weight
        is never 0, as such a weight adds nothing and thus is not the first.
    """
    cumulative = weights.cumsum(dim=-1)
    # Below the sum, which nothing is above: 1 - u is at least the last bit of a float64, so that
    # rounding does not reach it.
    target = (cumulative[:, -1:] * u).long()
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def target_weight(mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """How much weight reaches a share of the mass: at least 1, so that some token is kept.

    Args:
        mass: `[R, 1]` int64, above 0.
        top_p: `[R, 1]` float64 in [0, 1].

    Returns:
        `[R, 1]` int64 in [1, mass].
    """
    return (mass * top_p).ceil().long().clamp(min=1).minimum(mass)
