"""Latency: to the first token, between tokens, by batch size, and the worst gaps explained."""

import numpy as np

from telemetry.report.analysis import Analysis, statistic, statistics_of
from telemetry.report.format import human
from telemetry.report.sections.worst_gaps import worst_gaps
from telemetry.report.values import (
    Chart,
    Column,
    Figure,
    HistogramChart,
    NotAvailable,
    RangeChart,
    RangeRow,
    Section,
    Table,
    Value,
)
from telemetry.stats import PERCENTS, Distribution, num_samples_needed

MAX_BATCH_ROWS = 12
MIN_DRAWN = 20  # fewer samples have no shape; the table has their figures
DEFINITIONS = (
    "TTFT, time to first token: from arrival. ITL, time between tokens: from token to token of a "
    "sequence, pooled over all of them; a gap that brings n tokens counts as n times gap / n. "
    "Stall: the same gaps, undivided. TPOT, time per output token: first token to last of a "
    "request, over its tokens less one. Queue: from arrival to the begin of the first step."
)
_TOKENS = "token to token of a sequence, pooled"


def latency(analysis: Analysis) -> Section:
    """The latency section."""
    no_tokens = "no sequence got two tokens"
    no_requests = "no request ended"
    tabled = (
        *statistics_of(
            "ttft", "TTFT", analysis.ttft, ("p50", "p99", "max"),
            unit="s", source="request records: arrival to first token", missing=no_requests,
        ),
        *statistics_of(
            "itl", "ITL", analysis.itl, ("p50", "p90", "p99", "p99.9", "max"),
            unit="s", source=_TOKENS, missing=no_tokens,
        ),
        *statistics_of(
            "stall", "Stall", analysis.stall, ("p99", "max"),
            unit="s", source="the same gaps, undivided by tokens", missing=no_tokens,
        ),
        *statistics_of(
            "tpot", "TPOT", analysis.tpot, ("p50", "max"),
            unit="s", source="request records: decode time / (tokens - 1)", missing=no_requests,
        ),
        *statistics_of(
            "queue", "Queue", analysis.queue, ("p50", "max"),
            unit="s", source="request records: arrival to first step", missing=no_requests,
        ),
    )  # fmt: skip
    charts: list[Chart] = []
    for key, title, spread in (
        ("itl_histogram", "Time between tokens", analysis.itl),
        ("ttft_histogram", "Time to first token", analysis.ttft),
        ("queue_histogram", "Time in the queue", analysis.queue),
    ):
        if spread is not None and spread.histogram.counts and spread.num_samples >= MIN_DRAWN:
            charts.append(_histogram(key, title, spread))
    by_batch = _by_batch(analysis)
    if by_batch is not None:
        charts.insert(1, by_batch)  # below the distribution that it takes apart
    return Section(
        "latency",
        "Latency",
        _lead(analysis),
        figures=_throughput(analysis),
        charts=tuple(charts),
        summary=(_percentiles(analysis),),
        tables=(worst_gaps(analysis),) if len(analysis.gaps) else (),
        tabled=tabled,
        notes=(DEFINITIONS,),
    )


def _lead(analysis: Analysis) -> str:
    itl = analysis.itl
    if itl is None:
        return "No sequence got two tokens, so there is no time between tokens."
    p50 = itl.percentile("p50").value
    assert p50 is not None  # every sample has a median
    lead = f"Half of the tokens came within {human(p50, 's')} of the one before"
    p99 = itl.percentile("p99").value
    if p99 is not None:
        lead += f", all but one in a hundred within {human(p99, 's')}"
    return f"{lead}; the longest wait was {human(itl.max, 's')}."


def _percentiles(analysis: Analysis) -> Table:
    kinds = (
        ("First token (TTFT)", analysis.ttft),
        ("Next token (ITL)", analysis.itl),
        ("Stall", analysis.stall),
        ("Per token (TPOT)", analysis.tpot),
        ("Queue", analysis.queue),
    )
    most = max((spread.num_samples for _, spread in kinds if spread), default=0)
    # A column that no sample supports would say so in each of its rows.
    names = (*(f"p{p:g}" for p in PERCENTS if most >= num_samples_needed(p)), "max")
    rows: list[tuple[Value, ...]] = [
        (
            label,
            spread.num_samples if spread else 0,
            *(statistic(spread, name, "no sample") for name in names),
        )
        for label, spread in kinds
    ]
    columns = (
        Column("Latency"),
        Column("Samples", "count"),
        *(Column(name, "s") for name in names),
    )
    left_out = [
        f"p{p:g} from {num_samples_needed(p):,} samples on"
        for p in PERCENTS
        if most < num_samples_needed(p)
    ]
    caption = "Percentiles, where the sample supports them"
    return Table(
        f"{caption} ({', '.join(left_out)})" if left_out else caption, columns, tuple(rows)
    )


