"""The run over time: steps and sensors on one axis, with what happened marked above them."""

from collections.abc import Iterator, Sequence

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.happenings import happenings
from telemetry.report.sensors import Readings, rates, readings
from telemetry.report.values import (
    STEP_RECORDS,
    Column,
    Lane,
    Mark,
    NotAvailable,
    Section,
    Span,
    Table,
    TimelineChart,
    Unit,
    Value,
)
from telemetry.run import Run
from telemetry.series import Band, Readable, bands

COLUMNS = 1200  # what a reader who zooms in can tell apart
TABLE_ROWS = 24
MAX_MARKS = 400

# Lanes of sensors: label, sensor, and the end of the scale where it is known.
_LEVELS = (
    ("Device memory", "nvml.memory_used_bytes", None),
    ("Process memory", "host.rss_bytes", None),
    ("GPU power", "nvml.power_mw", None),
    ("GPU busy", "nvml.gpu_utilization_percent", 1.0),
    ("SM clock", "nvml.sm_clock_mhz", None),
    ("GPU temperature", "nvml.temperature_c", None),
)
# Lanes of counters, of which the slope is shown: label, sensor, unit of the slope.
_SLOPES: tuple[tuple[str, str, Unit], ...] = (
    ("Cores busy, process", "host.cpu_ns", "count"),  # seconds of processor time per second
    ("CPU power", "host.energy_uj", "W"),
)


def timeline(analysis: Analysis) -> Section:
    """The timeline section."""
    duration_s = analysis.duration_s
    lanes = tuple(_lanes(analysis, duration_s)) if duration_s > 0 else ()
    marks = tuple(
        Mark(h.start_s, h.end_s, h.kind, h.label)
        for h in happenings(analysis)
        if h.kind != "prefill"
    )
    notes = []
    if len(marks) > MAX_MARKS:
        notes.append(f"{len(marks):,} events; the first {MAX_MARKS} are marked.")
    if not lanes:
        return Section("timeline", "Timeline", "Neither a step nor a sample was recorded.")
    chart = TimelineChart(
        "timeline_chart",
        "Steps, memory and device over the run",
        duration_s,
        lanes,
        marks[:MAX_MARKS],
        tuple(_spans(analysis.run)),
        _table(lanes, duration_s),
    )
    lead = f"{len(analysis.run.steps):,} steps in {human(duration_s, 's')}"
    share = analysis.stepping_s / duration_s
    lead += f"; a step was running {human(share, 'ratio')} of the time."
    return Section("timeline", "Timeline", lead, charts=(chart,), notes=tuple(notes))


def _spans(run: Run) -> Iterator[Span]:
    """The user's windows; those that overlap, as nested ones do, stand in rows of their own."""
    zero = run.info.start_mono_ns
    ends_of_rows: list[float] = []
    for window in sorted(run.windows, key=lambda w: w.t0_ns):
        if window.parent is None:
            continue
        start_s = (window.t0_ns - zero) / 1e9
        end_s = ((run.last_ns if window.t1_ns is None else window.t1_ns) - zero) / 1e9
        free = [row for row, end in enumerate(ends_of_rows) if end <= start_s]
        row = free[0] if free else len(ends_of_rows)
        ends_of_rows[row : row + 1] = [end_s]
        yield Span(start_s, end_s, window.name, row)


def _lanes(analysis: Analysis, duration_s: float) -> Iterator[Lane]:
    steps, ends = analysis.run.steps, analysis.ends_s

    def of_steps(
        key: str, label: str, values: Readable, unit: Unit, top: float | None = None
    ) -> Lane:
        columns = bands(ends, values, 0.0, duration_s, COLUMNS)
        return Lane(key, label, unit, columns, STEP_RECORDS, top)

    if len(ends):
        yield of_steps("step_s", "Step time", ends - analysis.starts_s, "s")
        yield of_steps("rows", "Sequences in a step", steps.num_rows, "count")
        if any(steps.num_waiting):
            yield of_steps("waiting", "Waiting", steps.num_waiting, "count")
        total = steps.num_free_blocks[0] + steps.num_used_blocks[0]
        yield of_steps("blocks", "K/V blocks used", steps.num_used_blocks, "count", float(total))

    def of_readings(label: str, found: Readings, top: float | None = None) -> Lane:
        columns = bands(found.times_s, found.values, 0.0, duration_s, COLUMNS)
        return Lane(found.sensor.name, label, found.unit, columns, found.sensor.name, top)

    for label, name, top in _LEVELS:
        level = readings(analysis.run, name)
        if level is not None and len(level.values) > 1:
            yield of_readings(label, level, top)
    for label, name, unit in _SLOPES:
        counter = readings(analysis.run, name)
        if counter is not None and len(counter.values) > 2:
            yield of_readings(label, rates(counter, unit))


def _table(lanes: Sequence[Lane], duration_s: float) -> Table:
    """Every lane's median, and its maximum where that differs, in rows of equal time."""
    each = COLUMNS // TABLE_ROWS
    rows: list[tuple[Value, ...]] = []
    for i in range(TABLE_ROWS):
        cells: list[Value] = [i * duration_s / TABLE_ROWS]
        for lane in lanes:
            cells += _mid_and_high(lane.bands[i * each : (i + 1) * each])
        rows.append(tuple(cells))
    columns = [Column("From", "s")]
    for lane in lanes:
        columns += [Column(f"{lane.label}, median", lane.unit), Column("max", lane.unit)]
    return Table("Timeline, in 24 parts of equal length", tuple(columns), tuple(rows))


def _mid_and_high(part: Sequence[Band | None]) -> list[Value]:
    present = [band for band in part if band is not None]
    if not present:
        return [NotAvailable("nothing read"), NotAvailable("nothing read")]
    mids = sorted(band.mid for band in present)
    return [mids[len(mids) // 2], max(band.high for band in present)]
