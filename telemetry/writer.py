"""The thread that turns what the rings hold into lines.

It is a thread of its own because encoding holds the interpreter: in the step hook it would delay
the engine, in the sampler the samples. It works in chunks of about 0.1 ms of processor time and
sleeps between them, so that the engine's thread never waits long for its turn.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs

from telemetry.clock import anchor, now_ns
from telemetry.feed import Feed, LiveSink
from telemetry.providers.base import Provider, Tier
from telemetry.providers.gc_watch import GcWatch
from telemetry.records import Event, Overhead
from telemetry.ring import Ring
from telemetry.sampler import Row, Sampler
from telemetry.sinks.jsonl import Sink, encode_requests, encode_samples, encode_steps

DRAIN_PERIOD_S = 1.0
ANCHOR_PERIOD_NS = 60_000_000_000
REST_S = 0.001  # between two chunks
MIN_CHUNK, MAX_CHUNK = 16, 256
CHUNK_NS = 100_000
BACKLOG = 4096  # steps; from here on a long chunk is better than a step lost


class Writer:
    """Drains rings into a sink, by a thread of its own from `start` to `stop`.

    Args:
        sink: Takes the lines; stays the caller's to close.
        steps: The engine's step records.
        sampler: Whose samples to write; None if there is none.
        gc_watch: Whose pauses to write.
        providers: The sampler's providers, in its order.
        periods_s: Tier -> time between its samples.
        hook_ns: What a call of the step hook takes.
        live_sinks: Who else gets the steps and samples.

    Attributes:
        failure: Why nothing is written any more; else None.
        touched_blocks: The largest share of the K/V blocks that held something at once, from 0 to
            1.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        steps: Ring[Any],
        sampler: Sampler | None,
        gc_watch: GcWatch,
        providers: Sequence[Provider],
        periods_s: Mapping[str, float] | None = None,
        hook_ns: int = 0,
        live_sinks: Sequence[LiveSink] = (),
    ) -> None:
        self.failure: Exception | None = None
        self.touched_blocks = 0.0
        self._sink = sink
        self._steps = steps
        self._sampler = sampler
        self._gc_watch = gc_watch
        self._providers = tuple(providers)
        self._periods_s = dict(periods_s or {})
        self._hook_ns = hook_ns
        self._feed = Feed(live_sinks)
        self._num_steps = 0
        self._worst_chunk_ns = 0
        self._cpu_ns = 0
        self._chunk = MIN_CHUNK
        self._num_late_ticks = 0
        self._was_lost = False
        self._has_ended = False
        self._reasons = self._sensor_reasons()
        self._next_anchor_ns = now_ns() + ANCHOR_PERIOD_NS
        # Whoever writes or drains holds it; the step hook and the sampler never do.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-writer", daemon=True)

    def start(self) -> None:
        """Begin to drain about each second."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is left in the rings stays there. May be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def end(self) -> None:
        """Write that the run has ended; nothing is written after that."""
        with self._lock:
            self._write({"type": "end", "t_ns": now_ns()})
            self._has_ended = True

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line now, from any thread."""
        with self._lock:
            self._write(line)

    def write_event(self, event: Event) -> None:
        """Write an event now, from any thread."""
        self.write({"type": "event", **attrs.asdict(event)})

    def write_sensors(self) -> None:
        """Write every sensor with its present status."""
        sensors = [
            {**attrs.asdict(s), "period_s": self._periods_s.get(s.tier) if s.available else None}
            for provider in self._providers
            for s in provider.sensors()
        ]
        self.write({"type": "sensors", "t_ns": now_ns(), "sensors": sensors})

    def write_overhead(self) -> None:
        """Write what the recorder itself has cost so far."""
        self.write({"type": "overhead", "t_ns": now_ns(), **attrs.asdict(self.overhead())})

    def overhead(self) -> Overhead:
        """What the recorder itself has cost so far."""
        sampler = self._sampler
        return Overhead(
            num_ticks=0 if sampler is None else sampler.num_ticks,
            num_late_ticks=0 if sampler is None else sampler.num_late_ticks,
            in_call_ns=0 if sampler is None else sampler.in_call_ns,
            worst_tick_ns=0 if sampler is None else sampler.worst_tick_ns,
            sampler_cpu_ns=0 if sampler is None else sampler.cpu_ns,
            num_samples_dropped=0 if sampler is None else sampler.rows.num_lost,
            writer_cpu_ns=self._cpu_ns,
            worst_chunk_ns=self._worst_chunk_ns,
            hook_ns=self._hook_ns,
            num_steps=self._num_steps,
            num_steps_dropped=self._steps.num_lost,
            num_events_dropped=self._gc_watch.pauses.num_lost,
            num_lines_dropped=self._sink.num_lines_dropped,
            num_bytes=self._sink.num_bytes,
        )

    def drain(self, *, rest_s: float = 0.0) -> None:
        """Write all that the rings hold, with a rest between two chunks.

        Whatever goes wrong becomes the `failure`: it is for the user to see, when the run is read
        or closed, and not for whoever happens to drain.
        """
        if self.failure is not None:
            return
        try:
            self._drain(rest_s)
        except Exception as error:  # noqa: BLE001 - as said
            self.failure = error

    def _drain(self, rest_s: float) -> None:
        for drain_chunk in (
            self._drain_steps,
            self._drain_samples,
            self._drain_pauses,
            self._feed.hand_on,
        ):
            more = True
            while more:
                with self._lock:
                    begin = time.thread_time_ns()
                    more = drain_chunk()
                    self._account(time.thread_time_ns() - begin)
                if rest_s:
                    time.sleep(rest_s)
        self._note_changes()

    def _run(self) -> None:
        while not self._stop.wait(DRAIN_PERIOD_S) and self.failure is None:
            self.drain(rest_s=REST_S)
            if now_ns() >= self._next_anchor_ns:
                self._next_anchor_ns += ANCHOR_PERIOD_NS
                self.write({"type": "anchor", **attrs.asdict(anchor())})
                self.write_overhead()
            self._cpu_ns = time.thread_time_ns()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.failure is not None or self._has_ended:
            return
        try:
            self._sink.write(line)
        except OSError as error:
            # Such as a full disk: what is written so far stays readable, and the engine goes on.
            self.failure = error

    def _account(self, spent_ns: int) -> None:
        """Keep chunks near their bound, whatever the machine and the batch."""
        if spent_ns > CHUNK_NS:
            self._chunk = max(MIN_CHUNK, self._chunk // 2)
        elif spent_ns < CHUNK_NS // 4:
            self._chunk = min(MAX_CHUNK, self._chunk * 2)
        self._worst_chunk_ns = max(self._worst_chunk_ns, spent_ns)

    def _drain_steps(self) -> bool:
        size = self._chunk if len(self._steps) < BACKLOG else MAX_CHUNK
        records = self._steps.take(size)
        self._num_steps += len(records)
        self._feed.add_steps(records)
        records.sort(key=attrgetter("index"))  # of hooks that overlapped, the later may come first
        for line in map(encode_steps, _consecutive(records)):
            self._write(line)
        finished = [request for record in records if record.finished for request in record.finished]
        if finished:
            self._write(encode_requests(finished))
        if records:
            fullest = max(records, key=_touched_blocks)
            num_blocks = fullest.num_used_blocks + fullest.num_free_blocks
            if num_blocks:  # the same in every step
                self.touched_blocks = max(
                    self.touched_blocks, _touched_blocks(fullest) / num_blocks
                )
        return len(records) == size

    def _drain_samples(self) -> bool:
        if self._sampler is None:
            return False
        size = MAX_CHUNK // 16
        rows = self._sampler.rows.take(size)
        groups: dict[tuple[int, Tier], list[Row]] = {}
        for row in rows:
            groups.setdefault((row[2], row[3]), []).append(row)
            names = self._providers[row[2]].names(row[3])
            self._feed.add_sample(names, row[4], row[1] - row[0])
        for (i, tier), group in groups.items():
            provider = self._providers[i]
            reads = [(t0, t1, values) for t0, t1, _, _, values in group]
            self._write(encode_samples(provider.name, tier.value, provider.names(tier), reads))
        return len(rows) == size

    def _drain_pauses(self) -> bool:
        pauses = self._gc_watch.pauses.take(MIN_CHUNK)
        for t_ns, duration_ns, generation in pauses:
            data = {"duration_ns": duration_ns, "generation": generation}
            self._write({"type": "event", "t_ns": t_ns, "kind": "gc", "data": data})
        return len(pauses) == MIN_CHUNK

    def _sensor_reasons(self) -> dict[str, str]:
        """Sensors that are off, and why."""
        return {
            sensor.name: sensor.reason
            for provider in self._providers
            for sensor in provider.sensors()
            if sensor.reason is not None
        }

    def _note_changes(self) -> None:
        """Write what happened to the sampler, its sensors and sinks since the last look."""
        while self._feed.failures:
            sink, reason = self._feed.failures.pop(0)
            self.write_event(Event(now_ns(), "sink_off", {"sink": sink, "reason": reason}))
        sampler = self._sampler
        num_late = 0 if sampler is None else sampler.num_late_ticks
        if num_late > self._num_late_ticks:
            data = {"num_ticks": num_late - self._num_late_ticks}
            self._num_late_ticks = num_late
            self.write_event(Event(now_ns(), "late", data))
        lost = next((p.lost for p in self._providers if p.lost is not None), None)
        if lost is not None and not self._was_lost:
            self._was_lost = True
            lost_at = None if sampler is None else sampler.device_lost_at
            self.write_event(Event(lost_at or now_ns(), "device_lost", {"reason": lost}))
        reasons = self._sensor_reasons()
        for name in reasons.keys() - self._reasons.keys():
            self.write_event(
                Event(now_ns(), "sensor_off", {"sensor": name, "reason": reasons[name]})
            )
        if len(reasons) != len(self._reasons):
            self.write_sensors()
        self._reasons = reasons


def _touched_blocks(record: Any) -> int:
    """K/V blocks that hold something, at least: a block in use may be among the cached ones."""
    return max(int(record.num_used_blocks), int(record.num_cached_blocks))


def _consecutive(records: Sequence[Any]) -> list[list[Any]]:
    """Stretches of records without a gap between their indices."""
    stretches: list[list[Any]] = []
    for record in records:
        if stretches and stretches[-1][-1].index + 1 == record.index:
            stretches[-1].append(record)
        else:
            stretches.append([record])
    return stretches
