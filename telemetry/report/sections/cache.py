"""The K/V cache: how full it was, what it spared, and what had to give way."""

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.values import Figure, NotAvailable, Section, Value
from telemetry.series import held_mean

_SOURCE = "step records"


def cache(analysis: Analysis) -> Section:
    """The cache section."""
    steps = analysis.run.steps
    no_steps = NotAvailable("no step was recorded")
    total: Value = steps.num_free_blocks[0] + steps.num_used_blocks[0] if len(steps) else no_steps
    peak: Value = max(steps.num_used_blocks) if len(steps) else no_steps
    mean: Value = no_steps
    if len(steps):
        held = held_mean(analysis.ends_s, steps.num_used_blocks, analysis.ends_s[-1])
        mean = NotAvailable("a single step has no mean over time") if held is None else held
    hits, computed = sum(steps.num_prefix_hit_tokens), sum(steps.num_prefill_tokens)
    hit_ratio: Value = (
        hits / (hits + computed) if hits + computed else NotAvailable("no prompt was computed")
    )
    preempted = sum(steps.num_preempted)
    figures = (
        Figure("kv_blocks_total", "K/V blocks", total, "count", _SOURCE),
        Figure("kv_blocks_peak", "Peak in use", peak, "count", _SOURCE),
        Figure("kv_blocks_mean", "Mean in use", mean, "count", f"{_SOURCE}, weighted by time"),
        Figure(
            "kv_blocks_cached",
            "Free, with a known prefix",
            steps.num_cached_blocks[-1] if len(steps) else no_steps,
            "count",
            f"{_SOURCE}, at the end",
        ),
        Figure("num_prompt_tokens", "Prompt tokens", hits + computed, "tokens", _SOURCE),
        Figure(
            "prefix_hit_ratio",
            "Found cached",
            hit_ratio,
            "ratio",
            f"{_SOURCE}: hit tokens / prompt tokens",
            num_samples=hits + computed,
        ),
        Figure("num_preemptions", "Preemptions", preempted, "count", _SOURCE),
        Figure(
            "num_evictions",
            "Evictions",
            NotAvailable("the engine does not tell them"),
            "count",
            _SOURCE,
        ),
    )
    if not len(steps):
        return Section("cache", "Cache", "No step was recorded.", figures=figures)
    lead = f"At most {human(peak, 'count')} of {human(total, 'count')} blocks were in use"
    if not isinstance(hit_ratio, NotAvailable):
        lead += f", and {human(hit_ratio, 'ratio')} of the prompt tokens were found cached"
    lead += "; no sequence was preempted." if not preempted else f"; {preempted:,} preemptions."
    return Section("cache", "Cache", lead, figures=figures)
