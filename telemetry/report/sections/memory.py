"""Where the bytes are: the ledger, which sums to the total, with the residual as a row."""

from telemetry.records import Ledger, LedgerRow
from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.sensors import memory_sensor, readings, why_missing
from telemetry.report.values import (
    Column,
    Figure,
    NotAvailable,
    Part,
    PartKind,
    Section,
    StackChart,
    Table,
    Value,
)

# By the first words of a row's name; what is not named here belongs to the runtime.
_KINDS: tuple[tuple[str, PartKind], ...] = (
    ("weights", "model"),
    ("kv", "cache"),
    ("graph", "graph"),
    ("activation", "work"),
    ("slack", "work"),
    ("allocator", "work"),
    ("other", "other"),
    ("free", "free"),
    ("residual", "residual"),
)


def memory(analysis: Analysis) -> Section:
    """The memory section."""
    run = analysis.run
    ledger = run.ledgers[-1] if run.ledgers else None
    name = memory_sensor(run)
    used = readings(run, name)
    peak = Figure(
        "memory_peak_bytes",
        "Peak memory used",
        max(used.values) if used else why_missing(run, name),
        "bytes",
        f"{used.sensor.source}, {used.sensor.scope}" if used else "no reading",
        num_samples=len(used.values) if used else 0,
    )
    if ledger is None:
        return Section(
            "memory",
            "Memory",
            "No ledger was taken in this run.",
            figures=(_total(None), _headroom(None), peak),
        )
    table = _table(ledger)
    parts = tuple(
        Part(row.label, row.num_bytes, kind_of(row.name))
        for row in ledger.rows
        if row.num_bytes is not None and row.num_bytes > 0
    )
    return Section(
        "memory",
        "Memory",
        _lead(ledger),
        figures=(_total(ledger), _headroom(ledger), peak),
        charts=(StackChart("memory_ledger", _title(ledger), "bytes", parts, table),),
    )


def kind_of(name: str) -> PartKind:
    """Who holds a ledger's row."""
    return next((kind for start, kind in _KINDS if name.startswith(start)), "runtime")


def _title(ledger: Ledger) -> str:
    return f"Ledger of the {'device' if ledger.device == 'cuda' else 'machine'}'s memory"


def _lead(ledger: Ledger) -> str:
    if ledger.total_bytes is None:
        return f"The total is not known ({ledger.total_source}), so the rows can't be checked."
    residual = ledger.row("residual")
    rest = residual.num_bytes if residual is not None else None
    if rest is None:
        return "A row is missing, so that the sum can't be checked."
    if rest < 0:
        return (
            f"The rows count {human(-rest, 'bytes')} of {human(ledger.total_bytes, 'bytes')} twice."
        )
    if rest == 0:
        return f"The rows sum to {human(ledger.total_bytes, 'bytes')}, with nothing left over."
    share = human(rest / ledger.total_bytes, "ratio")
    return (
        f"The rows sum to {human(ledger.total_bytes, 'bytes')}; {share} of it is not explained "
        "by any of them and stands as the residual."
    )


def _table(ledger: Ledger) -> Table:
    rows: list[tuple[Value, ...]] = [
        (
            row.label,
            _bytes(row),
            _share(row, ledger.total_bytes),
            f"{row.source}{' (estimate)' if row.estimate else ''}",
        )
        for row in ledger.rows
    ]
    total: Value = (
        NotAvailable(ledger.total_source) if ledger.total_bytes is None else ledger.total_bytes
    )
    rows.append(("Total", total, 1.0, ledger.total_source))
    return Table(
        "Memory ledger",
        (Column("Part"), Column("Size", "bytes"), Column("Share", "ratio"), Column("Source")),
        tuple(rows),
        total_rows=frozenset({len(rows) - 1}),
    )


def _bytes(row: LedgerRow) -> Value:
    if row.num_bytes is None:
        return NotAvailable(row.reason or "not known")
    return row.num_bytes


def _share(row: LedgerRow, total: int | None) -> Value:
    if row.num_bytes is None:
        return NotAvailable("no size")
    if not total:
        return NotAvailable("no total")
    return row.num_bytes / total


def _total(ledger: Ledger | None) -> Figure:
    value: Value = NotAvailable("no ledger was taken")
    if ledger is not None:
        value = (
            NotAvailable(ledger.total_source) if ledger.total_bytes is None else ledger.total_bytes
        )
    return Figure(
        "memory_total_bytes",
        "Total memory",
        value,
        "bytes",
        ledger.total_source if ledger else "ledger",
    )


def _headroom(ledger: Ledger | None) -> Figure:
    free = ledger.row("free") if ledger else None
    return Figure(
        "memory_free_bytes",
        "Free memory",
        _bytes(free) if free else NotAvailable("no ledger was taken"),
        "bytes",
        free.source if free else "ledger",
    )