def _throughput(analysis: Analysis) -> tuple[Figure, ...]:
    missing = NotAvailable("no step was recorded")
    serving_s = analysis.serving_s
    tokens = analysis.num_generated_tokens
    return (
        Figure(
            "output_tokens_per_s",
            "Output tokens per second",
            tokens / serving_s if serving_s else missing,
            "tokens/s",
            "tokens / time from the first step to the last",
            num_samples=tokens,
        ),
        Figure(
            "num_generated_tokens", "Tokens generated", tokens, "count", "step records: sampled"
        ),
        Figure(
            "num_requests", "Requests ended", len(analysis.run.requests), "count", "request records"
        ),
    )


def _histogram(key: str, title: str, spread: Distribution) -> HistogramChart:
    marks = [
        (p.name, p.value)
        for p in spread.percentiles
        if p.value is not None and p.name in ("p50", "p99", "p99.9")
    ]
    # A small sample in narrow buckets shows its own noise.
    n = spread.num_samples
    histogram = spread.histogram.coarser(4 if n < 300 else 2 if n < 3000 else 1)
    edges = histogram.edges
    num_below = 0
    rows: list[tuple[Value, ...]] = []
    for low, high, count in zip(edges, edges[1:], histogram.counts, strict=False):
        num_below += count
        if count:
            rows.append((low, high, count, num_below / spread.num_samples))
    columns = (
        Column("From", "s"),
        Column("To", "s"),
        Column("Samples", "count"),
        Column("Up to here", "ratio"),
    )
    return HistogramChart(
        key,
        f"{title}, {spread.num_samples:,} samples",
        "s",
        histogram,
        (*marks, ("max", spread.max)),
        Table(title, columns, tuple(rows)),
    )


def _by_batch(analysis: Analysis) -> RangeChart | None:
    """ITL by the number of sequences in the step that ended the gap."""
    gaps = analysis.gaps
    group_of = np.asarray(analysis.run.steps.num_rows)[gaps.step]
    groups = np.unique(group_of).tolist()
    if len(groups) < 2:
        return None  # nothing to compare
    if len(groups) > MAX_BATCH_ROWS:
        # The next power of two.
        group_of = 1 << np.ceil(np.log2(np.maximum(group_of, 1))).astype(np.int64)
        groups = np.unique(group_of).tolist()
        names = {n: f"{n // 2 + 1} to {n} rows" if n > 2 else f"{n} rows" for n in groups}
    else:
        names = {n: f"{n} row" if n == 1 else f"{n} rows" for n in groups}
    itl_s, num_samples = gaps.itl_s, gaps.num_tokens * gaps.num_seqs
    rows: list[tuple[Value, ...]] = []
    ranges = []
    for num_rows in groups:
        inside = group_of == num_rows
        spread = Distribution.of(itl_s[inside], num_samples[inside])
        assert spread is not None
        p50 = spread.percentile("p50").value
        assert p50 is not None
        # The largest percentile that the sample supports.
        tail = next(p for p in reversed(spread.percentiles[:4]) if p.value is not None)
        assert tail.value is not None
        n = spread.num_samples
        ranges.append(
            RangeRow(
                names[num_rows],
                p50,
                tail.value,
                spread.max,
                f"{tail.name} {human(tail.value, 's')}",
            )
        )
        rows.append(
            (
                names[num_rows],
                n,
                p50,
                *(statistic(spread, name, "") for name in ("p90", "p99", "max")),
            )
        )
    columns = (
        Column("Sequences in the step"),
        Column("Tokens", "count"),
        Column("p50", "s"),
        Column("p90", "s"),
        Column("p99", "s"),
        Column("Max", "s"),
    )
    return RangeChart(
        "itl_by_batch",
        "Time between tokens by batch size",
        "s",
        ("p50", "p99 (or the highest percentile that the sample supports)", "max"),
        tuple(ranges),
        Table("Time between tokens by batch size", columns, tuple(rows)),
    )
