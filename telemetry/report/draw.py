"""From charts to geometry: paths and places that a page only has to wrap in SVG. Pure.

Shapes live in a box of `WIDTH` by `HEIGHT` units that is stretched to the space there is; text
never does, so that it stays readable on a telephone: places of labels are shares of the width.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

from telemetry.report.format import human, tick, time_unit
from telemetry.report.scale import LinearScale, LogScale, Scale
from telemetry.report.values import (
    HistogramChart,
    Lane,
    RangeChart,
    ShareChart,
    StackChart,
    TimelineChart,
    Unit,
)
from telemetry.series import Band

WIDTH, HEIGHT = 1000, 200
MARGIN = 8  # above and below the scale of a lane, so that no line lies on the edge
DRAWN_COLUMNS = 400  # of a timeline; a reader who zooms in gets every column there is
LOG_RATIO = 8  # a lane whose values span more than this is drawn on a logarithmic scale


@attrs.frozen
class Tick:
    """A label on an axis: its place as a percentage, its text, and how it is aligned there.

    A `minor` one is left out where there is little room.
    """

    percent: float
    text: str
    align: str = "middle"
    minor: bool = False


@attrs.frozen
class Box:
    """A rectangle in the units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    kind: str = ""
    title: str = ""


@attrs.frozen
class DrawnLane:
    """A lane of a timeline: the band between minimum and maximum, and the line of medians."""

    area: str
    line: str
    ticks: tuple[Tick, ...]
    scale: LinearScale | LogScale


def ticks_of(scale: Scale, unit: Unit) -> tuple[Tick, ...]:
    """The labels of a horizontal axis; the outermost keep inside of it."""
    values = scale.ticks()
    every_second = len(values) > 4
    return tuple(
        Tick(
            percent := round(scale.at(v) * 100, 2),
            tick(v, unit),
            _align(percent),
            minor=every_second and i % 2 == 1,
        )
        for i, v in enumerate(values)
    )


def time_ticks(duration_s: float) -> tuple[Tick, ...]:
    """The labels of an axis of time from 0 to `duration_s`, all in one unit."""
    name, unit_s = time_unit(duration_s)
    ticks = ticks_of(LinearScale(0.0, duration_s / unit_s or 1.0), "count")
    return tuple(attrs.evolve(one, text=f"{one.text} {name}") for one in ticks)


def draw_stack(chart: StackChart) -> tuple[Box, ...]:
    """The parts of a whole side by side."""
    total = sum(max(0.0, part.value) for part in chart.parts) or 1.0
    boxes, x = [], 0.0
    for part in chart.parts:
        width = max(0.0, part.value) / total * WIDTH
        boxes.append(Box(round(x, 2), 0, round(width, 2), HEIGHT, part.kind, part.label))
        x += width
    return tuple(boxes)


def draw_histogram(chart: HistogramChart) -> tuple[tuple[Box, ...], tuple[Tick, ...], Scale]:
    """The bars of a histogram, the ticks below them, and the scale for its marks."""
    histogram = chart.histogram
    scale = LogScale(histogram.edges[0], histogram.edges[-1])
    highest = max(histogram.counts)
    boxes = []
    for low, high, count in zip(
        histogram.edges, histogram.edges[1:], histogram.counts, strict=False
    ):
        if count:
            left, right = scale.at(low) * WIDTH, scale.at(high) * WIDTH
            # One sample in ten thousand is what a tail is about: it must not vanish.
            height = max(count / highest * HEIGHT, 4.0)
            boxes.append(
                Box(
                    round(left, 1),
                    round(HEIGHT - height, 1),
                    round(right - left, 1),
                    round(height, 1),
                    title=f"{human(low, chart.unit)} to {human(high, chart.unit)}: {count:,}",
                )
            )
    return tuple(boxes), ticks_of(scale, chart.unit), scale


def range_scale(chart: RangeChart) -> Scale:
    """The one scale of all rows."""
    values = [v for row in chart.rows for v in (row.low, row.mid, row.high)]
    return LogScale.around(values) if min(values) > 0 else LinearScale.from_zero(max(values))


