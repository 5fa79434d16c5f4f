"""How steps ran: replayed from which bucket with how much waste or why not, and their parts."""

from collections import Counter, defaultdict

import numpy as np

from telemetry.report.analysis import Analysis, statistic
from telemetry.report.format import human
from telemetry.report.values import (
    Column,
    Figure,
    NotAvailable,
    Section,
    ShareChart,
    ShareRow,
    Table,
    Value,
)
from telemetry.run import StepTable
from telemetry.stats import Distribution, num_samples_needed


def steps(analysis: Analysis) -> Section:
    """The section about steps and graph buckets."""
    table = analysis.run.steps
    replays, real, padded = _replays(table)
    num_replays = sum(replays.values())
    num_decodes = sum(1 for n in table.num_prefill_tokens if n == 0)
    num_prompts = len(table) - num_decodes
    missed = analysis.missed_replays
    no_replays = NotAvailable("no decode step was a replay")
    num_padded = sum(padded.values())
    num_replayed_prompts = table.mode.count("replay") - num_replays
    figures = (
        Figure("num_steps", "Steps", len(table), "count", "step records"),
        Figure(
            "replay_ratio",
            "Replayed share of decode steps",
            num_replays / num_decodes if num_replays and num_decodes else no_replays,
            "ratio",
            "step records: mode",
            num_samples=num_decodes,
        ),
        Figure(
            "prompt_replay_ratio",
            "Replayed share of steps with prompts",
            num_replayed_prompts / num_prompts
            if num_replayed_prompts
            else NotAvailable("no step with prompts was a replay"),
            "ratio",
            "step records: mode",
            num_samples=num_prompts,
        ),
        Figure(
            "padding_waste_ratio",
            "Padding waste",
            1 - sum(real.values()) / num_padded if num_padded else no_replays,
            "ratio",
            "step records: 1 - rows / bucket",
            num_samples=num_replays,
        ),
        Figure(
            "num_graph_misses",
            "Decode steps not replayed",
            sum(missed.values()),
            "count",
            "step records: fallback",
        ),
    )
    tables = [_parts(analysis)] if len(table) else []
    if missed:
        tables.append(
            Table(
                "Decode steps that were not replayed",
                (Column("Why"), Column("Steps", "count")),
                tuple(missed.most_common()),
            )
        )
    captures = _captures(analysis)
    if captures is not None:
        tables.append(captures)
    charts = (_chart(table, replays, real, padded),) if num_replays else ()
    degraded = analysis.run.info.graphs.get("degraded")
    return Section(
        "steps",
        "Steps and buckets",
        _lead(table, num_replays, num_padded - sum(real.values()), num_padded, missed),
        figures=figures,
        charts=charts,
        tables=tuple(tables),
        notes=(f"Graphs: {degraded}",) if degraded else (),
    )


def _replays(table: StepTable) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """Replays of decodes, real rows and rows with padding, of each bucket."""
    replays: Counter[int] = Counter()
    real: Counter[int] = Counter()
    padded: Counter[int] = Counter()
    for i in _replayed_decodes(table):
        bucket = table.bucket[i]
        assert bucket is not None
        replays[bucket] += 1
        real[bucket] += table.num_rows[i]
        padded[bucket] += bucket
    return replays, real, padded


def _replayed_decodes(table: StepTable) -> list[int]:
    """Places of replays without prompts, whose buckets count rows."""
    return [
        i
        for i, (mode, bucket) in enumerate(zip(table.mode, table.bucket, strict=True))
        if mode == "replay" and bucket is not None and not table.num_prefill_tokens[i]
    ]


def _lead(
    table: StepTable, num_replays: int, num_pads: int, num_padded: int, missed: Counter[str]
) -> str:
    if not len(table):
        return "No step was recorded."
    modes = Counter(table.mode)
    if not num_replays:
        names = ", ".join(f"{count:,} {mode}" for mode, count in modes.most_common())
        return f"No decode step was replayed from a captured graph: {names}. Nothing was padded."
    lead = (
        f"{num_replays:,} decode steps were replayed; {human(num_pads / num_padded, 'ratio')} of "
        "the rows they computed were padding."
    )
    if missed:
        lead += f" {sum(missed.values()):,} decode steps fell back."
    return lead


