"""Percentiles of a sample, and only those that the sample supports."""

import math
import statistics
from collections.abc import Iterable
from typing import Any, Self

import attrs

MIN_BEYOND = 2
"""A percentile needs this many samples beyond it: p99 needs 200, p99.9 needs 2000.

With fewer it is the largest sample or next to it, and comes out differently each time.
"""


@attrs.frozen
class Distribution:
    """Durations in seconds, sorted. Percentiles are samples themselves (nearest rank)."""

    sorted_s: tuple[float, ...]

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Self:
        """Sort a sample."""
        return cls(tuple(sorted(values_s)))

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return len(self.sorted_s)

    @property
    def mean_s(self) -> float | None:
        """None of no samples, as all the others."""
        return statistics.fmean(self.sorted_s) if self.sorted_s else None

    @property
    def max_s(self) -> float | None:
        """The largest."""
        return self.sorted_s[-1] if self.sorted_s else None

    @property
    def median_s(self) -> float | None:
        """The 50th percentile, of any sample."""
        return nearest_rank(self.sorted_s, 50) if self.sorted_s else None

    def percentile_s(self, percent: float) -> float | None:
        """The percentile, None if the sample is too small for it."""
        if self.num_samples < num_samples_needed(percent):
            return None
        return nearest_rank(self.sorted_s, percent)

    def as_data(self) -> dict[str, Any]:
        """For JSON: what the sample supports, and in `left_out` why the rest is missing."""
        data: dict[str, Any] = {
            "num_samples": self.num_samples,
            "mean_s": self.mean_s,
            "p50_s": self.median_s,
        }
        left_out = []
        for percent in (90, 95, 99, 99.9):
            value = self.percentile_s(percent)
            if value is None:
                left_out.append(f"p{percent:g} needs {num_samples_needed(percent)}")
            else:
                data[f"p{percent:g}_s"] = value
        data["max_s"] = self.max_s
        if left_out:
            data["left_out"] = f"{', '.join(left_out)} samples; there are {self.num_samples}"
        return data


def nearest_rank(sorted_values: "tuple[float, ...] | list[float]", percent: float) -> float:
    """The smallest sample that `percent` of the samples do not exceed; of a sorted sample."""
    # Rounded before it is rounded up, as 99.9 % of 2000 is 1998.0000000000002 to a computer.
    rank = math.ceil(round(len(sorted_values) * percent / 100, 9))
    return sorted_values[max(rank, 1) - 1]  # -1: ranks count from 1


def num_samples_needed(percent: float) -> int:
    """The smallest sample that supports a percentile above the median."""
    return 1 if percent <= 50 else math.ceil(round(MIN_BEYOND * 100 / (100 - percent), 9))
