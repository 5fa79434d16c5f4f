"""Reports as text: a line per figure, a column per run."""

from collections.abc import Sequence

from nanovllm.workloads.bandwidth import Bandwidth
from nanovllm.workloads.closed_batch import LatencyReport
from nanovllm.workloads.distribution import Distribution, num_samples_needed
from nanovllm.workloads.open_loop import LoadReport

NONE = "-"
"""Stands where a sample is too small for its percentile, or where there is nothing to tell."""

FOOTNOTE = (
    f"{NONE}: too few samples. A p90 needs {num_samples_needed(90)}, "
    f"a p99 {num_samples_needed(99)}; the maximum is given for all."
)

Lines = list[tuple[str, str]]


def table(columns: Sequence[tuple[str, Lines]]) -> list[str]:
    """Columns that have the same lines side by side."""
    labels = [label for label, _ in columns[0][1]]
    label_width = max(map(len, labels))
    widths = [max(len(title), *(len(value) for _, value in lines)) for title, lines in columns]

    def line(label: str, values: Sequence[str]) -> str:
        cells = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        return f"{label:<{label_width}}  {'  '.join(cells)}".rstrip()

    head = line("", [title for title, _ in columns])
    body = [
        line(label, [lines[row][1] for _, lines in columns]) for row, label in enumerate(labels)
    ]
    return [head, "-" * len(head), *body, *([FOOTNOTE] if any(NONE in one for one in body) else [])]


def latency_lines(report: LatencyReport, bandwidth: Bandwidth) -> Lines:
    """The figures of a batch."""
    share = report.bandwidth_share(bandwidth)
    limit_s = bandwidth.limit_s(report.decode_bytes)
    return [
        *_percentiles("Latency of a batch", report.call, "s"),
        *_percentiles("TTFT", report.ttft, "ms"),
        *_percentiles("ITL", report.itl, "ms"),
        ("Output token throughput (tok/s)", f"{report.output_tokens_per_s:.1f}"),
        ("Decode step, median (ms)", _scaled(report.decode_step.median_s, "ms")),
        ("Its limit by memory bandwidth (ms)", _scaled(limit_s, "ms")),
        ("Share of the bandwidth limit", NONE if share is None else f"{share:.0%}"),
        ("Prompt tokens from the prefix cache", _percent(report.prefix_hit_rate)),
        ("Steps", ", ".join(f"{count} {mode}" for mode, count in report.modes.items())),
        ("Preemptions", str(report.num_preempted)),
    ]


def load_lines(report: LoadReport, *, limit_tokens_per_s: float | None) -> Lines:
    """The figures of a load, under the names that `vllm bench` made usual.

    Args:
        report: What was measured.
        limit_tokens_per_s: Output tokens a second that the memory's bandwidth allows, if known.
    """
    tokens_per_s = report.per_second(report.num_output_tokens)
    share = tokens_per_s / limit_tokens_per_s if limit_tokens_per_s else None
    one = report.distributions()
    total = report.num_prompt_tokens + report.num_output_tokens
    return [
        ("Successful requests", str(len(report.served))),
        ("Failed requests", str(report.num_failed)),
        ("Benchmark duration (s)", f"{report.duration_s:.2f}"),
        ("Total input tokens", str(report.num_prompt_tokens)),
        ("Total generated tokens", str(report.num_output_tokens)),
        ("Request throughput (req/s)", f"{report.per_second(len(report.served)):.2f}"),
        ("Request goodput (req/s)", f"{report.per_second(report.num_good):.2f}"),
        ("Output token throughput (tok/s)", f"{tokens_per_s:.1f}"),
        ("Total token throughput (tok/s)", f"{report.per_second(total):.1f}"),
        ("Share of the bandwidth limit", NONE if share is None else f"{share:.0%}"),
        *_percentiles("TTFT", one["ttft"], "ms"),
        *_percentiles("TPOT", one["tpot"], "ms"),
        *_percentiles("ITL", one["itl"], "ms"),
        *_percentiles("E2EL", one["e2el"], "ms"),
    ]


def _percentiles(name: str, one: Distribution, unit: str) -> Lines:
    values = {
        "mean": one.mean_s,
        "p50": one.median_s,
        "p90": one.percentile_s(90),
        "p99": one.percentile_s(99),
        "max": one.max_s,
    }
    return [(f"{name}, {what} ({unit})", _scaled(value, unit)) for what, value in values.items()]


def _scaled(value_s: float | None, unit: str) -> str:
    if value_s is None:
        return NONE
    return f"{value_s * 1e3:.2f}" if unit == "ms" else f"{value_s:.3f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"
