"""A run as it was read back: columns for what there are many of, values for the rest."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from telemetry.clock import mono_to_wall_ns
from telemetry.records import (
    Anchor,
    Event,
    Ledger,
    ObserverEffect,
    Overhead,
    Request,
    RunInfo,
    Sensor,
    Step,
    Value,
    Window,
)

# In quotes: Python 3.11 can not subscript it.
IntColumn: TypeAlias = "array[int]"


def int_column() -> IntColumn:
    """An empty column of 64-bit integers, for times."""
    return array("q")


def count_column() -> IntColumn:
    """An empty column of 32-bit integers."""
    return array("i")


@attrs.define
class StepTable:
    """Steps by column, `[N]` each, in order; the columns are the fields of `Step`.

    Iterating gives `Step`s, and so does an index. `numpy.asarray` of a column of integers shares
    its memory.
    """

    index: IntColumn = attrs.field(factory=int_column)
    t0_ns: IntColumn = attrs.field(factory=int_column)
    t1_ns: IntColumn = attrs.field(factory=int_column)
    num_rows: IntColumn = attrs.field(factory=count_column)
    num_decode_tokens: IntColumn = attrs.field(factory=count_column)
    num_prefill_tokens: IntColumn = attrs.field(factory=count_column)
    num_prefix_hit_tokens: IntColumn = attrs.field(factory=count_column)
    num_waiting: IntColumn = attrs.field(factory=count_column)
    num_running: IntColumn = attrs.field(factory=count_column)
    num_free_blocks: IntColumn = attrs.field(factory=count_column)
    num_used_blocks: IntColumn = attrs.field(factory=count_column)
    num_cached_blocks: IntColumn = attrs.field(factory=count_column)
    num_preempted: IntColumn = attrs.field(factory=count_column)
    mode: list[str] = attrs.field(factory=list)
    bucket: list[int | None] = attrs.field(factory=list)
    fallback: list[str | None] = attrs.field(factory=list)
    schedule_ns: IntColumn = attrs.field(factory=int_column)
    execute_ns: IntColumn = attrs.field(factory=int_column)
    postprocess_ns: IntColumn = attrs.field(factory=int_column)
    pack_ns: IntColumn = attrs.field(factory=int_column)
    submit_ns: IntColumn = attrs.field(factory=int_column)
    wait_ns: IntColumn = attrs.field(factory=int_column)
    sampled: list[tuple[int, ...]] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Step:
        return Step(*(column[i] for column in self._columns()))

    def __iter__(self) -> Iterator[Step]:
        return map(Step, *self._columns())

    def _columns(self) -> list[Any]:
        return [getattr(self, field.name) for field in attrs.fields(StepTable)]


@attrs.define
class Series:
    """One sensor over time: `[N]` each, in order of time.

    Attributes:
        t_ns: When each value was read (the end of the read).
        values: What was read; None where the read failed.
    """

    t_ns: IntColumn = attrs.field(factory=int_column)
    values: list[Value] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self.t_ns)


@attrs.frozen
class Run:
    """All that is known of a run, finished or cut off.

    Attributes:
        info: What was measured; the engine's facts are the latest that were written.
        sensors: Every sensor with its last known status.
        steps: The engine's steps.
        requests: Requests that ended, in order of their ends.
        series: Sensor's name -> its values, readings at windows' edges included.
        events: In order of time.
        windows: In order of id; the first is the run itself.
        ledgers: In order of time; the last is the one to show.
        anchors: To turn the run's clock into wall time.
        overhead: The last known cost of the recorder itself.
        observer_effect: If it was measured.
        last_ns: The latest time that the run tells of.
        ended: Whether it was closed properly; if not, what came after `last_ns` is missing.
        notes: What a reader should know of the file, in plain sentences: a torn last line, what
            was dropped, that it was cut off. Empty if there is nothing to say.
    """

    info: RunInfo
    sensors: tuple[Sensor, ...]
    steps: StepTable
    requests: tuple[Request, ...]
    series: Mapping[str, Series]
    events: tuple[Event, ...]
    windows: tuple[Window, ...]
    ledgers: tuple[Ledger, ...]
    anchors: tuple[Anchor, ...]
    overhead: Overhead
    observer_effect: ObserverEffect | None
    last_ns: int
    ended: bool
    notes: tuple[str, ...]

    @property
    def duration_ns(self) -> int:
        """From the start to the latest time that is told of."""
        return self.last_ns - self.info.start_mono_ns

    def wall_ns(self, t_ns: int) -> int:
        """A time of the run in nanoseconds since 1970."""
        start = Anchor(self.info.start_mono_ns, self.info.start_wall_ns)
        return mono_to_wall_ns(t_ns, [start, *self.anchors])

    def sensor(self, name: str) -> Sensor | None:
        """The sensor of that name."""
        return next((sensor for sensor in self.sensors if sensor.name == name), None)

    def get(self, name: str) -> Series:
        """The values of a sensor; an empty series if there are none."""
        return self.series.get(name) or Series()
