"""From times of two sides to a verdict: pure.

Three processes run the same blocks of work in turn: A and A' on the base, B on the head. Since
they take turns every few milliseconds, what the machine does to one it does to the others.

    estimate    median over the blocks of  time of B / time of the base (A and A')
    noise       the same of A' against A, where the true answer is known to be 1

All of this is one launch. Two processes on equal code differ by a per cent or two for as long as
they live (where their memory happens to lie), so there are several launches. The median launch
counts, and it must leave the noise floor: twice the median deviation of A' from A.
"""

import math
import statistics
from collections.abc import Sequence
from enum import Enum

import attrs

MIN_EFFECT = 0.04
"""Smaller changes are not told apart from none, however quiet the machine."""

ALPHA = 0.01
"""A change must be this unlikely to be chance: sign test over all blocks."""


class Verdict(Enum):
    """What a comparison says of a case."""

    REGRESSION = "regression"
    FASTER = "faster"
    NO_CHANGE = "no change"
    UNKNOWN = "can't be compared"


@attrs.frozen
class Launch:
    """One launch of the three processes.

    Attributes:
        base_s: `[K]` CPU time of each block of A, the least of its runs.
        again_s: `[K]` of A'.
        head_s: `[K]` of B.
    """

    base_s: Sequence[float]
    again_s: Sequence[float]
    head_s: Sequence[float]

    def ratios(self) -> list[float]:
        """`[K]` B against the base, block by block."""
        return [
            head / math.sqrt(base * again)
            for base, again, head in zip(self.base_s, self.again_s, self.head_s, strict=True)
        ]

    @property
    def estimate(self) -> float:
        """B against the base."""
        return statistics.median(self.ratios())

    @property
    def noise(self) -> float:
        """How far A' is from A, as a fraction."""
        pairs = zip(self.base_s, self.again_s, strict=True)
        return abs(math.log(statistics.median(again / base for base, again in pairs)))


@attrs.frozen
class Comparison:
    """All launches of a case."""

    case: str
    launches: tuple[Launch, ...]

    @property
    def base_s(self) -> float:
        """Least CPU time of a run on the base."""
        return min(min(*launch.base_s, *launch.again_s) for launch in self.launches)

    @property
    def head_s(self) -> float:
        """Least CPU time of a run on the head."""
        return min(min(launch.head_s) for launch in self.launches)

    @property
    def ratio(self) -> float:
        """Head against base: the median launch."""
        return statistics.median(launch.estimate for launch in self.launches)

    @property
    def floor(self) -> float:
        """Changes up to this fraction are noise."""
        return max(MIN_EFFECT, 2 * statistics.median(launch.noise for launch in self.launches))

    @property
    def chance(self) -> float:
        """How likely that many blocks fall on one side if nothing changed (two-sided)."""
        ratios = [ratio for launch in self.launches for ratio in launch.ratios()]
        return sign_test(sum(ratio > 1 for ratio in ratios), len(ratios))

    @property
    def verdict(self) -> Verdict:
        """What to make of it."""
        if abs(math.log(self.ratio)) <= self.floor or self.chance > ALPHA:
            return Verdict.NO_CHANGE
        return Verdict.REGRESSION if self.ratio > 1 else Verdict.FASTER

    @property
    def is_settled(self) -> bool:
        """Whether more launches would hardly change the verdict.

        It is if the ratio is far below where the verdict turns, or every launch is above it.
        """
        if abs(math.log(self.ratio)) <= MIN_EFFECT / 2:
            return True
        logs = [math.log(launch.estimate) for launch in self.launches]
        return min(logs) > self.floor or max(logs) < -self.floor


def sign_test(num_above: int, num_samples: int) -> float:
    """Probability of a split at least this uneven between two equally likely sides."""
    num_extreme = max(num_above, num_samples - num_above)
    tail = sum(math.comb(num_samples, k) for k in range(num_extreme, num_samples + 1))
    return min(1.0, 2 * tail / float(2**num_samples))
