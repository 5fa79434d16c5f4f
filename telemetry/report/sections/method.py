"""How the run was measured, what that cost, and what is missing."""

from telemetry.records import ObserverEffect, Overhead, Sensor
from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.values import Column, Figure, NotAvailable, Section, Table, Unit, Value
from telemetry.run import Run

BUDGET_P50, BUDGET_P99 = 0.005, 0.02  # what measuring may add to the time between tokens


def method(analysis: Analysis) -> Section:
    """The section about the measuring itself."""
    run = analysis.run
    figures = (
        Figure("mode", "Mode", run.info.mode, "", "recorder"),
        Figure("period_s", "Period", run.info.period_s, "s", "recorder"),
        *_overhead(run, analysis.duration_s),
        *_observer(run.observer_effect),
        Figure("schema_version", "Schema of the run", run.info.v, "", "run file"),
    )
    return Section(
        "method",
        "How it was measured",
        _lead(run),
        figures=figures,
        tables=(_sensors(run), *_unavailable(run), *_facts(run)),
        notes=run.notes,
    )


def _overhead(run: Run, duration_s: float) -> tuple[Figure, ...]:
    """What the recorder says of itself; it does each minute and at the end."""
    overhead = run.overhead
    unsaid = overhead == Overhead()
    untold = NotAvailable("the run was cut off before its recorder told")
    no_ticks = NotAvailable("the sampler did not run")

    def of_core(cpu_ns: int) -> Value:
        return cpu_ns / 1e9 / duration_s if duration_s else NotAvailable("the run has no length")

    ticks = overhead.num_ticks
    told: tuple[tuple[str, str, Value, Unit, str], ...] = (
        ("num_ticks", "Samples", ticks, "count", "recorder: ticks"),
        ("num_late_ticks", "Skipped, too late", overhead.num_late_ticks, "count", "recorder"),
        ("num_dropped", "Records dropped", dropped(overhead), "count", "recorder: full buffers"),
        (
            "sampler_cpu_ratio",
            "Sampler, of one core",
            of_core(overhead.sampler_cpu_ns) if ticks else no_ticks,
            "ratio",
            "its thread's processor time",
        ),
        (
            "writer_cpu_ratio",
            "Writer, of one core",
            of_core(overhead.writer_cpu_ns),
            "ratio",
            "its thread's processor time",
        ),
        (
            "worst_tick_s",
            "Longest sample",
            overhead.worst_tick_ns / 1e9 if ticks else no_ticks,
            "s",
            "recorder, begin to end of the reads",
        ),
        (
            "step_hook_s",
            "Step hook",
            overhead.hook_ns / 1e9 if overhead.hook_ns else NotAvailable("not measured"),
            "s",
            "recorder, measured when the run began",
        ),
        ("file_bytes", "Written", overhead.num_bytes, "bytes", "recorder"),
    )
    return tuple(
        Figure(key, label, untold if unsaid else value, unit, source)
        for key, label, value, unit, source in told
    )


def dropped(overhead: Overhead) -> int:
    """Records that were lost, of every kind."""
    return (
        overhead.num_steps_dropped
        + overhead.num_samples_dropped
        + overhead.num_events_dropped
        + overhead.num_lines_dropped
    )


def over_budget(effect: ObserverEffect) -> bool:
    """Whether measuring slowed the tokens by more than it may."""
    return effect.p50_change > BUDGET_P50 or effect.p99_change > BUDGET_P99


def _observer(effect: ObserverEffect | None) -> tuple[Figure, ...]:
    missing = NotAvailable("not measured in this run")
    source = "blocks with the recorder paused and live, in turn"
    n = effect.num_off + effect.num_live if effect else None
    return (
        Figure(
            "observer_p50_ratio",
            "Observer effect on p50",
            effect.p50_change if effect else missing,
            "ratio",
            source,
            n,
        ),
        Figure(
            "observer_p99_ratio",
            "Observer effect on p99",
            effect.p99_change if effect else missing,
            "ratio",
            source,
            n,
        ),
    )


def _lead(run: Run) -> str:
    off = sum(1 for sensor in run.sensors if not sensor.available)
    on = len(run.sensors) - off
    lead = f"{on} sensors were read"
    if off:
        lead += f", {off} could not be"
    if run.info.mode == "live":
        lead += f"; the fast ones every {human(run.info.period_s, 's')}"
    else:
        lead += " at the begin and end of each window only"
    lead += "." if run.ended else ". The run was cut off: what came after its last line is missing."
    return lead


def _sensors(run: Run) -> Table:
    columns = (
        Column("Sensor"),
        Column("Source"),
        Column("Scope"),
        Column("Every", "s"),
        Column("Cost", "s"),
        Column("Reads", "count"),
        Column("Gaps", "count"),
    )
    rows = tuple(_sensor(run, sensor) for sensor in run.sensors if sensor.available)
    return Table("Sensors that were read", columns, rows)


def _unavailable(run: Run) -> tuple[Table, ...]:
    """What was not read, or not any more, and why."""
    rows = tuple((s.name, s.reason) for s in run.sensors if s.reason is not None)
    columns = (Column("Sensor"), Column("Why not"))
    return (Table("Sensors that could not be read", columns, rows),) if rows else ()


def _sensor(run: Run, sensor: Sensor) -> tuple[Value, ...]:
    no_cost = NotAvailable("not measured")
    # What is not read on a schedule is read at the edges of windows, or by hand.
    when: Value = sensor.tier if sensor.period_s is None else sensor.period_s
    return (
        sensor.name,
        sensor.source,
        sensor.scope,
        when,
        no_cost if sensor.cost_us is None else sensor.cost_us / 1e6,
        len(run.get(sensor.name)),
        sensor.num_gaps,
    )


def _facts(run: Run) -> tuple[Table, ...]:
    """What was run, where, with which options, as text."""
    groups = (
        ("Engine", run.info.engine),
        ("Model", run.info.model),
        ("Device", run.info.device),
        ("Host", run.info.host),
        ("Options", run.info.config),
    )
    rows = tuple(
        (group, str(name), _text(value)) for group, facts in groups for name, value in facts.items()
    )
    if not rows:
        return ()
    return (Table("Facts", (Column("Of"), Column("Name"), Column("Value")), rows, folded=True),)


def _text(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value)) or "none"
    return str(value)
