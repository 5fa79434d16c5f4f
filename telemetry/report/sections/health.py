"""The device's health: clocks, temperature, what held it back and for how long, memory errors."""

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.happenings import REASON_BITS, throttles
from telemetry.report.sensors import readings, why_missing
from telemetry.report.values import Column, Figure, NotAvailable, Quantity, Section, Table, Value
from telemetry.run import Run
from telemetry.series import sampled_mean

# label, sensor
_LEVELS = (
    ("SM clock", "nvml.sm_clock_mhz"),
    ("Memory clock", "nvml.memory_clock_mhz"),
    ("Temperature", "nvml.temperature_c"),
    ("Memory temperature", "nvml.memory_temperature_c"),
    ("Power", "nvml.power_mw"),
    ("GPU busy", "nvml.gpu_utilization_percent"),
    ("GPU memory busy", "nvml.memory_utilization_percent"),
    ("Threads", "host.threads_count"),
    ("Memory available", "host.available_bytes"),
)
THROTTLE_COUNTERS = "nvml.throttled_by_"


def health(analysis: Analysis) -> Section:
    """The health section."""
    run = analysis.run
    throttled_s = throttled(run)
    rows: list[tuple[Value, ...]] = []
    for label, name in _LEVELS:
        found = readings(run, name)
        if found is None:
            continue
        mean = sampled_mean(found.times_s, found.values)
        levels = min(found.values), found.values[0] if mean is None else mean, max(found.values)
        rows.append((label, *(Quantity(level, found.unit) for level in levels)))
    columns = (Column("Reading"), Column("Min"), Column("Mean"), Column("Max"))
    tables = [Table("Levels over the run", columns, tuple(rows))] if rows else []
    counters = changes(run)
    if counters:
        tables.append(
            Table(
                "Counters over the run",
                (Column("Counter"), Column("Change"), Column("Scope"), Column("Source")),
                counters,
            )
        )
    limit = run.info.device.get("power_limit_w")
    figures = (
        Figure(
            "throttled_s",
            "Throttled",
            throttled_s,
            "s",
            "NVML counters of time, difference over the run",
        ),
        Figure(
            "power_limit_w",
            "Power limit",
            limit
            if isinstance(limit, int | float)
            else NotAvailable("the device has none to tell"),
            "W",
            "device's facts",
        ),
    )
    return Section(
        "health",
        "Device health",
        _lead(run, throttled_s),
        figures=figures,
        tables=tuple(tables),
    )


def throttled(run: Run) -> Value:
    """Seconds that the device was held back, all reasons together, or why that is not known."""
    names = [s.name for s in run.sensors if s.name.startswith(THROTTLE_COUNTERS)]
    if not names:
        return NotAvailable("no sensor for it on this device")
    found = [r for r in (readings(run, name) for name in names) if r is not None]
    if not found:
        return why_missing(run, names[0])
    return sum(max(0.0, r.values[-1] - r.values[0]) for r in found)


def changes(run: Run) -> tuple[tuple[Value, ...], ...]:
    """Every counter that was read twice: by how much it moved."""
    rows: list[tuple[Value, ...]] = []
    for sensor in run.sensors:
        found = readings(run, sensor.name) if sensor.kind == "counter" else None
        if found is None or len(found.values) < 2:
            continue
        moved = found.values[-1] - found.values[0]
        change: Value = Quantity(moved, found.unit)
        if moved < 0:
            change = NotAvailable("it went backwards")
        rows.append((sensor.name, change, sensor.scope, sensor.source))
    return tuple(rows)


def _lead(run: Run, throttled_s: Value) -> str:
    bits = readings(run, REASON_BITS)
    seen = sorted({name for value in bits.values for name in throttles(int(value))}) if bits else []
    if isinstance(throttled_s, NotAvailable):
        known = f"samples saw {', '.join(seen)}" if seen else f"not known: {throttled_s.reason}"
        return f"Whether the device was held back: {known}."
    if not throttled_s:
        return "The device was not held back by power, heat or the board."
    why = f" ({', '.join(seen)})" if seen else ""
    return f"The device was held back for {human(throttled_s, 's')}{why}."
