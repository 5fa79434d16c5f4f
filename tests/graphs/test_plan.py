"""Buckets: every number of rows has one, users' own lists are checked, waste is what is padded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import BucketPlan, PlanError, plan_buckets
from graphs.waste import low_load, nano_vllm_sizes, uniform_load, vllm_sizes, waste_table

COUNTS = st.integers(1, 600)


def smallest_that_holds(sizes, num_rows):
    """The law, the slow way; None where no size is large enough."""
    return min((size for size in sizes if size >= num_rows), default=None)


def test_every_number_of_rows_has_the_smallest_bucket_that_holds_it():
    for max_num_seqs in range(1, 601):
        plan = plan_buckets(max_num_seqs)

        assert plan.sizes[-1] == plan.max_num_seqs == max_num_seqs
        for num_rows in {1, max_num_seqs // 3 + 1, *range(max(1, max_num_seqs - 20), max_num_seqs)}:
            assert plan.bucket_for(num_rows) == smallest_that_holds(plan.sizes, num_rows)


def test_the_look_up_table_is_right_for_every_number_of_rows():
    plan = plan_buckets(600)

    assert all(plan.bucket_for(n) == smallest_that_holds(plan.sizes, n) for n in range(1, 601))


@pytest.mark.parametrize("sizes_up_to", [nano_vllm_sizes, vllm_sizes])
def test_lists_of_others_do_not_pass_the_same_test(sizes_up_to):
    """A ladder that does not end at the limit leaves its last steps without a graph."""
    uncovered = [most for most in range(1, 601) if max(sizes_up_to(most)) < most]

    assert 100 in uncovered


def test_the_default_ladder_is_dense_where_padding_costs_most():
    assert plan_buckets(64).sizes == (
        *range(1, 9),
        *range(12, 33, 4),
        *range(40, 65, 8),
    )
    assert plan_buckets(300).sizes[-5:] == (248, 256, 272, 288, 300)
    assert plan_buckets(5).sizes == (1, 2, 3, 4, 5)


def test_graphs_are_captured_largest_first():
    assert plan_buckets(4).capture_order == (4, 3, 2, 1)


@pytest.mark.parametrize("num_rows", [0, -1, 9])
def test_no_bucket_is_for_no_rows_or_too_many(num_rows):
    with pytest.raises(PlanError, match=f"{num_rows} rows.*1 to 8"):
        plan_buckets(8).bucket_for(num_rows)


def test_takes_sizes_in_any_order():
    plan = plan_buckets(16, sizes=[16, 1, 4])

    assert plan.sizes == (1, 4, 16)
    assert [plan.bucket_for(n) for n in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "empty"),
        ([0, 8], "holds 0"),
        ([-2, 8], "holds -2"),
        ([1.5, 8], "holds 1.5"),
        ([True, 8], "holds True"),
        (["4", 8], "holds '4'"),
        ([4, 4, 8], r"\[4\] more than once"),
        ([1, 2, 4], "ends at 4, but `max_num_seqs` is 8"),
        ([1, 8, 16], "ends at 16, but `max_num_seqs` is 8"),
    ],
)
def test_refuses_sizes_that_cannot_work(sizes, message):
    with pytest.raises(PlanError, match=message):
        plan_buckets(8, sizes=sizes)


@pytest.mark.parametrize("max_num_seqs", [0, -1, 2.0, True, None])
def test_refuses_a_limit_that_is_no_count(max_num_seqs):
    with pytest.raises(PlanError, match="`max_num_seqs`"):
        plan_buckets(max_num_seqs)


@given(COUNTS, st.data())
def test_waste_is_the_padded_share_of_all_rows_run(max_num_seqs, data):
    plan = plan_buckets(max_num_seqs)
    rows = data.draw(st.lists(st.integers(1, max_num_seqs), min_size=1, max_size=30))
    histogram = {n: rows.count(n) for n in rows}

    run = sum(plan.bucket_for(n) for n in rows)
    assert plan.expected_waste(histogram) == pytest.approx((run - sum(rows)) / run)


@pytest.mark.parametrize(
    "histogram", [{}, {1: 0}, {0: 1}, {9: 1}, {1: -1, 2: 3}, {1: float("nan")}, {1.5: 1}]
)
def test_refuses_a_histogram_that_counts_nothing_real(histogram):
    with pytest.raises(PlanError, match="histogram"):
        plan_buckets(8).expected_waste(histogram)


@pytest.mark.parametrize("max_num_seqs", [64, 256, 512])
def test_the_default_wastes_less_than_the_lists_of_others(max_num_seqs):
    ours = plan_buckets(max_num_seqs)
    for others in (nano_vllm_sizes, vllm_sizes):
        theirs = BucketPlan(others(max_num_seqs))
        for load in (uniform_load, low_load):
            histogram = load(max_num_seqs)
            assert ours.expected_waste(histogram) < theirs.expected_waste(histogram)


def test_the_table_shows_each_list():
    table = waste_table(100).splitlines()

    assert [line.split()[0] for line in table[1:]] == ["ours", "nano-vllm", "vLLM"]
    assert all(line.count("%") == 2 for line in table[1:])
