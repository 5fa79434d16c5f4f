"""What else went on while something was measured: pauses for GC, and time that others took.

A number from a machine that was throttled or shared is not wrong, but it is not about the code.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import psutil

STOLEN_SHARE = 0.02
"""More of the CPU time than this given to other guests is worth a warning."""


@attrs.frozen
class Disturbance:
    """What disturbed a measurement.

    Attributes:
        duration_s: How long was measured.
        gc_pauses_s: Length of each pause for garbage collection, in order.
        stolen_s: CPU time that the hypervisor gave to other guests, of all cores; None if the
            system does not tell.
        throttled_s: Time for which the control group was stopped by its CPU quota; None if it
            does not tell.
        num_switches: How often the process was made to wait for another; None on Windows.
        load_average: Processes that wanted to run, mean of the last minute; None if not told.
    """

    duration_s: float
    gc_pauses_s: tuple[float, ...]
    stolen_s: float | None
    throttled_s: float | None
    num_switches: int | None
    load_average: float | None

    def warnings(self) -> list[str]:
        """What a reader of the numbers should know."""
        found = []
        if self.throttled_s:
            found.append(f"throttled: a CPU quota stopped the process for {self.throttled_s:.3f} s")
        if self.stolen_s is not None and self.duration_s > 0:
            share = self.stolen_s / (self.duration_s * (psutil.cpu_count() or 1))
            if share > STOLEN_SHARE:
                found.append(f"shared: other guests took {share:.0%} of the machine's CPU time")
        return found

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "duration_s": self.duration_s,
            "num_gc_pauses": len(self.gc_pauses_s),
            "gc_pauses_s": sum(self.gc_pauses_s),
            "longest_gc_pause_s": max(self.gc_pauses_s, default=0.0),
            "stolen_s": self.stolen_s,
            "throttled_s": self.throttled_s,
            "num_involuntary_switches": self.num_switches,
            "load_average": self.load_average,
        }


class DisturbanceWatch:
    """Watches for disturbances as long as it is entered."""

    def __init__(self) -> None:
        self._pauses_s: list[tuple[float, float]] = []
        self._gc_start_s = 0.0
        self._start: tuple[float, float | None, float | None, int | None] | None = None

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_gc)
        self._start = _counters()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._on_gc)

    def gc_pauses_within(self, start_s: float, end_s: float) -> list[float]:
        """Length of each pause in a window of `time.perf_counter`, in seconds."""
        return [end - begin for begin, end in self._pauses_s if start_s <= begin and end <= end_s]

    def so_far(self) -> Disturbance:
        """What there was since the start."""
        assert self._start is not None, "it was not started"
        then_s, stolen_s, throttled_s, switches = self._start
        now_s, stolen_now_s, throttled_now_s, switches_now = _counters()
        return Disturbance(
            duration_s=now_s - then_s,
            gc_pauses_s=tuple(end - begin for begin, end in self._pauses_s),
            stolen_s=_increase(stolen_s, stolen_now_s),
            throttled_s=_increase(throttled_s, throttled_now_s),
            num_switches=None
            if switches is None or switches_now is None
            else switches_now - switches,
            load_average=psutil.getloadavg()[0],
        )

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._gc_start_s = time.perf_counter()
        else:
            self._pauses_s.append((self._gc_start_s, time.perf_counter()))


@contextmanager
def settled_heap() -> Iterator[None]:
    """Collect garbage once and keep what is alive now out of later collections.

    A full collection walks every object of the process, and of torch alone there are hundreds of
    thousands. Long-lived services do the same after loading (`gc.freeze`).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _counters() -> tuple[float, float | None, float | None, int | None]:
    """(now, stolen, throttled, involuntary switches), each since some time in the past."""
    switches = None
    if sys.platform != "win32":
        switches = psutil.Process().num_ctx_switches().involuntary
    return time.perf_counter(), _stolen_s(), _throttled_s(), switches


def _increase(before: float | None, after: float | None) -> float | None:
    # max: the kernel's counter of stolen time is known to step back by a little.
    return None if before is None or after is None else max(after - before, 0.0)


def _stolen_s() -> float | None:
    """All cores together, where a virtual machine tells (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    return float(psutil.cpu_times().steal)


def _throttled_s(root: Path = Path("/")) -> float | None:
    """Of this process's control group (version 2), where it has one with a quota."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        for line in (root / "sys/fs/cgroup" / group / "cpu.stat").read_text().splitlines():
            name, value = line.split()
            if name == "throttled_usec":
                return int(value) * 1e-6
    except (OSError, StopIteration, ValueError):
        return None  # another system, or version 1
    return None
