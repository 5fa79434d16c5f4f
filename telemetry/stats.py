"""Statistics over samples: distributions and log-bucket histograms.

Pure: numbers in, values out. A percentile is given only where the sample supports it, and is
always a value that was measured (nearest rank), never one interpolated between two.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

PERCENTS = (50, 90, 95, 99, 99.9)
MIN_BEYOND = 2
"""A percentile needs this many samples beyond it, or it is the maximum by another name."""

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

BUCKETS_PER_DECADE = 40  # each 6 percent wide


@attrs.frozen
class Percentile:
    """One percentile of a sample.

    Attributes:
        name: Such as "p99".
        value: The smallest measured value that at least this share of the sample does not exceed;
            None where the sample is too small for it.
        reason: Why there is no value.
    """

    name: str
    value: float | None
    reason: str | None = None


@attrs.frozen
class LogHistogram:
    """Counts in buckets of equal width on a logarithmic scale.

    The edges lie on one fixed grid (40 buckets per decade, 1.0 being an edge), so that the
    histograms of two runs can be laid over each other.

    Attributes:
        edges: `[B + 1]` bounds of the buckets, rising; empty for an empty sample.
        counts: `[B]` samples in `[edges[i], edges[i + 1])`.
        num_not_positive: Samples of zero or less, which have no place on the scale.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_not_positive: int = 0

    def coarser(self, factor: int) -> Self:
        """The same with each `factor` buckets of the grid joined into one."""
        if not self.counts:
            return self
        first = _bucket(self.edges[0])
        joined: Counter[int] = Counter()
        for i, count in enumerate(self.counts):
            joined[(first + i) // factor] += count
        groups = range(min(joined), max(joined) + 1)
        return attrs.evolve(
            self,
            edges=tuple(_edge(i * factor) for i in (*groups, groups.stop)),
            counts=tuple(joined[i] for i in groups),
        )


@attrs.frozen
class Distribution:
    """What a sample looks like.

    Attributes:
        num_samples: Samples counted, at least 1.
        min: Smallest.
        mean: Arithmetic mean.
        max: Largest.
        percentiles: p50, p90, p95, p99 and p99.9, in this order.
        histogram: The whole sample.
    """

    num_samples: int
    min: float
    mean: float
    max: float
    percentiles: tuple[Percentile, ...]
    histogram: LogHistogram

    @classmethod
    def of(
        cls, values: Iterable[float] | Floats, counts: Sequence[int] | Counts | None = None
    ) -> Self | None:
        """Describe a sample; None if it is empty.

        Args:
            values: `[N]` what was measured, in any order.
            counts: `[N]` how often each value occurred; once if None.
        """
        distinct, times = _distinct(values, counts)
        num_samples = int(times.sum())
        if not num_samples:
            return None
        return cls(
            num_samples=num_samples,
            min=float(distinct[0]),
            mean=math.fsum(distinct * times) / num_samples,
            max=float(distinct[-1]),
            percentiles=_percentiles(distinct, times, num_samples),
            histogram=_histogram(distinct, times),
        )

    def percentile(self, name: str) -> Percentile:
        """The percentile of that name."""
        return next(p for p in self.percentiles if p.name == name)


def nearest_rank(sorted_values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of a sorted, non-empty sample do not exceed."""
    return sorted_values[_rank(len(sorted_values), percent) - 1]  # -1: ranks count from 1


def num_samples_needed(percent: float) -> int:
    """The smallest sample that supports a percentile: p99 needs 200, p99.9 needs 2000."""
    return 1 if percent <= 50 else math.ceil(round(MIN_BEYOND * 100 / (100 - percent), 9))


def _rank(num_samples: int, percent: float) -> int:
    # Rounded before it is rounded up, as 99.9 % of 2000 is 1998.0000000000002 to a computer.
    return max(1, math.ceil(round(num_samples * percent / 100, 9)))


def _distinct(
    values: Iterable[float] | Floats, counts: Sequence[int] | Counts | None
) -> tuple[Floats, Counts]:
    """Each value once, rising, and how often it occurred."""
    if isinstance(values, np.ndarray):
        found = values.astype(np.float64)
    else:
        found = np.fromiter(values, np.float64)
    times = np.ones(len(found), np.int64) if counts is None else np.asarray(counts, np.int64)
    if not times.all():
        found, times = found[times > 0], times[times > 0]
    if not len(found):
        return found, times
    order = np.argsort(found)
    found, times = found[order], times[order]
    firsts = np.flatnonzero(np.concatenate(([True], found[1:] != found[:-1])))
    return found[firsts], np.add.reduceat(times, firsts)


def _percentiles(distinct: Floats, times: Counts, num_samples: int) -> tuple[Percentile, ...]:
    up_to = np.cumsum(times)
    found = []
    for percent in PERCENTS:
        name, needed = f"p{percent:g}", num_samples_needed(percent)
        if num_samples < needed:
            found.append(Percentile(name, None, f"{num_samples} of {needed} samples"))
        else:
            position = np.searchsorted(up_to, _rank(num_samples, percent))
            found.append(Percentile(name, float(distinct[position])))
    return tuple(found)


def log_histogram(
    values: Iterable[float] | Floats, counts: Sequence[int] | Counts | None = None
) -> LogHistogram:
    """Sort a sample into logarithmic buckets; the arguments are those of `Distribution.of`."""
    return _histogram(*_distinct(values, counts))


def _histogram(distinct: Floats, times: Counts) -> LogHistogram:
    num_not_positive = int(times[distinct <= 0].sum())
    values, times = distinct[distinct > 0], times[distinct > 0]
    if not len(values):
        return LogHistogram((), (), num_not_positive)
    # The values rise, so that looking up the edges between the first and the last is enough.
    edges = [_edge(i) for i in range(_bucket(values[0]), _bucket(values[-1]) + 2)]
    up_to = np.concatenate(([0], np.cumsum(times)))[np.searchsorted(values, edges)]
    return LogHistogram(tuple(edges), tuple(np.diff(up_to).tolist()), num_not_positive)


def _edge(bucket: int) -> float:
    """Lower bound of a bucket."""
    decade, part = divmod(bucket, BUCKETS_PER_DECADE)
    return math.pow(10, decade + part / BUCKETS_PER_DECADE)


def _bucket(value: float) -> int:
    bucket = math.floor(math.log10(value) * BUCKETS_PER_DECADE)
    # The logarithm is rounded: a value on an edge may come out one bucket to the side.
    if value >= _edge(bucket + 1):
        return bucket + 1
    return bucket - 1 if value < _edge(bucket) else bucket
