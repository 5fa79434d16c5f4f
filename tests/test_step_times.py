"""What is learnt of steps from their durations, and how far it can be trusted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.step_times import NUM_KEPT, StepCost, StepTimes


def learn(steps):
    """`steps`: (decode tokens, prefill tokens, seconds), one after the other."""
    times, now_s = StepTimes(), 100.0
    for num_decodes, num_prefill, duration_s in steps:
        times.note(num_decodes, num_prefill, now_s, now_s + duration_s)
        now_s += duration_s + 1.0  # time between steps is nobody's
    return times.fit()


def test_before_the_first_step_nothing_is_known():
    assert StepTimes().fit() is None


@settings(max_examples=40, deadline=None)
@given(
    base_s=st.floats(1e-4, 0.1),
    decode_s=st.floats(0, 0.01),
    prefill_s=st.floats(0, 0.01),
    work=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 500)), min_size=1, max_size=40),
)
def test_a_straight_line_is_found_again(base_s, decode_s, prefill_s, work):
    true = StepCost(base_s, decode_s, prefill_s)
    found = learn([(d, p, true(d, p)) for d, p in [(1, 0), (7, 0), (0, 40), (5, 90), *work]])

    assert found(20, 300) == pytest.approx(true(20, 300), rel=1e-6)
    assert found(1, 0) == pytest.approx(true(1, 0), rel=1e-6)


def test_a_first_step_that_compiles_something_does_not_count():
    steps = [(0, 50, 9.0), *[(d, 0, 0.01 + d * 0.001) for d in (1, 2, 4, 8) * 5]]
    steps += [(0, p, 0.01 + p * 0.0001) for p in (10, 100, 200) * 3]
    found = learn(steps)

    assert found(4, 100) == pytest.approx(0.01 + 0.004 + 0.01)


@pytest.mark.parametrize("size", [(64, 0), (0, 64)])
def test_one_size_of_step_alone_says_what_such_steps_take(size):
    assert learn([(*size, 0.25)] * 9)(*size) == pytest.approx(0.25)


def test_more_work_is_never_cheaper():
    found = learn([(1, 0, 0.03), (8, 0, 0.01), (0, 10, 0.02), (0, 90, 0.01)] * 5)

    assert found.decode_s == found.prefill_s == 0
    assert 0.01 <= found.base_s <= 0.03


def test_it_follows_a_machine_that_changes_and_keeps_what_it_knows_of_prompts():
    steps = (
        [(0, 100, 0.5), (0, 10, 0.05)] * 10 + [(1, 0, 0.9)] * NUM_KEPT + [(1, 0, 0.1)] * NUM_KEPT
    )
    found = learn(steps)

    assert found(1, 0) == pytest.approx(0.1, rel=0.3)
    assert found(0, 100) == pytest.approx(0.5, rel=0.3)


def test_of_a_step_that_overlaps_the_one_before_only_the_rest_counts():
    times = StepTimes()
    times.note(1, 0, 10.0, 10.5)
    for index in range(1, 20):
        times.note(1, 0, 10.0 + index * 0.5 - 0.4, 10.5 + index * 0.5)

    assert times.fit()(1, 0) == pytest.approx(0.5)
