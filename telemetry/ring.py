"""A bounded queue between threads that never blocks and counts what it loses."""

import itertools
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Keeps the last `capacity` items that were pushed, until they are taken.

    A push is one append to a deque of fixed length, which is atomic and drops the oldest item when
    it is full: no lock, and no wait for a reader that is late. Every item carries its number, so
    that the reader knows exactly how many were lost. What was taken is freed at once; slots that
    were allocated for good would keep `capacity` items alive for each collection of garbage to
    walk through.

    Args:
        capacity: Items kept.
    """

    __slots__ = ("_items", "_next_number", "_num_seen", "_num_taken")

    def __init__(self, capacity: int) -> None:
        self._items: deque[tuple[int, T]] = deque(maxlen=capacity)
        # An atomic counter: an engine's steps may be run by several threads in turn, and their
        # hooks then overlap.
        self._next_number = itertools.count().__next__
        self._num_taken = 0
        self._num_seen = 0  # one more than the highest number taken

    def push(self, item: T) -> None:
        """Add an item, from any thread."""
        self._items.append((self._next_number(), item))

    def take(self, max_items: int) -> list[T]:
        """Take the oldest items, at most `max_items`. One thread at a time may take."""
        taken: list[T] = []
        pop = self._items.popleft
        while len(taken) < max_items:
            try:
                number, item = pop()
            except IndexError:
                break
            self._num_seen = max(self._num_seen, number + 1)
            taken.append(item)
        self._num_taken += len(taken)
        return taken

    @property
    def num_lost(self) -> int:
        """Items that were dropped before the last one taken.

        The newest item is never dropped, so that this is exact once all was taken.
        """
        return self._num_seen - self._num_taken

    def __len__(self) -> int:
        return len(self._items)