def _chart(
    table: StepTable, replays: Counter[int], real: Counter[int], padded: Counter[int]
) -> ShareChart:
    times: defaultdict[int, list[float]] = defaultdict(list)
    for i in _replayed_decodes(table):
        bucket = table.bucket[i]
        assert bucket is not None
        times[bucket].append(table.execute_ns[i] / 1e9)
    rows: list[tuple[Value, ...]] = []
    bars = []
    num_replays = sum(replays.values())
    for bucket in sorted(replays):
        waste = 1 - real[bucket] / padded[bucket]
        execute = Distribution.of(times[bucket])
        rows.append(
            (
                bucket,
                replays[bucket],
                replays[bucket] / num_replays,
                real[bucket],
                padded[bucket] - real[bucket],
                waste,
                statistic(execute, "p50", "no step"),
            )
        )
        bars.append(
            ShareRow(
                f"{bucket} rows",
                real[bucket],
                padded[bucket] - real[bucket],
                f"{human(waste, 'ratio')} waste",
            )
        )
    columns = (
        Column("Bucket", "count"),
        Column("Replays", "count"),
        Column("Share", "ratio"),
        Column("Real rows", "count"),
        Column("Pads", "count"),
        Column("Waste", "ratio"),
        Column("Execute p50", "s"),
    )
    return ShareChart(
        "buckets",
        "Rows computed by each captured bucket",
        "count",
        ("real", "padding"),
        tuple(bars),
        Table("Buckets", columns, tuple(rows)),
    )


def _parts(analysis: Analysis) -> Table:
    """Where the time of a step goes; what the executor can't tell apart stays with the model."""
    table = analysis.run.steps
    pack, submit, wait = map(np.asarray, (table.pack_ns, table.submit_ns, table.wait_ns))
    model = np.asarray(table.execute_ns) - pack - submit - wait
    whole = np.asarray(table.t1_ns) - np.asarray(table.t0_ns)
    parts = (
        ("Schedule", np.asarray(table.schedule_ns)),
        ("Pack the inputs", pack),
        ("Submit", submit),
        ("Wait for the device", wait),
        ("Model and sampler", model),
        ("Postprocess", np.asarray(table.postprocess_ns)),
        ("Whole step", whole),
    )
    has_tail = len(table) >= num_samples_needed(99)
    statistics = ("mean", "p50", "p99", "max") if has_tail else ("mean", "p50", "max")
    rows: list[tuple[Value, ...]] = []
    for name, values in parts:
        if values.any():
            spread = Distribution.of(values / 1e9)
            spread_of_it = (statistic(spread, s, "no step") for s in statistics)
            rows.append((name, *spread_of_it, int(values.sum()) / int(whole.sum())))
    columns = (
        Column("Part"),
        *(Column(name, "s") for name in statistics),
        Column("share", "ratio"),
    )
    caption = "Where the time of a step goes"
    return Table(caption, columns, tuple(rows), total_rows=frozenset({len(rows) - 1}))


def _captures(analysis: Analysis) -> Table | None:
    captures = analysis.run.info.graphs.get("captures") or ()
    if not captures:
        return None

    def of(capture: dict[str, object], key: str, factor: float = 1.0) -> Value:
        value = capture.get(key)
        if isinstance(value, int | float):
            return value * factor if factor != 1.0 else value
        return NotAvailable("not measured")

    return Table(
        "What capturing cost",
        (
            Column("Bucket", "count"),
            Column("Variant"),
            Column("Warm-up", "s"),
            Column("Capture", "s"),
            Column("Pool, increment", "bytes"),
            Column("Driver, increment", "bytes"),
        ),
        tuple(
            (
                of(c, "bucket"),
                str(c.get("variant", "")),
                of(c, "warmup_ms", 1e-3),
                of(c, "capture_ms", 1e-3),
                of(c, "pool_bytes"),
                of(c, "driver_bytes"),
            )
            for c in captures
        ),
    )
