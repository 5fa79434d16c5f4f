"""Durations of a benchmark as its tables and its JSON show them."""

from collections.abc import Iterable
from typing import Any, Self

import attrs

from telemetry import stats
from telemetry.stats import nearest_rank, num_samples_needed

__all__ = ["Distribution", "nearest_rank", "num_samples_needed"]


@attrs.frozen
class Distribution:
    """Durations in seconds, of a sample that may be empty.

    Which percentiles a sample supports is the rule of `telemetry.stats`, so that a benchmark and
    the report of a run never differ in what they call a p99.

    Attributes:
        sample: What they look like; None if there are none.
    """

    sample: stats.Distribution | None

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Self:
        """Describe a sample."""
        return cls(stats.Distribution.of(values_s))

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return self.sample.num_samples if self.sample else 0

    @property
    def mean_s(self) -> float | None:
        """None of no samples, as all the others."""
        return self.sample.mean if self.sample else None

    @property
    def max_s(self) -> float | None:
        """The largest."""
        return self.sample.max if self.sample else None

    @property
    def median_s(self) -> float | None:
        """The 50th percentile, of any sample."""
        return self.percentile_s(50)

    def percentile_s(self, percent: float) -> float | None:
        """One of `telemetry.stats.PERCENTS`; None if the sample is too small for it."""
        return self.sample.percentile(f"p{percent:g}").value if self.sample else None

    def as_data(self) -> dict[str, Any]:
        """For JSON: what the sample supports, and in `left_out` why the rest is missing."""
        data: dict[str, Any] = {
            "num_samples": self.num_samples,
            "mean_s": self.mean_s,
            "p50_s": self.median_s,
        }
        left_out = []
        for percent in stats.PERCENTS[1:]:
            value = self.percentile_s(percent)
            if value is None:
                left_out.append(f"p{percent:g} needs {num_samples_needed(percent)}")
            else:
                data[f"p{percent:g}_s"] = value
        data["max_s"] = self.max_s
        if left_out:
            data["left_out"] = f"{', '.join(left_out)} samples; there are {self.num_samples}"
        return data
