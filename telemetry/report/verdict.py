"""The first thing to read: what ran, its headline figures in a sentence, and what to distrust."""

from collections.abc import Iterator, Mapping

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.happenings import REASON_BITS, throttles
from telemetry.report.sections.health import throttled
from telemetry.report.sections.method import dropped, over_budget
from telemetry.report.sensors import readings
from telemetry.report.values import Figure, NotAvailable
from telemetry.run import Run

# What to show first, and what to show in its place where that is not known.
HEADLINE = (
    ("itl_p50_s",),
    ("itl_p99_s", "itl_max_s"),
    ("ttft_p50_s",),
    ("ttft_p99_s", "ttft_max_s"),
    ("output_tokens_per_s",),
    ("energy_j_per_token", "prefix_hit_ratio"),
    ("memory_peak_bytes",),
    ("memory_free_bytes",),
)
RESIDUAL_TOO_LARGE = 0.05  # of the total


def title(run: Run) -> str:
    """What ran on what."""
    model = run.info.model.get("name") or "A model"
    device = run.info.device.get("name") or run.info.device.get("type") or "an unknown device"
    return f"{model} on {device}"


def headline(figures: Mapping[str, Figure]) -> tuple[Figure, ...]:
    """The figures to put first: of each choice the first that is known, or else the first."""
    return tuple(
        next((figures[key] for key in keys if _is_known(figures[key])), figures[keys[0]])
        for keys in HEADLINE
    )


def _is_known(figure: Figure) -> bool:
    return not isinstance(figure.value, NotAvailable)


def sentence(figures: Mapping[str, Figure], analysis: Analysis) -> str:
    """The verdict in one sentence, naming only what is known."""
    parts = [
        f"{label} {human(figures[key].value, figures[key].unit)}"
        for key, label in (
            ("itl_p50_s", "ITL p50"),
            ("itl_p99_s", "p99"),
            ("ttft_p50_s", "TTFT p50"),
            ("output_tokens_per_s", ""),
            ("energy_j_per_token", ""),
        )
        if _is_known(figures[key])
    ]
    tokens, requests = analysis.num_generated_tokens, len(analysis.run.requests)
    did = f"{tokens:,} token{'s' * (tokens != 1)}"
    if requests:  # tokens of requests that have not ended count, too
        did += f" for {requests:,} request{'s' * (requests != 1)}"
    did += f" in {human(analysis.duration_s, 's')}"
    return f"{did}: {', '.join(part.strip() for part in parts)}." if parts else f"{did}."


def warnings(analysis: Analysis) -> Iterator[str]:
    """What a reader must know before trusting the figures, the gravest first."""
    run = analysis.run
    for event in run.events:
        if event.kind == "device_lost":
            yield f"The device was lost: {event.data.get('reason', 'no reason given')}."
    if not run.ended:
        yield _cut_off(run)
    yield from _device(run)
    yield from _memory(run)
    steps = run.steps
    missed = analysis.missed_replays.total()
    if missed:
        yield f"{missed:,} decode steps were not replayed from a captured graph."
    preempted = sum(steps.num_preempted)
    if preempted:
        yield f"{preempted:,} preemptions: the K/V cache was too small for the load."
    yield from _telemetry(run)


def _cut_off(run: Run) -> str:
    """What a run lacks that was not closed."""
    missing = ["what came after its last complete line"]
    steps = run.steps
    under_way = steps.num_running[-1] + steps.num_waiting[-1] if len(steps) else 0
    if under_way:
        sequences = "sequence that was" if under_way == 1 else "sequences that were"
        missing.append(f"the times of {under_way:,} {sequences} under way")
    if len(run.ledgers) == 1:
        missing.append("the ledger of its end: the one below is of its begin")
    return f"The run was cut off. Missing: {'; '.join(missing)}."


def _device(run: Run) -> Iterator[str]:
    held_s = throttled(run)
    if isinstance(held_s, float | int) and held_s > 0:
        yield f"The device was throttled for {human(held_s, 's')}."
        return
    bits = readings(run, REASON_BITS)
    num_throttled = sum(1 for v in bits.values if throttles(int(v))) if bits else 0
    if bits is not None and num_throttled:
        share = human(num_throttled / len(bits.values), "ratio")
        yield f"The device was throttled in {share} of the samples."


def _memory(run: Run) -> Iterator[str]:
    if not run.ledgers:
        return
    ledger = run.ledgers[-1]
    # On a machine without a GPU other processes are the normal case.
    others = ledger.row("other_processes")
    if ledger.device != "cpu" and others is not None and others.num_bytes:
        yield f"Other processes held {human(others.num_bytes, 'bytes')} of the device's memory."
    residual = ledger.row("residual")
    if residual is not None and residual.num_bytes is not None and ledger.total_bytes:
        if residual.num_bytes < 0:
            yield f"The memory ledger counts {human(-residual.num_bytes, 'bytes')} twice."
        elif residual.num_bytes > RESIDUAL_TOO_LARGE * ledger.total_bytes:
            yield f"{human(residual.num_bytes, 'bytes')} of memory is not explained by the ledger."


def _telemetry(run: Run) -> Iterator[str]:
    lost = dropped(run.overhead)
    if lost:
        yield f"{lost:,} records were dropped because the recorder did not keep up."
    overhead = run.overhead
    if overhead.num_late_ticks > 0.05 * max(1, overhead.num_ticks):
        yield f"{overhead.num_late_ticks:,} samples were skipped because the sampler came too late."
    # One that is off for the whole run stands among the sensors, with its reason.
    failed = {s.name: s.num_gaps for s in run.sensors if s.num_gaps and s.available}
    if failed:
        names = ", ".join(f"{name} ({num_gaps:,})" for name, num_gaps in failed.items())
        yield f"Reads of sensors failed: {names}."
    effect = run.observer_effect
    if effect is not None and over_budget(effect):
        yield (
            f"Measuring slowed the tokens: p50 by {human(effect.p50_change, 'ratio')}, "
            f"p99 by {human(effect.p99_change, 'ratio')}."
        )
