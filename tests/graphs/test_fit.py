"""Fitted buckets: as cheap as the best of all sets that there are."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import BucketPlan, PlanError, expected_cost, fit_buckets, interpolate_costs

MAX_ROWS = 9
COSTS = st.dictionaries(st.integers(1, MAX_ROWS), st.integers(0, 50), min_size=1)


def best_by_trying_all(histogram, costs, max_num_graphs):
    """Oracle: every set of sizes that has the largest."""
    *smaller, largest = sorted(costs)
    return min(
        expected_cost(BucketPlan((*chosen, largest)), histogram, costs)
        for count in range(max_num_graphs)
        for chosen in combinations(smaller, count)
    )


@given(COSTS, st.integers(1, 5), st.data())
def test_no_set_of_sizes_within_the_budget_is_cheaper(costs, max_num_graphs, data):
    rows = st.integers(1, max(costs))
    histogram = data.draw(st.dictionaries(rows, st.integers(1, 20), min_size=1))

    plan = fit_buckets(histogram, costs, max_num_graphs=max_num_graphs)

    assert set(plan.sizes) <= set(costs) and plan.max_num_seqs == max(costs)
    assert len(plan.sizes) <= max_num_graphs
    assert expected_cost(plan, histogram, costs) == pytest.approx(
        best_by_trying_all(histogram, costs, max_num_graphs)
    )


@given(COSTS, st.data())
def test_a_graph_is_not_spent_where_it_saves_nothing(costs, data):
    rows = st.integers(1, max(costs))
    histogram = data.draw(st.dictionaries(rows, st.integers(1, 20), min_size=1))

    plan = fit_buckets(histogram, costs, max_num_graphs=MAX_ROWS)

    cost = expected_cost(plan, histogram, costs)
    for size in plan.sizes[:-1]:
        fewer = BucketPlan(tuple(other for other in plan.sizes if other != size))
        assert expected_cost(fewer, histogram, costs) > cost


def test_sizes_go_where_the_load_is():
    costs = {n: 10.0 + n for n in range(1, 65)}

    assert fit_buckets({3: 90, 17: 9, 64: 1}, costs, max_num_graphs=3).sizes == (3, 17, 64)
    assert fit_buckets({3: 90, 17: 9, 64: 1}, costs, max_num_graphs=2).sizes == (3, 64)
    assert fit_buckets({3: 90}, costs, max_num_graphs=1).sizes == (64,)


def test_costs_between_measurements_lie_on_straight_lines():
    costs = interpolate_costs({2: 10.0, 6: 30.0}, 8)

    assert list(costs) == list(range(1, 9))
    assert [costs[n] for n in (1, 2, 3, 6, 8)] == [10.0, 10.0, 15.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("histogram", "costs", "max_num_graphs", "message"),
    [
        ({1: 1}, {}, 1, "`costs` is empty"),
        ({1: 1}, {0: 1.0}, 1, "0 rows costs 1.0"),
        ({1: 1}, {1: -1.0}, 1, "costs -1.0"),
        ({1: 1}, {1: float("nan")}, 1, "costs nan"),
        ({1: 1}, {1: 1.0}, 0, "`max_num_graphs` is 0"),
        ({2: 1}, {1: 1.0}, 1, r"2 rows.*1\.\.1"),
    ],
)
def test_refuses_what_no_plan_can_be_made_of(histogram, costs, max_num_graphs, message):
    with pytest.raises(PlanError, match=message):
        fit_buckets(histogram, costs, max_num_graphs=max_num_graphs)
