"""Statistics over samples: distributions, log-bucket histograms, and the gaps between tokens.

Pure: numbers in, values out. A percentile is given only where the sample supports it, and is
always a value that was measured (nearest rank), never one interpolated between two.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import attrs

# Samples that a percentile needs: two must lie beyond it, or it is the maximum by another name.
SAMPLES_NEEDED = {"p50": 1, "p90": 20, "p95": 40, "p99": 200, "p99.9": 2000}

# Each percentile as a fraction of integers, so that a rank is exact for every number of samples.
_SHARES = {"p50": (1, 2), "p90": (9, 10), "p95": (19, 20), "p99": (99, 100), "p99.9": (999, 1000)}

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
    def of(cls, values: Iterable[float]) -> Self | None:
        """Describe `values`; None if there are none."""
        return cls.of_counts(Counter(values))

    @classmethod
    def of_counts(cls, counts: Mapping[float, int]) -> Self | None:
        """Describe a sample given as value -> how often it occurred; None if it is empty."""
        items = sorted((value, count) for value, count in counts.items() if count)
        if not items:
            return None
        num_samples = sum(count for _, count in items)
        return cls(
            num_samples=num_samples,
            min=items[0][0],
            mean=math.fsum(value * count for value, count in items) / num_samples,
            max=items[-1][0],
            percentiles=_percentiles(items, num_samples),
            histogram=log_histogram(dict(items)),
        )

    def percentile(self, name: str) -> Percentile:
        """The percentile of that name."""
        return next(p for p in self.percentiles if p.name == name)


def _percentiles(items: Sequence[tuple[float, int]], num_samples: int) -> tuple[Percentile, ...]:
    found = []
    position, below = 0, 0  # samples in items[:position]
    for name, (part, whole) in _SHARES.items():
        needed = SAMPLES_NEEDED[name]
        if num_samples < needed:
            found.append(Percentile(name, None, f"{num_samples} of {needed} samples"))
            continue
        rank = -(-num_samples * part // whole)  # rounded up; ranks count from 1
        while below + items[position][1] < rank:
            below += items[position][1]
            position += 1
        found.append(Percentile(name, items[position][0]))
    return tuple(found)


def log_histogram(counts: Mapping[float, int]) -> LogHistogram:
    """Sort a sample, given as value -> how often it occurred, into logarithmic buckets."""
    buckets: Counter[int] = Counter()
    num_not_positive = 0
    for value, count in counts.items():
        if value > 0:
            buckets[_bucket(value)] += count
        else:
            num_not_positive += count
    if not buckets:
        return LogHistogram((), (), num_not_positive)
    first, last = min(buckets), max(buckets)
    return LogHistogram(
        edges=tuple(_edge(i) for i in range(first, last + 2)),
        counts=tuple(buckets[i] for i in range(first, last + 1)),
        num_not_positive=num_not_positive,
    )


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


@attrs.frozen
class Gap:
    """The time between two outputs of a sequence, or of several that went through both steps.

    Attributes:
        step: Position of the step that ended the gap, in the steps given.
        previous_step: Position of the step that began it.
        stall_s: From the end of the one step to the end of the other: what a reader waits.
        num_tokens: Tokens that each of the sequences got at its end.
        num_seqs: Sequences that had this gap.
    """

    step: int
    previous_step: int
    stall_s: float
    num_tokens: int
    num_seqs: int

    @property
    def itl_s(self) -> float:
        """The inter-token latency of each of its tokens."""
        return self.stall_s / self.num_tokens


def token_gaps(ends_s: Sequence[float], sampled: Sequence[Sequence[int]]) -> list[Gap]:
    """Every gap between outputs of one sequence, in order of the steps that ended them.

    The first output of a sequence ends no gap: its wait is the time to first token.

    Args:
        ends_s: `[N]` when each step ended.
        sampled: `[N]` the ids of the sequences that got a token in it; an id stands once per token.
    """
    gaps = []
    last: dict[int, int] = {}  # sequence -> the last step that gave it a token
    for step, seq_ids in enumerate(sampled):
        # Sequences that decode together have the same gap, so that a step makes one or two.
        alike: Counter[tuple[int, int]] = Counter()
        for seq_id, num_tokens in Counter(seq_ids).items():
            if seq_id in last:
                alike[last[seq_id], num_tokens] += 1
            last[seq_id] = step
        gaps += [
            Gap(step, previous, ends_s[step] - ends_s[previous], num_tokens, num_seqs)
            for (previous, num_tokens), num_seqs in alike.items()
        ]
    return gaps


def itl_counts(gaps: Iterable[Gap]) -> Counter[float]:
    """Inter-token latencies in seconds -> how often: a gap over n tokens counts n times gap/n.

    Gaps are pooled over all sequences and never averaged per request first, which would hide the
    tail.
    """
    counts: Counter[float] = Counter()
    for gap in gaps:
        counts[gap.itl_s] += gap.num_tokens * gap.num_seqs
    return counts


def stall_counts(gaps: Iterable[Gap]) -> Counter[float]:
    """Gaps in seconds as a reader saw them -> how often, however many tokens came at their end."""
    counts: Counter[float] = Counter()
    for gap in gaps:
        counts[gap.stall_s] += gap.num_seqs
    return counts


def tpot_s(first_token_s: float | None, last_token_s: float, num_tokens: int) -> float | None:
    """Time per output token of one request: its decode time over the tokens after the first."""
    if first_token_s is None or num_tokens < 2:
        return None
    return (last_token_s - first_token_s) / (num_tokens - 1)
