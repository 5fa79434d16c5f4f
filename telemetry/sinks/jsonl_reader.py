"""Reads a run back, finished or cut off anywhere; see `telemetry.sinks.jsonl` for the format."""

import json
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import attrs

from telemetry.errors import RunFileError, SchemaVersionError
from telemetry.records import (
    SCHEMA_VERSION,
    Anchor,
    Event,
    Ledger,
    LedgerRow,
    ObserverEffect,
    Overhead,
    Request,
    RunInfo,
    Sensor,
    Value,
    Window,
)
from telemetry.run import Run, Series, StepTable

MAX_BATCHES = 1024  # kept for steps to share

_FACTS = ("engine", "model", "device", "config", "memory", "graphs")


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run from its file.

    A torn last line, as a killed process leaves it, is left out and told of in `Run.notes`.

    Raises:
        SchemaVersionError: It was written in another version of the format.
        RunFileError: It is not a run, or a line before the last is broken.
        OSError: It can not be read.
    """
    with Path(path).open("rb") as file:
        return read_lines(file, name=str(path))


def read_lines(lines: Iterable[bytes], *, name: str = "the run") -> Run:
    r"""Read a run from its lines, each with its `\n`; `name` stands in errors."""
    reader = _Reader(name)
    for data in lines:
        reader.take(data)
    return reader.run()


def _fields(cls: type, line: Mapping[str, Any]) -> dict[str, Any]:
    """What of a line the class has a field for: later writers may add keys within a version."""
    known = attrs.fields_dict(cls)
    return {key: value for key, value in line.items() if key in known}


def _column(value: Any, n: int) -> Any:
    """`n` values from a column."""
    if isinstance(value, list):
        if len(value) != n:
            raise ValueError(f"a column has {len(value)} values, not {n}")
        return value
    return repeat(value, n)


def _times(line: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Begins and ends."""
    n = line["n"]
    begins, ends = [], []
    end = line["t_ns"]
    for gap, duration in zip(_column(line["gap_ns"], n), _column(line["dur_ns"], n), strict=True):
        begin = end + gap
        end = begin + duration
        begins.append(begin)
        ends.append(end)
    return begins, ends


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name
        self._num_lines = 0
        self._torn: str | None = None
        self._info: RunInfo | None = None
        self._sensors: dict[str, Sensor] = {}
        self._steps = StepTable()
        self._batches: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._requests: list[Request] = []
        self._series: dict[str, Series] = {}
        self._events: list[Event] = []
        self._windows: dict[int, Window] = {}
        self._ledgers: list[Ledger] = []
        self._anchors: list[Anchor] = []
        self._overhead = Overhead()
        self._observer_effect: ObserverEffect | None = None
        self._last_ns = 0
        self._ended = False

    def take(self, data: bytes) -> None:
        if self._torn is not None:
            raise RunFileError(f"{self._name}, line {self._num_lines}: {self._torn}.")
        self._num_lines += 1
        try:
            line = json.loads(data)
        except ValueError:
            # Only known to be the last line, and so forgiven, if no other follows.
            self._torn = f"not a JSON object: {data[:40]!r}"
            return
        if self._info is None:
            self._header(line)
            return
        try:
            self._dispatch(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunFileError(
                f"{self._name}, line {self._num_lines}: not as the format says "
                f"({type(error).__name__}: {error})."
            ) from error

    def _header(self, line: Any) -> None:
        if not isinstance(line, dict) or line.get("type") != "run" or "v" not in line:
            raise RunFileError(f"{self._name} is not a run: its first line does not describe one.")
        if line["v"] != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{self._name} is a run in version {line['v']} of the format; this library reads "
                f"version {SCHEMA_VERSION}. Read it with the release that wrote it."
            )
        try:
            self._info = RunInfo(**_fields(RunInfo, line))
        except TypeError as error:
            raise RunFileError(f"{self._name}: the first line lacks fields ({error}).") from error
        self._last_ns = self._info.start_mono_ns

    def _saw(self, t_ns: int) -> None:
        self._last_ns = max(self._last_ns, t_ns)

    def _dispatch(self, line: dict[str, Any]) -> None:
        match line["type"]:
            case "steps":
                self._add_steps(line)
            case "samples":
                self._add_samples(line)
            case "requests":
                self._add_requests(line)
            case "event":
                self._events.append(Event(**_fields(Event, line)))
                self._saw(line["t_ns"])
            case "window":
                self._add_window(Window(**_fields(Window, line)))
            case "sensors":
                self._sensors |= {s["name"]: Sensor(**_fields(Sensor, s)) for s in line["sensors"]}
            case "facts":
                assert self._info is not None
                facts = {key: line[key] for key in _FACTS if key in line}
                self._info = attrs.evolve(self._info, **facts)
            case "anchor":
                self._anchors.append(Anchor(**_fields(Anchor, line)))
                self._saw(line["mono_ns"])
            case "ledger":
                rows = tuple(LedgerRow(**_fields(LedgerRow, row)) for row in line["rows"])
                self._ledgers.append(Ledger(**{**_fields(Ledger, line), "rows": rows}))
            case "overhead":
                self._overhead = Overhead(**_fields(Overhead, line))
                self._saw(line["t_ns"])
            case "observer_effect":
                self._observer_effect = ObserverEffect(**_fields(ObserverEffect, line))
            case "end":
                self._ended = True
                self._saw(line["t_ns"])

    def _add_steps(self, line: dict[str, Any]) -> None:
        n, steps = line["n"], self._steps
        begins, ends = _times(line)
        sampled = [
            ids for count, found in line["sampled"] for ids in repeat(self._batch(found), count)
        ]
        if len(sampled) != n:
            raise ValueError(f"`sampled` covers {len(sampled)} steps, not {n}")
        known = {
            "index": range(line["index"], line["index"] + n),
            "t0_ns": begins,
            "t1_ns": ends,
            "sampled": sampled,
        }
        for field in attrs.fields(StepTable):
            default = None if field.name in ("bucket", "fallback") else 0
            values = known.get(field.name) or _column(line.get(field.name, default), n)
            getattr(steps, field.name).extend(values)
        self._saw(ends[-1])

    def _batch(self, ids: list[int]) -> tuple[int, ...]:
        """The ids, as one object for all the steps of a batch: most steps repeat an earlier one."""
        if len(self._batches) > MAX_BATCHES:
            self._batches.clear()
        batch = tuple(ids)
        return self._batches.setdefault(batch, batch)

    def _add_samples(self, line: dict[str, Any]) -> None:
        _, ends = _times(line)
        for name, values in line["values"].items():
            series = self._series.setdefault(name, Series())
            series.t_ns.extend(ends)
            series.values.extend(_column(values, line["n"]))
        self._saw(ends[-1])

    def _add_requests(self, line: dict[str, Any]) -> None:
        names = [field.name for field in attrs.fields(Request)]
        columns = [_column(line[name], line["n"]) for name in names if name != "seq_ids"]
        columns.insert(names.index("seq_ids"), map(tuple, line["seq_ids"]))
        self._requests += map(Request, *columns)
        self._saw(self._requests[-1].finished_ns)

    def _add_window(self, window: Window) -> None:
        self._windows[window.id] = window
        # The line of a window's end repeats its begin.
        t_ns, values = window.t0_ns, window.begin
        if window.t1_ns is not None:
            t_ns, values = window.t1_ns, window.end
        self._add_reading(t_ns, values)
        self._saw(t_ns)

    def _add_reading(self, t_ns: int, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            series = self._series.setdefault(name, Series())
            series.t_ns.append(t_ns)
            series.values.append(value)

    def run(self) -> Run:
        if self._info is None:
            why = "its first line is torn" if self._torn else "it is empty"
            raise RunFileError(f"{self._name} is not a run: {why}.")
        return Run(
            info=self._info,
            sensors=tuple(self._sensors.values()),
            steps=_by_index(self._steps),
            requests=tuple(self._requests),
            series={name: _in_order(series) for name, series in self._series.items()},
            events=tuple(sorted(self._events, key=lambda event: event.t_ns)),
            windows=tuple(self._windows[i] for i in sorted(self._windows)),
            ledgers=tuple(self._ledgers),
            anchors=tuple(self._anchors),
            overhead=self._overhead,
            observer_effect=self._observer_effect,
            last_ns=self._last_ns,
            ended=self._ended,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterable[str]:
        if self._torn is not None:
            yield f"The last line, {self._num_lines}, is torn and was left out."
        if not self._ended:
            yield (
                "The run was not closed: it was cut off, or still goes on. What came after its "
                "last line is missing."
            )
        dropped = self._overhead
        for num, what in (
            (dropped.num_steps_dropped, "steps"),
            (dropped.num_samples_dropped, "samples"),
            (dropped.num_events_dropped, "events"),
        ):
            if num:
                yield f"{num} {what} were lost because the writer did not keep up."
        if dropped.num_lines_dropped:
            yield (
                f"{dropped.num_lines_dropped} lines of the oldest steps and samples were dropped "
                "from memory; record to a file to keep all."
            )


def _by_index(steps: StepTable) -> StepTable:
    """By index: hooks of an engine that several threads step may overlap."""
    if all(a < b for a, b in pairwise(steps.index)):
        return steps
    order = sorted(range(len(steps)), key=steps.index.__getitem__)
    ordered = StepTable()
    for field in attrs.fields(StepTable):
        column = getattr(steps, field.name)
        getattr(ordered, field.name).extend(column[i] for i in order)
    return ordered


def _in_order(series: Series) -> Series:
    """By time: readings at windows' edges and samples come in lines of their own."""
    times = series.t_ns
    if all(a <= b for a, b in pairwise(times)):
        return series
    order = sorted(range(len(times)), key=times.__getitem__)
    ordered = Series()
    ordered.t_ns.extend(times[i] for i in order)
    ordered.values.extend(series.values[i] for i in order)
    return ordered
