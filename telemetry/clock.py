"""One clock for everything, and instants that tie it to wall time."""

import time
from collections.abc import Sequence

from telemetry.records import Anchor

now_ns = time.perf_counter_ns


def anchor(num_tries: int = 5) -> Anchor:
    """Read both clocks at one instant.

    The wall clock is read between two readings of the run's clock; of a few tries the closest pair
    counts, because a thread may be put aside between any two of them.
    """
    best: tuple[int, Anchor] | None = None
    for _ in range(num_tries):
        before = now_ns()
        wall_ns = time.time_ns()
        after = now_ns()
        if best is None or after - before < best[0]:
            best = after - before, Anchor((before + after) // 2, wall_ns)
    assert best is not None
    return best[1]


def mono_to_wall_ns(mono_ns: int, anchors: Sequence[Anchor]) -> int:
    """A time of the run's clock as nanoseconds since 1970, by the anchor nearest to it.

    The nearest one, because wall clocks are set and slewed while a run goes on.
    """
    nearest = min(anchors, key=lambda a: abs(a.mono_ns - mono_ns))
    return nearest.wall_ns + mono_ns - nearest.mono_ns