def share_scale(chart: ShareChart) -> Scale:
    """The one scale of all rows."""
    return LinearScale(0.0, max((row.used + row.wasted for row in chart.rows), default=1.0) or 1.0)


def lane_scale(lane: Lane) -> LinearScale | LogScale:
    """From zero to its top or highest value; logarithmic for what spans orders of magnitude."""
    present = [band for band in lane.bands if band is not None]
    highest = max((band.high for band in present), default=0.0)
    if lane.top is not None:
        return LinearScale(0.0, lane.top or 1.0)
    lowest = min((band.low for band in present), default=0.0)
    if lane.unit == "s" and lowest > 0 and highest / lowest > LOG_RATIO:
        return LogScale.around((lowest, highest))
    grain = 1024.0 ** max(0, (int(highest).bit_length() - 1) // 10) if lane.unit == "bytes" else 1.0
    return LinearScale.from_zero(highest, grain=grain)


def draw_lane(lane: Lane) -> DrawnLane:
    """The two paths of a lane, from bands merged to what a screen can show."""
    scale = lane_scale(lane)
    merged = merge(lane.bands, DRAWN_COLUMNS)
    area, line = [], []
    for run in runs(merged):
        points = [
            (
                round((i + 0.5) / len(merged) * WIDTH),
                *(
                    round(MARGIN + (1 - scale.at(v)) * (HEIGHT - 2 * MARGIN))
                    for v in (band.low, band.mid, band.high)
                ),
            )
            for i, band in run
        ]
        line.append(_path([(x, mid) for x, _, mid, _ in points]))
        if any(low != high for _, low, _, high in points):
            back = [(x, low) for x, low, _, _ in reversed(points)]
            area.append(_path([(x, high) for x, _, _, high in points] + back) + "z")
    ticks = tuple(Tick(0, tick(v, lane.unit)) for v in _ends(scale))
    return DrawnLane("".join(area), "".join(line), ticks, scale)


def merge(bands: Sequence[Band | None], num_columns: int) -> tuple[Band | None, ...]:
    """Join neighbouring columns until at most `num_columns` are left."""
    each = -(-len(bands) // num_columns)
    if each <= 1:
        return tuple(bands)
    merged: list[Band | None] = []
    for start in range(0, len(bands), each):
        present = [band for band in bands[start : start + each] if band is not None]
        merged.append(
            Band(
                min(band.low for band in present),
                statistics.median(band.mid for band in present),
                max(band.high for band in present),
            )
            if present
            else None
        )
    return tuple(merged)


def runs(bands: Sequence[Band | None]) -> Iterator[list[tuple[int, Band]]]:
    """Stretches of a lane to be joined by a line: what lies much farther apart is a gap.

    Farther means more than four times the usual distance of two readings, and at least three
    columns.
    """
    present = [(i, band) for i, band in enumerate(bands) if band is not None]
    steps = [b[0] - a[0] for a, b in pairwise(present)]
    farthest = max(3.0, 4 * statistics.median(steps)) if steps else 0.0
    run: list[tuple[int, Band]] = []
    for item in present:
        if run and item[0] - run[-1][0] > farthest:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def mark_percent(chart: TimelineChart, at_s: float) -> float:
    """Where on the axis of a timeline a moment lies."""
    return round(LinearScale(0.0, chart.duration_s or 1.0).at(at_s) * 100, 3)


def _ends(scale: LinearScale | LogScale) -> tuple[float, float]:
    """What to write at the top and at the bottom of a lane."""
    if isinstance(scale, LinearScale):
        return scale.high, scale.low
    return scale.high / 1.12, scale.low * 1.12  # the values themselves, without the room


def _path(points: Sequence[tuple[int, int]]) -> str:
    """A path through integer points, relative, which is the shortest to write."""
    (x, y), *rest = points
    parts = [f"M{x} {y}"]
    for next_x, next_y in rest:
        parts.append(f"l{next_x - x} {next_y - y}")
        x, y = next_x, next_y
    # A lone point is a line of no length, which round caps turn into a dot.
    return "".join(parts) if rest else f"{parts[0]}h0"


def _align(percent: float) -> str:
    return "start" if percent < 4 else "end" if percent > 96 else "middle"
