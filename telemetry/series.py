"""Arithmetic over time series: as-of joins, time-weighted means, bands to draw, and energy.

Pure. A series is two sequences of one length: times that never fall, and values, where None means
that the reading was not available. Times are in seconds unless a name says otherwise.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs
import numpy as np

from telemetry.stats import Floats

Values = Sequence[float | None]
Readable: TypeAlias = Values | Floats

MIN_COUNTER_STEPS = 20
METHODS_DISAGREE = 0.1  # the two ways to measure energy differ by more than a tenth


def as_of(times: Sequence[float] | Floats, at: float) -> int | None:
    """Position of the last reading made at `at` or before; None if there is none.

    Readings are joined on when they were complete (`t1`): one that was still being made at `at`
    was not known yet.
    """
    position = int(np.searchsorted(times, at, "right")) - 1
    return position if position >= 0 else None


def available(times: Sequence[float], values: Values) -> tuple[list[float], list[float]]:
    """The readings that are there."""
    pairs = [(t, v) for t, v in zip(times, values, strict=True) if v is not None]
    return [t for t, _ in pairs], [v for _, v in pairs]


def held_mean(
    times: Sequence[float] | Floats, values: Sequence[float] | Floats, end: float
) -> float | None:
    """Time-weighted mean of a value that holds from its time until the next, the last until `end`.

    This suits what changes at steps, such as the blocks in use. None if no time passes.
    """
    if not len(times) or end <= times[0]:
        return None
    held = np.diff(np.asarray(times, np.float64), append=end)
    return float(np.sum(held * np.asarray(values)) / (end - times[0]))


def integral(times: Sequence[float], values: Sequence[float]) -> float:
    """Area under straight lines between the readings (the trapezoid rule).

    This suits what is sampled, such as power: watts over seconds give joules.
    """
    return sum(
        (t1 - t0) * (v0 + v1) / 2
        for t0, t1, v0, v1 in zip(times, times[1:], values, values[1:], strict=False)
    )


def sampled_mean(times: Sequence[float], values: Sequence[float]) -> float | None:
    """Time-weighted mean of sampled readings; None where fewer than two times differ."""
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return integral(times, values) / (times[-1] - times[0])


@attrs.frozen
class Band:
    """The readings that fall on one column of a chart."""

    low: float
    mid: float
    high: float


def bands(
    times: Readable, values: Readable, start: float, end: float, num_columns: int
) -> tuple[Band | None, ...]:
    """Reduce a series to minimum, median and maximum per column, so that no outlier is lost.

    Args:
        times: When each reading was made; those outside of `[start, end]` are left out.
        values: The readings.
        start: Left edge of the first column.
        end: Right edge of the last.
        num_columns: Columns of equal width.

    Returns:
        `[num_columns]`; None where no reading falls into the column.
    """
    at, readings = np.asarray(times, np.float64), np.asarray(values, np.float64)
    # What was not available is NaN now.
    kept = (at >= start) & (at <= end) & ~np.isnan(readings)
    at, readings = at[kept], readings[kept]
    width = (end - start) / num_columns
    column_of = ((at - start) / width).astype(np.int64) if width > 0 else np.zeros(len(at))
    # A reading at `end` itself belongs to the last column. Times rise, and so do columns.
    firsts = np.searchsorted(np.minimum(column_of, num_columns - 1), np.arange(num_columns + 1))
    columns = [readings[first:past] for first, past in pairwise(firsts.tolist())]
    return tuple(
        Band(float(column.min()), float(np.median(column)), float(column.max()))
        if len(column)
        else None
        for column in columns
    )


@attrs.frozen
class Energy:
    """The energy of a window by two methods.

    Attributes:
        joules: By the counter; None where that is not to be trusted.
        reason: Why not.
        num_counter_steps: Times that the counter was seen to move.
        integrated_joules: By the integral of the power that was sampled.
        ratio: Integral over counter.
        duration_s: From the first reading of the counter to the last.
    """

    joules: float | None
    reason: str | None
    num_counter_steps: int
    integrated_joules: float | None
    ratio: float | None
    duration_s: float

    @property
    def methods_disagree(self) -> bool:
        """Whether the methods differ so much that a figure should carry a warning."""
        return self.ratio is not None and abs(self.ratio - 1) > METHODS_DISAGREE


def energy(
    counter_times: Sequence[float],
    counter_j: Values,
    power_times: Sequence[float],
    power_w: Values,
) -> Energy:
    """Measure a window's energy, or say why it can't be told.

    The counter moves in steps of 10 to 100 ms, so that a window with few of them is mostly
    rounding; a counter that falls was reset, and half a total is no total.

    Args:
        counter_times: `[N]` when each reading of the counter was complete.
        counter_j: `[N]` energy counter in joules, from any zero.
        power_times: `[M]` when each reading of the power was complete.
        power_w: `[M]` power in watts.
    """
    counted_at, counts = available(counter_times, counter_j)
    powered_at, powers = available(power_times, power_w)
    integrated = integral(powered_at, powers) if len(powers) > 1 else None
    duration = counted_at[-1] - counted_at[0] if counted_at else 0.0
    moves = [after - before for before, after in pairwise(counts)]
    num_steps = sum(1 for move in moves if move != 0)
    reason = None
    if not counts:
        reason = "no energy counter"
    elif any(move < 0 for move in moves):
        reason = "the counter went backwards"
    elif num_steps < MIN_COUNTER_STEPS:
        reason = (
            f"window too short: the counter moved {num_steps} times, {MIN_COUNTER_STEPS} needed"
        )
    joules = None if reason else counts[-1] - counts[0]
    ratio = integrated / joules if integrated is not None and joules else None
    return Energy(joules, reason, num_steps, integrated, ratio, duration)
