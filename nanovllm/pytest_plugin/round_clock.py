"""The timer of a benchmark, which remembers when it was read.

pytest-benchmark tells nobody when a round begins and ends, but it lets a test choose its timer,
and reads it exactly then:

    read   (warm-up)   read   round   read   round   read
    reads: .......................[-4]   [-3] [-2]   [-1]        of two rounds

So the last two reads per round are the rounds that count; what comes before is calibration and
warm-up. Nothing reads the timer after the last round.
"""

import importlib
import time
from collections.abc import Callable

import attrs


@attrs.frozen
class Window:
    """A round, on the clock of `time.perf_counter`."""

    start_s: float
    end_s: float


class RoundClock:
    """Callable as a timer. Between rounds, off the clock, it may clean up."""

    def __init__(self, timer: Callable[[], float]) -> None:
        """Read a timer.

        Args:
            timer: Whatever the test is timed with.
        """
        self.__name__ = getattr(timer, "__name__", repr(timer))  # what the saved run shows
        self._timer = timer
        self._reads_s: list[float] = []
        self._between_rounds: Callable[[], None] | None = None
        self._is_used = False

    def __call__(self) -> float:
        """Read the timer."""
        value = self._timer()
        self._reads_s.append(time.perf_counter())
        if self._is_used and self._between_rounds is not None:
            # After the read that ended the round, and so off the clock.
            self._is_used = False
            self._between_rounds()
        return value

    def clean_between_rounds(self, clean: Callable[[], None] | None) -> None:
        """Call this after each round in which `note_use` was called, and once now."""
        self._between_rounds = clean
        if clean is not None:
            clean()

    def note_use(self) -> None:
        """The engine did something: what it left behind is to be cleaned up."""
        self._is_used = True

    def windows(self, num_rounds: int) -> list[Window]:
        """The rounds that count, in order; of a benchmark that has ended."""
        reads_s = self._reads_s[-2 * num_rounds :] if num_rounds else []
        return [
            Window(start_s, end_s)
            for start_s, end_s in zip(reads_s[::2], reads_s[1::2], strict=True)
        ]


def timer_named(name: str) -> Callable[[], float]:
    """The timer of pytest-benchmark's `--benchmark-timer`, such as "time.perf_counter"."""
    module, _, attribute = name.rpartition(".")
    timer: Callable[[], float] = getattr(importlib.import_module(module), attribute)
    return timer
