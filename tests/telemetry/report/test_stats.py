"""Distributions, histograms and gaps between tokens, against numpy and brute force."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.gaps import token_gaps, tpot_s
from telemetry.stats import Distribution, log_histogram

SAMPLES_NEEDED = {"p50": 1, "p90": 20, "p95": 40, "p99": 200, "p99.9": 2000}

latencies = st.floats(1e-6, 1e3)
samples = st.lists(latencies, min_size=1, max_size=300)


def test_an_empty_sample_has_no_distribution():
    assert Distribution.of([]) is None
    assert Distribution.of([1.0], [0]) is None


@given(samples)
def test_percentiles_are_those_of_numpy_by_nearest_rank(values):
    found = Distribution.of(values)

    for percentile in found.percentiles:
        if len(values) < SAMPLES_NEEDED[percentile.name]:
            assert percentile.value is None
            assert str(SAMPLES_NEEDED[percentile.name]) in percentile.reason
        else:
            share = float(percentile.name.removeprefix("p"))
            assert percentile.value == np.percentile(values, share, method="inverted_cdf")


@pytest.mark.parametrize(("name", "needed"), [("p99", 200), ("p99.9", 2000)])
def test_a_tail_is_shown_from_the_sample_on_that_supports_it(name, needed):
    assert Distribution.of(range(needed - 1)).percentile(name).value is None
    assert Distribution.of(range(needed)).percentile(name).value == needed - 3  # two lie beyond it


@given(samples)
def test_mean_min_and_max_are_those_of_the_sample(values):
    found = Distribution.of(values)

    assert (found.num_samples, found.min, found.max) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(np.mean(values))


@given(st.dictionaries(latencies, st.integers(0, 40), min_size=1))
def test_counts_say_the_same_as_the_values_written_out(counts):
    values = [value for value, count in counts.items() for _ in range(count)]

    assert Distribution.of(counts.keys(), list(counts.values())) == Distribution.of(values)


@given(st.lists(st.floats(-1, 0) | st.floats(1e-12, 1e6), max_size=100))
def test_a_histogram_counts_every_sample_in_its_bucket(values):
    found = log_histogram(values)

    assert sum(found.counts) + found.num_not_positive == len(values)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(1 for value in values if low <= value < high)


@given(samples, st.sampled_from([2, 3, 4]))
def test_a_coarser_histogram_counts_the_same_samples_in_wider_buckets(values, factor):
    found = log_histogram(values).coarser(factor)

    assert sum(found.counts) == len(values)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert high / low == pytest.approx(10 ** (factor / 40))
        assert count == sum(1 for value in values if low <= value < high)


def test_histograms_of_two_runs_share_one_grid():
    one, other = log_histogram([0.0021, 0.9]), log_histogram([0.003, 17.0])

    assert set(one.edges) & set(other.edges)
    assert 1.0 in one.coarser(4).edges or 1.0 in other.edges


# Batches that stay together for some steps, as they do in an engine.
steps = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 4)), max_size=20
).map(lambda batches: [batch for batch, num_steps in batches for _ in range(num_steps)])


def counted(values, counts):
    found = Counter()
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        found[value] += count
    return found


@given(steps)
def test_gaps_are_those_that_a_reader_of_each_sequence_would_time(sampled):
    ends_s = [0.01 * i * i for i in range(len(sampled))]
    itl, stall = [], []
    for seq_id in range(6):
        mine = [(end, ids.count(seq_id)) for end, ids in zip(ends_s, sampled, strict=True)]
        mine = [(end, n) for end, n in mine if n]
        for (before, _), (after, n) in pairwise(mine):
            itl += [(after - before) / n] * n
            stall.append(after - before)

    gaps = token_gaps(ends_s, sampled)

    assert counted(gaps.itl_s, gaps.num_tokens * gaps.num_seqs) == Counter(itl)
    assert counted(gaps.stall_s, gaps.num_seqs) == Counter(stall)
    assert gaps.itl() == Distribution.of(itl)
    assert gaps.stall() == Distribution.of(stall)


def test_several_tokens_in_a_step_share_the_gap_while_the_stall_is_all_of_it():
    gaps = token_gaps([1.0, 1.75], [[7], [7, 7, 7]])

    assert counted(gaps.itl_s, gaps.num_tokens * gaps.num_seqs) == {0.25: 3}
    assert counted(gaps.stall_s, gaps.num_seqs) == {0.75: 1}


def test_time_per_output_token_leaves_out_the_first():
    assert tpot_s(1.0, 2.0, 5) == 0.25
    assert tpot_s(1.0, 1.0, 1) is None
    assert tpot_s(None, 2.0, 5) is None
