"""One recording while it goes on: its providers, its threads and its lines."""

import contextlib
import itertools
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from telemetry.clock import anchor, now_ns
from telemetry.errors import DeviceLostError, TelemetryError
from telemetry.feed import LiveSink
from telemetry.ledger import MemoryFacts, build_ledger
from telemetry.providers.base import Provider, Tier, read_all
from telemetry.providers.gc_watch import GcWatch
from telemetry.providers.host import open_host
from telemetry.providers.nvml import open_nvml
from telemetry.providers.torch_alloc import open_torch_allocator
from telemetry.records import SCHEMA_VERSION, Event, RunInfo, Value, Window
from telemetry.ring import Ring
from telemetry.sampler import SLOW_PERIOD_NS, Sampler
from telemetry.sinks.jsonl import Sink
from telemetry.writer import Writer

# Steps kept until the writer takes them, which it does each second.
STEP_CAPACITY = 1 << 16
AT_EDGES = (Tier.FAST, Tier.SLOW, Tier.EDGES)

_FACTS = ("engine", "model", "device", "config", "memory", "graphs")
_PEAK = "torch.allocated_peak_bytes"


class Engine(Protocol):
    """What is asked of an engine."""

    def describe(self) -> dict[str, Any]:
        """Facts that can be written as JSON: engine, model, device, config, memory, graphs."""

    def subscribe(self, hook: Callable[[Any], None], /) -> Callable[[], None]:
        """Have the hook called with a record of each step; gives what ends that."""


def open_providers(device: Mapping[str, Any], gc_watch: GcWatch) -> Iterator[Provider]:
    """The providers for the device that an engine describes."""
    yield open_host(gc_watch)
    yield open_torch_allocator(device)
    if device.get("type") == "cuda":
        yield open_nvml(device.get("uuid"))


