"""The queue between threads: bounded, and exact about what it loses."""

import sys
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.ring import Ring


@settings(deadline=None, max_examples=100)
@given(
    capacity=st.integers(1, 8),
    actions=st.lists(st.integers(-9, 9).filter(bool), max_size=60),
)
def test_nothing_is_lost_without_being_counted(capacity, actions):
    """Positive numbers push so many items, negative ones take at most so many."""
    ring, pushed, taken = Ring(capacity), 0, []
    for action in actions:
        if action > 0:
            for _ in range(action):
                ring.push(pushed)
                pushed += 1
        else:
            taken += ring.take(-action)
        assert len(ring) <= capacity
    taken += ring.take(capacity)

    assert taken == sorted(set(taken))  # in order, none twice
    assert ring.num_lost == pushed - len(taken)
    assert len(ring) == 0


@settings(deadline=None, max_examples=100)
@given(capacity=st.integers(1, 8), pushed=st.integers(0, 20))
def test_the_oldest_items_make_room_for_the_newest(capacity, pushed):
    ring = Ring(capacity)
    for item in range(pushed):
        ring.push(item)

    assert ring.take(99) == list(range(pushed))[-capacity:]


def test_threads_that_push_at_once_lose_nothing_uncounted():
    ring, taken = Ring(64), []
    threads = [
        threading.Thread(target=lambda t=t: [ring.push((t, i)) for i in range(2000)])
        for t in range(3)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken += ring.take(16)
    finally:
        sys.setswitchinterval(interval)
    taken += ring.take(64)

    assert len(set(taken)) == len(taken)
    assert ring.num_lost == 6000 - len(taken)
