"""The longest waits between tokens, and what explains each of them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import numpy as np

from telemetry.report.analysis import Analysis
from telemetry.report.happenings import Happening, happenings
from telemetry.report.sensors import Readings, rates, readings
from telemetry.report.values import Column, NotAvailable, Table, Value

NUM_WORST = 10
IDLE_CORES = 0.2  # a process that got less was waiting for a processor, or asleep


def worst_gaps(analysis: Analysis) -> Table:
    """The worst gaps, the longest first."""
    gaps, starts_s, ends_s = analysis.gaps, analysis.starts_s, analysis.ends_s
    worst = np.argsort(-gaps.stall_s, kind="stable")[:NUM_WORST].tolist()
    happened = happenings(analysis)
    # A happening may begin before a gap and reach into it: the longest one says how far to look.
    longest_s = max((h.end_s - h.start_s for h in happened), default=0.0)
    starts = [h.start_s for h in happened]
    cpu = readings(analysis.run, "host.cpu_ns")
    busy = rates(cpu, "count") if cpu else None
    rows: list[tuple[Value, ...]] = []
    for i in worst:
        step, previous_step = int(gaps.step[i]), int(gaps.previous_step[i])
        stall_s = float(gaps.stall_s[i])
        start_s, end_s = float(ends_s[previous_step]), float(ends_s[step])
        near = happened[bisect_left(starts, start_s - longest_s) : bisect_left(starts, end_s)]
        inside = [h for h in near if h.end_s > start_s or h.start_s >= start_s]
        inner = slice(previous_step + 1, step + 1)
        in_steps_s = float(np.sum(ends_s[inner] - np.maximum(starts_s[inner], start_s)))
        between_s = max(0.0, stall_s - in_steps_s)
        cores = _cores_busy(busy, end_s)
        rows.append(
            (
                start_s,
                stall_s,
                int(gaps.num_seqs[i]),
                step - previous_step,
                between_s,
                cores,
                _explained(inside, stall_s=stall_s, between_s=between_s, cores=cores),
            )
        )
    columns = (
        Column("At", "s"),
        Column("Gap", "s"),
        Column("Sequences", "count"),
        Column("Steps in it", "count"),
        Column("Between steps", "s"),
        Column("Cores busy", "count"),
        Column("What ran then"),
    )
    return Table("The worst gaps between tokens", columns, tuple(rows))


def _cores_busy(busy: Readings | None, at_s: float) -> Value:
    """How many cores the process got between the two readings around `at_s`."""
    if busy is None:
        return NotAvailable("the process's time was not read")
    # A slope stands at the end of its stretch, which is the first one from `at_s` on.
    position = bisect_left(busy.times_s, at_s)
    if position == len(busy.times_s):
        return NotAvailable("not read again after it")
    return round(busy.values[position], 2)


def _explained(
    inside: Sequence[Happening], *, stall_s: float, between_s: float, cores: Value
) -> str:
    """Each thing once, with how often; or why nothing went on."""
    if not inside:
        where = "between steps" if between_s > stall_s / 2 else "in a step"
        if isinstance(cores, float) and cores < IDLE_CORES:
            return f"the process hardly ran, {where}"
        return "no step: the caller's own time" if between_s > stall_s / 2 else "only decoding"
    counts = Counter(h.label for h in inside)
    named = [f"{label} ({count} times)" if count > 1 else label for label, count in counts.items()]
    return "; ".join(named[:4]) + (f"; {len(named) - 4} more" if len(named) > 4 else "")
