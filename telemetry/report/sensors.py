"""Which sensor answers which question of the report, and its readings in the report's units."""

from bisect import bisect_left, bisect_right

import attrs

from telemetry.records import Sensor
from telemetry.report.values import NotAvailable, Unit
from telemetry.run import Run

# What a sensor's unit is in the report, and the factor that takes it there.
_UNITS: dict[str, tuple[Unit, float]] = {
    "bytes": ("bytes", 1),
    "mW": ("W", 1e-3),
    "mJ": ("J", 1e-3),
    "uJ": ("J", 1e-6),
    "MHz": ("MHz", 1),
    "C": ("celsius", 1),
    "%": ("ratio", 1e-2),
    "ns": ("s", 1e-9),
    "bits": ("count", 1),
    "count": ("count", 1),
}


@attrs.frozen
class Readings:
    """A sensor's readings that are there.

    Attributes:
        sensor: Whose.
        unit: Of the values.
        times_s: `[N]` when each was complete, in seconds from the begin of the run.
        values: `[N]` in `unit`.
    """

    sensor: Sensor
    unit: Unit
    times_s: list[float]
    values: list[float]

    def within(self, start_s: float, end_s: float) -> "Readings":
        """Those that were complete in `[start_s, end_s]`."""
        kept = slice(bisect_left(self.times_s, start_s), bisect_right(self.times_s, end_s))
        return attrs.evolve(self, times_s=self.times_s[kept], values=self.values[kept])


def readings(run: Run, name: str) -> Readings | None:
    """The readings of a sensor in the report's units; None if there are none."""
    sensor, series = run.sensor(name), run.get(name)
    if sensor is None:
        return None
    unit, factor = _UNITS.get(sensor.unit, ("", 1))
    pairs = [
        ((t - run.info.start_mono_ns) / 1e9, value * factor)
        for t, value in zip(series.t_ns, series.values, strict=True)
        if value is not None
    ]
    if not pairs:
        return None
    return Readings(sensor, unit, [t for t, _ in pairs], [v for _, v in pairs])


def rates(counter: Readings, unit: Unit) -> Readings:
    """How fast a counter moved between its readings, such as watts from joules."""
    times, values = [], []
    for t0, t1, v0, v1 in zip(
        counter.times_s, counter.times_s[1:], counter.values, counter.values[1:], strict=False
    ):
        if t1 > t0 and v1 >= v0:  # two reads at once tell no rate, nor does a counter's reset
            times.append(t1)
            values.append((v1 - v0) / (t1 - t0))
    return Readings(counter.sensor, unit, times, values)


def why_missing(run: Run, name: str) -> NotAvailable:
    """Why a sensor has no reading."""
    sensor = run.sensor(name)
    if sensor is None:
        return NotAvailable(f"this run has no sensor {name}")
    return NotAvailable(sensor.reason or f"{name} was never read")


def memory_sensor(run: Run) -> str:
    """What tells the memory that the engine uses: of its GPU, or else of its process."""
    return "nvml.memory_used_bytes" if _on_gpu(run) else "host.rss_bytes"


def energy_sensor(run: Run) -> str:
    """The energy counter of what the engine runs on; a GPU's says nothing about a CPU."""
    return "nvml.energy_mj" if _on_gpu(run) else "host.energy_uj"


def _on_gpu(run: Run) -> bool:
    return run.info.device.get("type") == "cuda"
