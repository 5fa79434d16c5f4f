"""Pauses of Python's garbage collector, which stop the engine's thread like any other."""

import gc
import time
from typing import Any

from telemetry.ring import Ring

# Shorter ones are summed up only.
EVENT_NS = 100_000


class GcWatch:
    """Counts collections and keeps the long ones, from its construction until `close`.

    The callbacks run in whichever thread sets off a collection, one at a time.

    Attributes:
        pause_ns: Duration of all collections together.
        num_collections: How many.
        pauses: `(begin in ns, duration in ns, generation)` of those from 0.1 ms.
    """

    def __init__(self) -> None:
        self.pause_ns = 0
        self.num_collections = 0
        self.pauses: Ring[tuple[int, int, int]] = Ring(1024)
        self._begin_ns: int | None = None
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begin_ns = time.perf_counter_ns()
        elif self._begin_ns is not None:
            duration = time.perf_counter_ns() - self._begin_ns
            self.pause_ns += duration
            self.num_collections += 1
            if duration >= EVENT_NS:
                self.pauses.push((self._begin_ns, duration, info["generation"]))

    def close(self) -> None:
        """Watch no more. May be called twice."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
