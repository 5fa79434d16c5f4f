"""Energy by the counter and by the integral of power, for the run and for each window."""

import numpy as np

from telemetry.records import Window
from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.sensors import Readings, energy_sensor, rates, readings, why_missing
from telemetry.report.values import Column, Figure, NotAvailable, Section, Table, Value
from telemetry.series import Energy, as_of, sampled_mean
from telemetry.series import energy as measure_energy

POWER = "nvml.power_mw"  # processors have an energy counter only


def energy(analysis: Analysis) -> Section:
    """The energy section."""
    run = analysis.run
    counter_name = energy_sensor(run)
    counter = readings(run, counter_name)
    on_gpu = counter_name.startswith("nvml")
    power = readings(run, POWER) if on_gpu else None
    whole = energy_between(counter, power, 0.0, analysis.duration_s)
    no_counter = why_missing(run, counter_name)
    joules: Value = no_counter if counter is None else _or_reason(whole.joules, whole.reason)
    per_token: Value = joules
    if isinstance(joules, float | int):
        tokens = analysis.num_generated_tokens
        per_token = joules / tokens if tokens else NotAvailable("no token was generated")
    no_power = why_missing(run, POWER) if on_gpu else NotAvailable("a CPU has a counter only")
    integrated = no_power if power is None else _or_reason(whole.integrated_joules, "one reading")
    ratio = _or_reason(whole.ratio, "needs both methods")
    # Without a power sensor, the counter's slope tells the level.
    level = power or (rates(counter, "W") if counter else None)
    mean_w: Value = no_counter if counter is None else NotAvailable("fewer than two readings")
    if level is not None and (mean := sampled_mean(level.times_s, level.values)) is not None:
        mean_w = mean
    counter_source = f"{counter.sensor.source}, {counter.sensor.scope}" if counter else counter_name
    power_source = (
        f"{power.sensor.source}, {power.sensor.scope}" if power else POWER if on_gpu else "none"
    )
    level_source = power_source if power else f"slope of {counter_name}"
    figures = (
        Figure("energy_j", "Energy", joules, "J", counter_source, whole.num_counter_steps),
        Figure(
            "energy_j_per_token", "Energy per token", per_token, "J/token",
            f"{counter_source}, over the whole run", analysis.num_generated_tokens,
        ),
        Figure("energy_integrated_j", "Energy, from power", integrated, "J", power_source),
        Figure("energy_methods_ratio", "From power / by counter", ratio, "", "both methods"),
        Figure("power_mean_w", "Mean power", mean_w, "W", level_source),
        Figure(
            "idle_ratio", "Time without a step",
            max(0.0, 1 - analysis.stepping_s / analysis.duration_s)
            if analysis.duration_s
            else NotAvailable("the run has no length"),
            "ratio", "step records",
        ),
        Figure("power_idle_w", "Power without a step", _idle(analysis, level), "W", level_source),
    )  # fmt: skip
    notes = []
    if whole.methods_disagree:
        notes.append(
            f"The two methods differ by {human(abs((whole.ratio or 1) - 1), 'ratio')}: trust "
            "neither to more than that."
        )
    if not isinstance(joules, NotAvailable):
        notes.append("Idle power is shown beside the total and never taken off it.")
    return Section(
        "energy",
        "Energy",
        _lead(joules, per_token),
        figures=figures,
        tables=_windows(analysis, counter, power),
        notes=tuple(notes),
    )


def energy_between(
    counter: Readings | None, power: Readings | None, start_s: float, end_s: float
) -> Energy:
    """The energy of a stretch of time."""
    counted = counter.within(start_s, end_s) if counter else None
    powered = power.within(start_s, end_s) if power else None
    return measure_energy(
        counted.times_s if counted else (),
        counted.values if counted else (),
        powered.times_s if powered else (),
        powered.values if powered else (),
    )


def _or_reason(value: float | None, reason: str | None) -> Value:
    return NotAvailable(reason or "not measured") if value is None else value


def _lead(joules: Value, per_token: Value) -> str:
    if isinstance(joules, NotAvailable):
        return f"Energy is not known: {joules.reason}."
    if isinstance(per_token, NotAvailable):
        return f"The run took {human(joules, 'J')}."
    return f"The run took {human(joules, 'J')}, which is {human(per_token, 'J/token')}."


def _idle(analysis: Analysis, power: Readings | None) -> Value:
    """Mean of the readings that were made between steps."""
    if power is None:
        return why_missing(analysis.run, energy_sensor(analysis.run))
    idle = []
    for at_s, watts in zip(power.times_s, power.values, strict=True):
        step = as_of(analysis.starts_s, at_s)
        if step is None or analysis.ends_s[step] < at_s:
            idle.append(watts)
    return sum(idle) / len(idle) if idle else NotAvailable("no reading was made between steps")


def _windows(
    analysis: Analysis, counter: Readings | None, power: Readings | None
) -> tuple[Table, ...]:
    """The user's windows; the run itself is what the figures are about."""
    named = [window for window in analysis.run.windows if window.parent is not None]
    if not named:
        return ()
    columns = (
        Column("Window"),
        Column("Length", "s"),
        Column("Tokens", "count"),
        Column("Energy", "J"),
        Column("Per token", "J/token"),
    )
    rows = tuple(_window(analysis, window, counter, power) for window in named)
    return (Table("Windows", columns, rows),)


def _window(
    analysis: Analysis, window: Window, counter: Readings | None, power: Readings | None
) -> tuple[Value, ...]:
    zero = analysis.run.info.start_mono_ns
    start_s = (window.t0_ns - zero) / 1e9
    end_s = ((analysis.run.last_ns if window.t1_ns is None else window.t1_ns) - zero) / 1e9
    # A token belongs to the window in which its step ended.
    first = np.searchsorted(analysis.ends_s, start_s, "left")
    past = np.searchsorted(analysis.ends_s, end_s, "right")
    tokens = sum(map(len, analysis.run.steps.sampled[first:past]))
    measured = energy_between(counter, power, start_s, end_s)
    joules = _or_reason(measured.joules, measured.reason)
    per_token: Value = joules
    if isinstance(joules, float | int):
        per_token = joules / tokens if tokens else NotAvailable("no token")
    return (window.name, end_s - start_s, tokens, joules, per_token)
