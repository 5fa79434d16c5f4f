"""The run's clock and wall time."""

import time

from telemetry.clock import anchor, mono_to_wall_ns, now_ns
from telemetry.records import Anchor


def test_an_anchor_lies_between_readings_around_it():
    before, wall_before = now_ns(), time.time_ns()
    instant = anchor()
    assert before <= instant.mono_ns <= now_ns()
    assert wall_before <= instant.wall_ns


def test_the_nearest_anchor_counts_when_the_wall_clock_was_set():
    anchors = [Anchor(0, 1_000), Anchor(100, 51_100)]  # set forward by 50 us between them

    assert mono_to_wall_ns(10, anchors) == 1_010
    assert mono_to_wall_ns(110, anchors) == 51_110
