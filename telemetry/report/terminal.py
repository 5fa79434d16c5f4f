"""The report in a terminal: tables, and one-line sparks for what changes over time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from telemetry.report.draw import merge
from telemetry.report.format import human, short
from telemetry.report.values import (
    STEP_RECORDS,
    Figure,
    HistogramChart,
    Quantity,
    Section,
    Table,
    TimelineChart,
    known,
    missing,
)
from telemetry.series import Band

if TYPE_CHECKING:
    from telemetry.report.model import Report

_BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 36
MAX_ROWS = 24
HISTOGRAM_WIDTH = 48
MIN_TEXT_WIDTH = 18  # of what follows numbers; the names at the begin of a row may be broken


def show(report: "Report", console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console()
    console.print(Text(report.title, style="bold"))
    console.print(Text(report.subtitle, style="dim"))
    console.print()
    console.print(report.verdict, highlight=False, markup=False)
    for warning in report.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    for section in report.sections:
        console.print()
        console.print(Text(section.title, style="bold cyan"))
        console.print(Text(section.lead))
        for part in _parts(section):
            console.print(Padding(part, (0, 0, 0, 2)))
    console.print()
    console.print(Text(report.footer, style="dim"))


def _parts(section: Section) -> list[RenderableType]:
    parts: list[RenderableType] = [_table(table) for table in section.summary]
    for chart in section.charts:
        match chart:
            case TimelineChart():
                parts.append(_timeline(chart))
            case HistogramChart():
                histogram, factor = chart.histogram, 1
                while len(histogram.counts) > HISTOGRAM_WIDTH:
                    factor += 1
                    histogram = chart.histogram.coarser(factor)
                counts = histogram.counts
                ends = (histogram.edges[0], histogram.edges[-1])
                low, high = (human(end, chart.unit) for end in ends)
                parts.append(Text(f"{chart.title}\n{low} {spark(counts)} {high}"))
            case _:
                parts.append(_table(chart.table))
    if section.figures:
        parts.append(_figures(section.figures))
    # What was read in which way is for the page: a terminal shows the figures.
    if section.key != "method":
        parts += [_table(table) for table in section.tables]
    parts += [Text(note, style="dim") for note in section.notes]
    return parts


def _figures(figures: Sequence[Figure]) -> RenderableType:
    """What is known as a grid; what is not as one line per reason."""
    grid = Grid.grid(padding=(0, 2))
    shown = known(figures)
    # Where the line is too short, it is the source that gives way.
    grid.add_column(min_width=max((len(f.label) for f in shown), default=0))
    grid.add_column(
        min_width=max((len(human(f.value, f.unit)) for f in shown), default=0), justify="right"
    )
    grid.add_column(no_wrap=True)
    for figure in shown:
        n = "" if figure.num_samples is None else f"n = {figure.num_samples:,}"
        grid.add_row(
            figure.label,
            Text(human(figure.value, figure.unit), style="bold"),
            Text(f"{figure.source}{', ' if n else ''}{n}", style="dim", overflow="ellipsis"),
        )
    lines = [
        Text(f"{', '.join(labels)}: n/a ({reason})", style="dim")
        for reason, labels in missing(figures).items()
    ]
    return Group(grid, *lines)


def _table(table: Table) -> RenderableType:
    grid = Grid(
        title=escape(table.caption),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    # Where each row comes from is for the page.
    kept = [i for i, c in enumerate(table.columns) if c.label != "Source"]
    for i in kept:
        numeric = any(isinstance(row[i], int | float | Quantity) for row in table.rows)
        label = escape(table.columns[i].label)
        if numeric:
            # In two lines: columns of numbers are narrower than their headers.
            grid.add_column(label.replace(" ", "\n", 1), justify="right", no_wrap=True)
        else:
            widest = max((len(str(row[i])) for row in table.rows), default=0)
            grid.add_column(label, min_width=min(widest, MIN_TEXT_WIDTH) if i else None)
    for i, row in enumerate(table.rows[:MAX_ROWS]):
        cells = [short(row[c], table.columns[c].unit) for c in kept]
        grid.add_row(*map(escape, cells), style="bold" if i in table.total_rows else None)
    if len(table.rows) > MAX_ROWS:
        return Group(grid, Text(f"{len(table.rows) - MAX_ROWS} more rows", style="dim"))
    return grid


def _timeline(chart: TimelineChart) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    for lane in chart.lanes:
        merged: Sequence[Band | None] = merge(lane.bands, SPARK_WIDTH)
        if lane.source != STEP_RECORDS:
            merged = held(merged)
        highest = max((b.high for b in merged if b is not None), default=0.0)
        grid.add_row(
            lane.label,
            spark([_high(band) for band in merged], lane.top),
            Text(f"up to {human(highest, lane.unit)}", style="dim"),
        )
    kinds: dict[str, int] = {}
    for mark in chart.marks:
        kinds[mark.kind] = kinds.get(mark.kind, 0) + 1
    if not kinds:
        return grid
    events = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return Group(grid, Text(f"Events: {events}", style="dim"))


def held(bands: Sequence[Band | None]) -> list[Band | None]:
    """What is sampled holds until the next sample; a spark may have more columns than those."""
    filled: list[Band | None] = []
    for band in bands:
        filled.append(filled[-1] if band is None and filled else band)
    return filled


def _high(band: Band | None) -> float:
    return math.nan if band is None else band.high


def spark(values: Sequence[float], top: float | None = None) -> str:
    """Values as bars of one character from zero to the highest; NaN as a space."""
    highest = top or max((v for v in values if not math.isnan(v)), default=0.0) or 1.0
    marks = []
    for value in values:
        if math.isnan(value):
            marks.append(" ")
        else:
            # Rounded up: only what is nothing may look like nothing.
            level = min(len(_BARS) - 1, math.ceil(value / highest * (len(_BARS) - 1)))
            marks.append(_BARS[max(1 if value > 0 else 0, level)])
    return "".join(marks)
