"""What a report is made of: figures, tables and charts, as values that know no output format.

Every figure names its unit and its source. What is not known is `NotAvailable` with the reason,
and never a zero. Every chart carries the table of what it shows.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from telemetry.series import Band
from telemetry.stats import LogHistogram

Unit = Literal[
    "", "count", "s", "bytes", "ratio", "tokens", "tokens/s", "J", "J/token", "W", "MHz", "celsius"
]


@attrs.frozen
class NotAvailable:
    """Stands where a value would, and says why there is none."""

    reason: str


@attrs.frozen
class Quantity:
    """A number with a unit of its own, for tables whose rows differ in it."""

    value: float
    unit: Unit


Value = int | float | str | Quantity | NotAvailable
PartKind = Literal["model", "cache", "graph", "work", "runtime", "other", "free", "residual"]


@attrs.frozen
class Figure:
    """One number with all that is needed to read it.

    Attributes:
        key: Stable name for gates, with the unit at its end, such as "itl_p99_s".
        label: Name for people.
        value: In `unit`.
        unit: An SI base unit, bytes, a ratio from 0 to 1, or a count.
        source: Where it comes from.
        num_samples: Samples behind it, where it is a statistic.
    """

    key: str
    label: str
    value: Value
    unit: Unit
    source: str
    num_samples: int | None = None


@attrs.frozen
class Column:
    """Head of a table's column. `unit` says how its numbers are shown; a text column has ""."""

    label: str
    unit: Unit = ""


@attrs.frozen
class Table:
    """Rows of values under a caption.

    A row in `total_rows` (counted from 0) is set apart. A `folded` table is for looking things up:
    a page shows its caption first.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    total_rows: frozenset[int] = frozenset()
    folded: bool = False


@attrs.frozen
class Part:
    """A share of a whole. `kind` groups parts by who holds them, and picks their colour."""

    label: str
    value: float
    kind: PartKind


@attrs.frozen
class StackChart:
    """A whole and its parts, as one bar."""

    key: str
    title: str
    unit: Unit
    parts: tuple[Part, ...]
    table: Table


@attrs.frozen
class HistogramChart:
    """A sample on a logarithmic scale; `marks` are (label, value) pairs such as p50 and p99."""

    key: str
    title: str
    unit: Unit
    histogram: LogHistogram
    marks: tuple[tuple[str, float], ...]
    table: Table


@attrs.frozen
class RangeRow:
    """One line of a range chart: a typical value, and how far up it goes."""

    label: str
    low: float
    mid: float
    high: float
    note: str = ""


@attrs.frozen
class RangeChart:
    """Ranges side by side, such as the latency at each batch size. Marks name low, mid, high."""

    key: str
    title: str
    unit: Unit
    marks: tuple[str, str, str]
    rows: tuple[RangeRow, ...]
    table: Table


@attrs.frozen
class ShareRow:
    """One line of a share chart: what was used, and what was wasted, of one thing."""

    label: str
    used: float
    wasted: float
    note: str = ""


@attrs.frozen
class ShareChart:
    """Bars of used and wasted, such as real and padded rows of each bucket."""

    key: str
    title: str
    unit: Unit
    marks: tuple[str, str]
    rows: tuple[ShareRow, ...]
    table: Table


@attrs.frozen
class Lane:
    """One series of a timeline, reduced to minimum, median and maximum per column.

    `top` is the end of its scale where that is known, such as all blocks there are.
    """

    key: str
    label: str
    unit: Unit
    bands: tuple[Band | None, ...]
    source: str
    top: float | None = None


@attrs.frozen
class Mark:
    """Something that happened, on a timeline: begin and end in seconds from its start, and what."""

    start_s: float
    end_s: float
    kind: str
    label: str


@attrs.frozen
class Span:
    """A named window of a timeline, in seconds from its start; `row` keeps windows apart."""

    start_s: float
    end_s: float
    label: str
    row: int


@attrs.frozen
class TimelineChart:
    """Series over the run on one axis of time, which begins at 0 and ends at `duration_s`."""

    key: str
    title: str
    duration_s: float
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...]
    table: Table


Chart = StackChart | HistogramChart | RangeChart | ShareChart | TimelineChart


STEP_RECORDS = "step records"
"""The source of what comes from the engine's steps, and not from a sensor."""


@attrs.frozen
class Section:
    """A part of the report under one heading; `lead` is its one sentence to take away.

    `notes` are what a reader should know before trusting its figures, and `tabled` are figures for
    programs which people read in one of the tables. `summary` are tables to read before the charts.
    """

    key: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    tabled: tuple[Figure, ...] = ()
    summary: tuple[Table, ...] = ()

    @property
    def all_figures(self) -> tuple[Figure, ...]:
        """Those that are shown as such, and those in tables."""
        return (*self.figures, *self.tabled)


def known(figures: Sequence[Figure]) -> list[Figure]:
    """Those that have a value."""
    return [figure for figure in figures if not isinstance(figure.value, NotAvailable)]


def missing(figures: Sequence[Figure]) -> Mapping[str, Sequence[str]]:
    """The labels of those that have none, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for figure in figures:
        if isinstance(figure.value, NotAvailable):
            by_reason.setdefault(figure.value.reason, []).append(figure.label)
    return by_reason
