import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.workloads.distribution import Distribution, nearest_rank, num_samples_needed

SAMPLES = st.lists(st.floats(0, 1e3), min_size=1, max_size=60)


@given(SAMPLES, st.sampled_from([1, 25, 50, 90, 95, 99, 99.9, 100]))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(values, percent):
    found = nearest_rank(sorted(values), percent)

    def share(value):
        return sum(one <= value for one in values) * 100 / len(values)

    assert found in values
    assert share(found) >= percent - 1e-9
    smaller = [value for value in values if value < found]
    assert all(share(value) < percent for value in smaller)


@pytest.mark.parametrize(
    ("percent", "needed"), [(50, 1), (90, 20), (95, 40), (99, 200), (99.9, 2000)]
)
def test_two_samples_must_lie_beyond_a_percentile(percent, needed):
    assert num_samples_needed(percent) == needed

    values = range(needed)
    enough = Distribution.of(values)
    assert enough.percentile_s(percent) is not None
    assert Distribution.of(range(needed - 1)).percentile_s(percent) is None
    if percent > 50:
        beyond = [value for value in values if value > enough.percentile_s(percent)]
        assert len(beyond) == 2


def test_data_tell_what_the_sample_supports_and_why_the_rest_is_missing():
    data = Distribution.of(i / 1000 for i in range(1, 201)).as_data()

    assert data["num_samples"] == 200
    assert (data["p50_s"], data["p90_s"], data["p99_s"], data["max_s"]) == (0.1, 0.18, 0.198, 0.2)
    assert "p99.9_s" not in data
    assert data["left_out"] == "p99.9 needs 2000 samples; there are 200"


def test_nothing_is_left_out_of_a_large_sample():
    data = Distribution.of([0.5] * 2000).as_data()

    assert data["p99.9_s"] == data["mean_s"] == 0.5
    assert "left_out" not in data


def test_no_samples_have_no_figures():
    none = Distribution.of([])

    assert (none.mean_s, none.median_s, none.max_s, none.percentile_s(50)) == (None,) * 4
    assert none.as_data()["num_samples"] == 0