class Session:
    """Records from its construction until `close`.

    Args:
        engine: What to record.
        sink: Where to; the session closes it.
        is_live: Whether to sample between windows' edges.
        period_s: Time between two samples in seconds.
        live_sinks: Who else gets the steps and samples.

    Attributes:
        sink: As given.
        writer: Writes to it.
    """

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        *,
        is_live: bool,
        period_s: float,
        live_sinks: Sequence[LiveSink] = (),
    ) -> None:
        self.sink = sink
        self._engine = engine
        self._windows: dict[int, Window] = {}
        self._window_ids = itertools.count()
        self._peak_bytes: int | None = None
        self._lost_at: int | None = None  # found at an edge
        self._is_paused = False
        self._is_closed = False
        with contextlib.ExitStack() as stack:
            stack.callback(sink.close)
            facts = engine.describe()
            self._facts = {key: facts.get(key) or {} for key in _FACTS}
            gc_watch = GcWatch()
            stack.callback(gc_watch.close)
            self._providers: list[Provider] = []
            for provider in open_providers(self._facts["device"], gc_watch):
                stack.callback(provider.close)
                self._providers.append(provider)
            steps: Ring[Any] = Ring(STEP_CAPACITY)
            # The engine calls the ring itself: nothing of ours stands between.
            self._hook = steps.push
            self._sampler = Sampler(self._providers, period_s=period_s) if is_live else None
            self.writer = Writer(
                sink,
                steps=steps,
                sampler=self._sampler,
                gc_watch=gc_watch,
                providers=self._providers,
                periods_s=_periods_s(period_s) if is_live else {},
                hook_ns=_measure_hook_ns(),
                live_sinks=live_sinks,
            )
            self._write_header("live" if is_live else "edges", period_s)
            self.begin_window("run", None)
            self._write_ledger(self._windows[0].begin)
            self._unsubscribe = engine.subscribe(self._hook)
            self._stack = stack.pop_all()
        self.writer.start()
        if self._sampler is not None:
            self._sampler.start()

    @property
    def device_lost_at(self) -> int | None:
        """When the device was found gone, on the run's clock."""
        sampled = None if self._sampler is None else self._sampler.device_lost_at
        return self._lost_at if sampled is None else sampled

    def read(self, tiers: Sequence[Tier]) -> dict[str, Value]:
        """Every sensor of these tiers now."""
        values: dict[str, Value] = {}
        for provider in self._providers:
            values |= read_all(provider, tiers)
        if self._lost_at is None and any(p.lost is not None for p in self._providers):
            self._lost_at = now_ns()
        peak = values.get(_PEAK)
        if peak is not None:
            # Each read starts the peak anew.
            self._peak_bytes = max(int(peak), self._peak_bytes or 0)
        return values

    def begin_window(self, name: str, parent: int | None) -> int:
        """Open a window; gives its id."""
        window_id = next(self._window_ids)
        values = self.read(AT_EDGES)
        # Taken after the reads, and the end before them: their time is not the window's.
        window = Window(window_id, name, now_ns(), None, parent, begin=values)
        self._windows[window_id] = window
        self.writer.write({"type": "window", **attrs.asdict(window)})
        return window_id

    def end_window(self, window_id: int) -> Mapping[str, Value]:
        """Close a window; gives what was read then."""
        if self._is_closed:
            return {}  # the run has ended inside of the window
        end_ns = now_ns()
        values = self.read(AT_EDGES)
        window = attrs.evolve(self._windows.pop(window_id), t1_ns=end_ns, end=values)
        self.writer.write({"type": "window", **attrs.asdict(window)})
        return values

    def pause(self) -> None:
        """Neither hook steps nor sample until `resume`."""
        if self._is_paused:
            return
        self._is_paused = True
        self._unsubscribe()
        if self._sampler is not None:
            self._sampler.pause()
        self.writer.write_event(Event(now_ns(), "pause"))

    def resume(self) -> None:
        """Go on after `pause`."""
        if not self._is_paused:
            return
        self._is_paused = False
        self.writer.write_event(Event(now_ns(), "resume"))
        if self._sampler is not None:
            self._sampler.resume()
        self._unsubscribe = self._engine.subscribe(self._hook)

    def close(self) -> None:
        """End the threads and complete the run. May be called twice."""
        if self._is_closed:
            return
        if not self._is_paused:
            self._unsubscribe()
        # The reads come first, while the engine's memory is what it was.
        values = self.end_window(0)
        self._is_closed = True
        with self._stack:
            if self._sampler is not None:
                self._sampler.stop()
            self.writer.stop()
            self.writer.drain()
            self._write_facts()
            self._write_ledger(values)
            self.writer.write_sensors()
            self.writer.write({"type": "anchor", **attrs.asdict(anchor())})
            self.writer.write_overhead()
            self.writer.end()

    def raise_failure(self) -> None:
        """Raise what ended one of the threads.

        Raises:
            TelemetryError: From that.
        """
        failure = self.writer.failure
        if failure is None and self._sampler is not None:
            failure = self._sampler.failure
        if failure is not None:
            raise TelemetryError(
                f"The run could not be recorded to its end: {failure}. What was written before is "
                "readable."
            ) from failure

    def raise_lost(self) -> None:
        """Raise if the device is gone.

        Raises:
            DeviceLostError: With the reason.
        """
        for provider in self._providers:
            if provider.lost is not None:
                at = self.device_lost_at
                since = "" if at is None else f", {(now_ns() - at) / 1e9:.1f} s ago"
                raise DeviceLostError(f"The device is gone{since}: {provider.lost}.")

    def _write_header(self, mode: str, period_s: float) -> None:
        start = anchor()
        device = dict(self._facts["device"])
        host: dict[str, Any] = {"hostname": platform.node(), "os": platform.platform()}
        for provider in self._providers:
            if provider.name == "host":
                host |= provider.facts()
            else:
                # What the engine says of its device counts: it is what runs on it.
                device = {**provider.facts(), **device}
        facts = {**self._facts, "device": device}
        info = RunInfo(
            v=SCHEMA_VERSION,
            run_id=uuid.uuid4().hex,
            start_wall_ns=start.wall_ns,
            start_mono_ns=start.mono_ns,
            mode=mode,
            period_s=period_s,
            host=host,
            **facts,
        )
        self._facts = facts
        self.writer.write({"type": "run", **attrs.asdict(info)})
        self.writer.write({"type": "anchor", **attrs.asdict(start)})
        self.writer.write_sensors()

    def _write_facts(self) -> None:
        """What the engine says at the end, if it differs: graphs are captured after the start."""
        now = self._engine.describe()
        device = {**self._facts["device"], **(now.get("device") or {})}
        facts = {**{key: now.get(key) or {} for key in _FACTS}, "device": device}
        if facts != self._facts:
            self._facts = facts
            self.writer.write({"type": "facts", **facts})

    def _write_ledger(self, values: Mapping[str, Value]) -> None:
        facts = MemoryFacts(
            device=self._facts["device"],
            memory=self._facts["memory"],
            graphs=self._facts["graphs"],
            values={**values, _PEAK: self._peak_bytes},
            reasons=self._reasons(),
            touched_blocks=self.writer.touched_blocks,
        )
        self.writer.write({"type": "ledger", **attrs.asdict(build_ledger(now_ns(), facts))})

    def _reasons(self) -> dict[str, str]:
        """Sensor's name -> why it has no value."""
        reasons = {}
        for provider in self._providers:
            for sensor in provider.sensors():
                if sensor.reason is not None:
                    reasons[sensor.name] = sensor.reason
                elif provider.lost is not None:
                    reasons[sensor.name] = provider.lost
                elif sensor.tier == Tier.MANUAL.value:
                    reasons[sensor.name] = (
                        f"its read takes {sensor.cost_us:.0f} us: only done when asked for"
                    )
        return reasons


def _periods_s(period_s: float) -> dict[str, float]:
    """Tier -> time between its samples."""
    return {Tier.FAST.value: period_s, Tier.SLOW.value: max(period_s, SLOW_PERIOD_NS / 1e9)}


def _measure_hook_ns(num_calls: int = 1000) -> int:
    """What one call of the step hook takes on this machine."""
    push = Ring[Any](num_calls).push
    begin = time.perf_counter_ns()
    for _ in range(num_calls):
        push(None)
    return (time.perf_counter_ns() - begin) // num_calls
