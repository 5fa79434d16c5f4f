"""The K/V cache: how full it was, what it spared, and what had to give way."""

from itertools import pairwise

from telemetry.report.analysis import Analysis
from telemetry.report.format import human
from telemetry.report.values import Figure, NotAvailable, Section, Value
from telemetry.run import IntColumn
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
        ends_s = analysis.ends_s
        held = held_mean(ends_s, steps.num_used_blocks, float(ends_s[-1]))
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
            "Hold a known prefix",
            steps.num_cached_blocks[-1] if len(steps) else no_steps,
            "count",
            f"{_SOURCE}, in use or free, at the end",
        ),
        Figure("num_prompt_tokens", "Prompt tokens", hits + computed, "tokens", _SOURCE),
        Figure(
            "prefix_hit_ratio",
            "Prompt found cached",
            hit_ratio,
            "ratio",
            f"{_SOURCE}: hit tokens / prompt tokens",
            num_samples=hits + computed,
        ),
        Figure("num_preemptions", "Preemptions", preempted, "count", _SOURCE),
        Figure(
            "num_evictions_min",
            "Evictions, at least",
            _evictions(steps.num_cached_blocks),
            "count",
            f"{_SOURCE}: falls of the number of blocks that hold a prefix",
        ),
    )
    if not len(steps):
        return Section("cache", "Cache", "No step was recorded.", figures=figures)
    lead = f"At most {human(peak, 'count')} of {human(total, 'count')} blocks were in use"
    if not isinstance(hit_ratio, NotAvailable):
        lead += f", and {human(hit_ratio, 'ratio')} of the prompt tokens were found cached"
    lead += "; no sequence was preempted." if not preempted else f"; {preempted:,} preemptions."
    return Section("cache", "Cache", lead, figures=figures)


def _evictions(num_cached: IntColumn) -> Value:
    """Cached prefixes that were given up, as far as the count of them shows.

    Steps tell how many blocks hold a prefix, and not how many got one: where as many are
    registered as are evicted, nothing moves. To 0 it falls when the cache is reset.
    """
    falls = sum(a - b for a, b in pairwise(num_cached) if 0 < b < a)
    if falls:
        return falls
    return NotAvailable("the number of cached blocks never fell; new ones may stand for old ones")
