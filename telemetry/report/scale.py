"""Axes: where a value lies between the ends of a scale, and which ticks a reader expects.

A scale answers in shares from 0 to 1, so that a drawing can have any size. Pure.
"""

import math
from collections.abc import Sequence
from typing import Protocol, Self

import attrs

# Steps within a decade, from close to wide.
_LOG_STEPS = ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))


class Scale(Protocol):
    """From a value to its place on an axis."""

    def at(self, value: float) -> float:
        """Where `value` lies: 0 is the low end, 1 the high end, cut off beyond them."""

    def ticks(self) -> tuple[float, ...]:
        """Round values on the axis, rising."""


@attrs.frozen
class LinearScale:
    """Equal steps, from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def from_zero(cls, highest: float, *, grain: float = 1.0) -> Self:
        """A scale from 0 to the first round multiple of `grain` that covers `highest`."""
        if highest <= 0:
            return cls(0.0, grain)
        step = _round_up(highest / grain / 4) * grain
        return cls(0.0, step * math.ceil(highest / step - 1e-9))

    def at(self, value: float) -> float:
        """Where `value` lies."""
        return _clip((value - self.low) / (self.high - self.low))

    def ticks(self) -> tuple[float, ...]:
        """Three to seven round values."""
        step = _round_up((self.high - self.low) / 6)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return tuple(i * step for i in range(first, last + 1))


@attrs.frozen
class LogScale:
    """Equal ratios, from `low` to `high`, both above 0."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Self:
        """A scale that covers positive values, with a little room at both ends."""
        low, high = min(values), max(values)
        return cls(low / 1.12, high * 1.12)

    def at(self, value: float) -> float:
        """Where `value` lies; nothing positive lies left of everything."""
        if value <= 0:
            return 0.0
        return _clip(math.log(value / self.low) / math.log(self.high / self.low))

    def ticks(self) -> tuple[float, ...]:
        """Round values, the closest set of which there are at most seven."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in _LOG_STEPS:
            ticks = [
                float(f"{step}e{decade}") for decade in range(first, last + 1) for step in steps
            ]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= 7:
                break
        return tuple(ticks)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _round_up(value: float) -> float:
    """The first of 1, 2, 2.5, 5, 10 times a power of ten that is not below `value`."""
    power = math.floor(math.log10(value))
    for step in (1, 2, 2.5, 5):
        rounded = float(f"{step}e{power}")
        if rounded >= value * (1 - 1e-9):
            return rounded
    return float(f"1e{power + 1}")
