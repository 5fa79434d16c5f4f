"""Joins, means, bands and energy, against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.series import as_of, bands, energy, held_mean, integral, sampled_mean

times = st.lists(st.floats(0, 100), min_size=1, max_size=60).map(sorted)


@given(times, st.floats(-1, 101))
def test_as_of_is_the_last_reading_that_was_complete(times_s, at):
    known = [i for i, t in enumerate(times_s) if t <= at]

    assert as_of(times_s, at) == (known[-1] if known else None)


@given(times, st.data())
def test_the_integral_is_numpys(times_s, data):
    values = data.draw(st.lists(st.floats(0, 1e3), min_size=len(times_s), max_size=len(times_s)))

    assert integral(times_s, values) == pytest.approx(np.trapezoid(values, times_s))


def test_a_held_value_counts_until_the_next():
    assert held_mean([0.0, 1.0, 3.0], [10.0, 40.0, 0.0], 4.0) == (10 + 80 + 0) / 4
    assert held_mean([2.0], [7.0], 2.0) is None
    assert held_mean([], [], 2.0) is None


def test_a_sampled_mean_weighs_by_time_and_not_by_number():
    assert sampled_mean([0.0, 9.0, 10.0], [1.0, 1.0, 3.0]) == (9 * 1 + 1 * 2) / 10
    assert sampled_mean([1.0], [5.0]) is None


readings = st.lists(
    st.tuples(st.floats(-5, 105), st.none() | st.floats(-1e6, 1e6)), max_size=200
).map(lambda pairs: sorted(pairs, key=lambda pair: pair[0]))


@given(readings, st.integers(1, 40))
def test_bands_lose_no_extreme_and_invent_nothing(pairs, num_columns):
    inside = [v for t, v in pairs if v is not None and 0 <= t <= 100]

    found = bands([t for t, _ in pairs], [v for _, v in pairs], 0.0, 100.0, num_columns)

    present = [band for band in found if band is not None]
    assert len(found) == num_columns
    assert bool(present) == bool(inside)
    if inside:
        assert min(band.low for band in present) == min(inside)
        assert max(band.high for band in present) == max(inside)
    assert all(band.low <= band.mid <= band.high for band in present)


def test_a_reading_at_the_right_edge_is_in_the_last_column():
    found = bands([0.0, 10.0], [1.0, 2.0], 0.0, 10.0, 2)

    assert [band.mid for band in found] == [1.0, 2.0]


def counter(num_moves, start=5.0):
    """A counter of 100 W that moves each 0.1 s, and its times."""
    return [0.1 * i for i in range(num_moves + 1)], [start + 10.0 * i for i in range(num_moves + 1)]


def test_energy_is_what_the_counter_moved_by_with_the_integral_beside_it():
    at_s, joules = counter(30)

    found = energy(at_s, joules, at_s, [100.0] * len(at_s))

    assert found.joules == pytest.approx(300.0)
    assert found.integrated_joules == pytest.approx(300.0)
    assert found.ratio == pytest.approx(1.0)
    assert not found.methods_disagree


def test_energy_of_a_window_with_fewer_than_twenty_moves_is_not_known():
    found = energy(*counter(19), [], [])

    assert found.joules is None
    assert "19 times" in found.reason
    assert energy(*counter(20), [], []).joules is not None


def test_reading_a_counter_faster_than_it_moves_makes_no_window_longer():
    at_s, joules = counter(10)
    twice = sorted([*at_s, *(t + 0.01 for t in at_s)])

    found = energy(twice, [j for j in joules for _ in range(2)], [], [])

    assert found.num_counter_steps == 10
    assert found.joules is None


def test_a_counter_that_went_backwards_gives_no_part_of_a_total():
    at_s, joules = counter(40)
    joules[25:] = [j - 200.0 for j in joules[25:]]

    found = energy(at_s, joules, [], [])

    assert found.joules is None
    assert "backwards" in found.reason


def test_methods_that_differ_by_more_than_a_tenth_are_said_to():
    at_s, joules = counter(30)

    assert energy(at_s, joules, at_s, [115.0] * len(at_s)).methods_disagree


def test_without_a_counter_the_reason_says_so_and_the_integral_stays():
    found = energy([], [], [0.0, 1.0], [50.0, 50.0])

    assert (found.joules, found.reason) == (None, "no energy counter")
    assert found.integrated_joules == 50.0
