"""The thread that reads the providers on a schedule, and does nothing else.

It makes no CUDA call (one would break the capture of a graph in another thread), writes no log and
no file, and builds no records: each read becomes one tuple in a ring, which another thread drains.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from telemetry.clock import now_ns
from telemetry.providers.base import Provider, Tier
from telemetry.records import Value
from telemetry.ring import Ring

SLOW_PERIOD_NS = 1_000_000_000

# t0_ns, t1_ns, position of the provider, tier, values in the order of `Provider.names`.
Row: TypeAlias = tuple[int, int, int, Tier, tuple[Value, ...]]


class Sampler:
    """Samples providers from `start` to `stop`.

    The schedule is absolute: the n-th tick is due n periods after the first. Ticks that the thread
    was too late for are skipped and counted, never made up for.

    Args:
        providers: What to read.
        period_s: Time between ticks in seconds.
        capacity: Reads kept until they are drained.
        now: The clock in nanoseconds.
        wait: Waits for a time in seconds or until the sampler is stopped, and tells whether it is.

    Attributes:
        rows: What was read, until drained.
        num_ticks: Ticks made.
        num_late_ticks: Ticks skipped.
        in_call_ns: Time inside of reads.
        worst_tick_ns: Longest time inside of the reads of one tick.
        cpu_ns: Processor time of the thread.
        device_lost_at: When a provider found its device gone, on the run's clock; else None.
        failure: What ended the thread against its will; else None.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        *,
        period_s: float,
        capacity: int = 8192,
        now: Callable[[], int] = now_ns,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.rows: Ring[Row] = Ring(capacity)
        self.num_ticks = 0
        self.num_late_ticks = 0
        self.in_call_ns = 0
        self.worst_tick_ns = 0
        self.cpu_ns = 0
        self.device_lost_at: int | None = None
        self.failure: Exception | None = None
        self._providers = tuple(providers)
        # Who has nothing to read in a tier is not asked.
        self._fast = self._readers(Tier.FAST)
        self._slow = self._readers(Tier.SLOW)
        self._period_ns = round(period_s * 1e9)
        self._now = now
        self._stop = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self._wait = wait or self._stop.wait
        self._thread = threading.Thread(target=self._run, name="telemetry-sampler", daemon=True)

    def _readers(self, tier: Tier) -> tuple[tuple[int, Provider], ...]:
        return tuple((i, p) for i, p in enumerate(self._providers) if p.names(tier))

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Sample no more, and wait for the thread's end. May be called twice."""
        self._stop.set()
        self._go.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """Sample no more until `resume`. A tick that has begun is completed."""
        self._go.clear()

    def resume(self) -> None:
        """Sample again, on a schedule that begins now."""
        self._go.set()

    def _run(self) -> None:
        try:
            self.loop()
        except Exception as error:  # noqa: BLE001 - a bug of ours must reach the user, not stderr
            self.failure = error

    def loop(self) -> None:
        """Sample until stopped, or until a device is lost; the body of the thread."""
        now, period = self._now, self._period_ns
        due = now()
        slow_due = due
        while not self._stop.is_set():
            if not self._go.is_set():
                self._go.wait()
                due = slow_due = now()
                continue
            delay = due - now()
            if delay > 0:
                if self._wait(delay / 1e9):
                    return
                continue  # it may have been paused meanwhile, or woken early
            is_slow = now() >= slow_due
            self._tick(is_slow)
            if self.device_lost_at is not None:
                return
            if is_slow:
                slow_due += SLOW_PERIOD_NS * max(1, -(-(now() - slow_due) // SLOW_PERIOD_NS))
            due += period
            num_missed = (now() - due) // period
            if num_missed > 0:
                self.num_late_ticks += num_missed
                due += num_missed * period

    def _tick(self, is_slow: bool) -> None:
        spent = self._in_call(self._fast, Tier.FAST)
        if is_slow:
            spent += self._in_call(self._slow, Tier.SLOW)
        self.num_ticks += 1
        self.in_call_ns += spent
        if spent > self.worst_tick_ns:
            self.worst_tick_ns = spent
        self.cpu_ns = time.thread_time_ns()

    def _in_call(self, readers: Sequence[tuple[int, Provider]], tier: Tier) -> int:
        """Read one tier of everybody; gives the time that it took."""
        now, push = self._now, self.rows.push
        spent = 0
        for i, provider in readers:
            t0 = now()
            values = provider.read(tier)
            t1 = now()
            push((t0, t1, i, tier, values))
            spent += t1 - t0
            if provider.lost is not None and self.device_lost_at is None:
                self.device_lost_at = t1
        return spent
