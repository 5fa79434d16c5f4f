"""The product's own claim, tested: replaying a captured step takes no new memory."""

from collections.abc import Iterator

import attrs

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.sensors import Readings, readings
from telemetry.report.values import Column, Figure, NotAvailable, Section, Table, Value

WATCHED = {
    "nvml.memory_used_bytes": "Device memory, growth",
    "torch.reserved_bytes": "Allocator, growth",
    "host.rss_bytes": "Process memory, growth",
}


@attrs.frozen
class Growth:
    """How far a reading rose inside one stretch of steps."""

    start_s: float
    end_s: float
    num_steps: int
    num_readings: int
    num_bytes: float


def replay(analysis: Analysis) -> Section:
    """The replay section. Where nothing is captured, it says how steps that only decode did."""
    modes = set(analysis.run.steps.mode)
    captured = "replay" in modes
    stretches = list(_stretches(analysis, captured=captured))
    rows: list[tuple[Value, ...]] = []
    figures, worst = [], 0.0
    for name, label in WATCHED.items():
        readings_of = readings(analysis.run, name)
        if readings_of is None:
            continue
        growth = [g for s in stretches if (g := _growth(readings_of, *s)) is not None]
        source = f"{readings_of.sensor.source}, {readings_of.sensor.scope}"
        value: Value = NotAvailable("fewer than two readings inside of one stretch of steps")
        if growth:
            most = max(growth, key=lambda g: g.num_bytes)
            value, worst = most.num_bytes, max(worst, most.num_bytes)
            rows.append(
                (
                    name,
                    most.num_bytes,
                    most.start_s,
                    most.end_s,
                    most.num_steps,
                    sum(g.num_readings for g in growth),
                )
            )
        key = f"growth_{name.replace('.', '_')}"
        figures.append(Figure(key, label, value, "bytes", source, len(growth)))
    columns = (
        Column("Reading"),
        Column("Largest growth", "bytes"),
        Column("From", "s"),
        Column("To", "s"),
        Column("Steps", "count"),
        Column("Readings", "count"),
    )
    caption = "Largest growth inside one stretch of " + ("replays" if captured else "decode steps")
    return Section(
        "replay",
        "Replay invariant",
        _lead(captured=captured, measured=bool(rows), worst=worst, modes=modes),
        figures=tuple(figures),
        tables=(Table(caption, columns, tuple(rows)),) if rows else (),
    )


def _lead(*, captured: bool, measured: bool, worst: float, modes: set[str]) -> str:
    if not modes:
        return "No step was recorded."
    if not measured:
        return "Memory was not read twice inside any stretch of steps, so nothing can be said."
    grew = f"grew by at most {human(worst, 'bytes')}" if worst else "did not grow"
    if captured:
        return f"While captured steps were replayed, memory {grew}. Expected: flat."
    return (
        f"No step is captured here (steps ran {' and '.join(sorted(modes))}). While sequences only "
        f"decoded, memory {grew}; K/V blocks take memory when they are first written."
    )


def _stretches(analysis: Analysis, *, captured: bool) -> Iterator[tuple[float, float, int]]:
    """Begin, end and number of steps of each stretch of like steps."""
    steps = analysis.run.steps
    begin: int | None = None
    for i in range(len(steps) + 1):
        inside = i < len(steps) and (
            steps.mode[i] == "replay" if captured else steps.num_prefill_tokens[i] == 0
        )
        if inside and begin is None:
            begin = i
        elif not inside and begin is not None:
            yield float(analysis.starts_s[begin]), float(analysis.ends_s[i - 1]), i - begin
            begin = None


def _growth(all_readings: Readings, start_s: float, end_s: float, num_steps: int) -> Growth | None:
    inside = all_readings.within(start_s, end_s)
    if len(inside.values) < 2:
        return None
    lowest, growth = inside.values[0], 0.0
    for value in inside.values:
        lowest = min(lowest, value)
        growth = max(growth, value - lowest)
    return Growth(start_s, end_s, num_steps, len(inside.values), growth)
