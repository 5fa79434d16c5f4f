import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.pytest_plugin.round_clock import RoundClock, timer_named


class CountingTimer:
    """Counts its reads, so that what is timed can be told from what is not."""

    def __init__(self):
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return self.reads


@given(num_earlier_reads=st.integers(0, 7), num_rounds=st.integers(1, 5))
def test_the_windows_are_the_last_two_reads_per_round(num_earlier_reads, num_rounds):
    clock = RoundClock(CountingTimer())
    for _ in range(num_earlier_reads):
        clock()
    rounds = []
    for _ in range(num_rounds):
        clock()
        inside_s = time.perf_counter()
        clock()
        rounds.append(inside_s)

    windows = clock.windows(num_rounds)

    assert len(windows) == num_rounds
    for inside_s, window in zip(rounds, windows, strict=True):
        assert window.start_s <= inside_s <= window.end_s
    for before, after in itertools.pairwise(windows):
        assert before.end_s <= after.start_s


def test_it_reads_the_timer_of_the_test_once_each_time():
    timer = CountingTimer()
    clock = RoundClock(timer)

    assert [clock(), clock(), clock()] == [1, 2, 3]


def test_no_rounds_have_no_windows():
    clock = RoundClock(time.perf_counter)
    clock()

    assert clock.windows(0) == []


def test_it_cleans_up_at_once_and_after_each_use_but_never_before_the_read():
    timer, seen = CountingTimer(), []
    clock = RoundClock(timer)

    clock.clean_between_rounds(lambda: seen.append(timer.reads))
    clock()  # start of a round
    clock.note_use()
    clock()  # its end
    clock()  # start of another, in which nothing happens
    clock()

    assert seen == [0, 2]


def test_without_something_to_clean_it_only_reads():
    clock = RoundClock(CountingTimer())
    clock.clean_between_rounds(None)
    clock.note_use()

    assert clock() == 1


@pytest.mark.parametrize("timer", [time.perf_counter, time.process_time])
def test_a_timer_is_found_by_its_name(timer):
    assert timer_named(f"time.{timer.__name__}") is timer
    assert RoundClock(timer).__name__ == timer.__name__
