r"""The canonical form of a run: JSON Lines, append-only, readable after a crash.

Every line is one JSON object that ends in `\n` and has a `type`; a line is given to the operating
system by one write as soon as it is complete, so that killing the process costs at most the last
second, and tears at most the last line. The first line is the `run`. A reader ignores lines of
types that it does not know. Times are in nanoseconds of `time.perf_counter_ns`, sizes in bytes;
`null` is "not available". Written and read here, in version 1 (`v` of the first line):

`run`       the fields of `RunInfo`.
`facts`     `engine model device config memory graphs` of `RunInfo` as they are now, where later
            facts replace earlier ones (engines capture graphs after their start).
`sensors`   `t_ns`, `sensors`: list of `Sensor` fields; a later line replaces the status.
`anchor`    the fields of `Anchor`: at the start, each minute, and at the end.
`steps`     `n` steps with consecutive indices by column: `index` and `t_ns` of the first (its
            begin); `gap_ns` from the end of one to the begin of the next (the first is 0);
            `dur_ns`; then the counts, `mode bucket fallback` and the parts `schedule_ns` ... of
            `Step`. `sampled`: list of `[repeat, ids]`, runs of steps that sampled the same
            sequences.
`requests`  `n` requests by column, the fields of `Request`; `seq_ids` is a list of lists.
`samples`   `n` reads of one `provider` and `tier` by column: `t_ns` of the first; `gap_ns` and
            `dur_ns` as for steps; `values`: sensor's name -> column.
`event`     the fields of `Event`.
`window`    the fields of `Window`; once at its begin with `t1_ns` null, and once more at its end.
`ledger`    the fields of `Ledger`, rows as a list of `LedgerRow` fields.
`overhead`  `t_ns` and the fields of `Overhead`, each minute and at the end.
`observer_effect`  the fields of `ObserverEffect`.
`end`       `t_ns`: the run was closed. Without it, the run was cut off.

A column is a list of `n` values, or one value that stands for all `n` of them. A column of `steps`
that is left out is 0 (`null` for `bucket` and `fallback`).
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from telemetry.sinks.jsonl_reader import read_lines, read_run

__all__ = [
    "JsonlFile",
    "JsonlMemory",
    "Sink",
    "encode_requests",
    "encode_samples",
    "encode_steps",
    "read_lines",
    "read_run",
]

STEP_COUNTS = (
    "num_rows",
    "num_decode_tokens",
    "num_prefill_tokens",
    "num_prefix_hit_tokens",
    "num_waiting",
    "num_running",
    "num_free_blocks",
    "num_used_blocks",
    "num_cached_blocks",
    "num_preempted",
)
STEP_PARTS = ("schedule", "execute", "postprocess", "pack", "submit", "wait")

# One call per record, and then columns: the writer encodes while the engine waits for its turn.
_step_fields = attrgetter(
    "start_s",
    "end_s",
    "mode",
    "sampled",
    *(f"{part}_s" for part in STEP_PARTS),
    *STEP_COUNTS,
    "bucket",
    "fallback",
)
_request_counts = (
    "num_prompt_tokens",
    "num_prefix_hit_tokens",
    "num_generated_tokens",
    "num_preemptions",
)

# Types of lines of which a run has many; the rest is needed to read them at all.
_BULK = frozenset(("steps", "samples", "requests", "event"))


class Sink(Protocol):
    """Where lines go. Calls come from one thread at a time."""

    num_bytes: int
    num_lines_dropped: int

    def write(self, line: Mapping[str, Any]) -> None:
        """Take one line. Raises OSError if it can not be kept."""

    def close(self) -> None:
        """Take no more lines. May be called twice."""

    def lines(self) -> Iterable[bytes]:
        """The lines taken so far."""


# What an engine describes may hold paths or enums: their text is better than no run.
_to_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


def _encode(line: Mapping[str, Any]) -> bytes:
    return _to_json(line).encode() + b"\n"


class JsonlFile:
    """Lines in a file; an earlier file at the path is replaced.

    Args:
        path: Where; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_bytes = 0
        self.num_lines_dropped = 0
        # Unbuffered: a line is one write, and nothing waits in the process when it is killed.
        self._file = self.path.open("wb", buffering=0)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        data = memoryview(_encode(line))
        while data:
            # A write may be short, as on a disk that is about to be full.
            written = self._file.write(data)
            self.num_bytes += written
            data = data[written:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def lines(self) -> Iterable[bytes]:
        """The lines in the file."""
        with self.path.open("rb") as file:
            yield from file


class JsonlMemory:
    """Lines in memory, bounded: the oldest steps, samples, requests and events make room.

    Args:
        max_bytes: Bound on these lines. The others are few, and always kept.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.num_bytes = 0
        self.num_lines_dropped = 0
        self._max_bytes = max_bytes
        self._bulk_bytes = 0
        self._kept: list[bytes] = []
        self._bulk: deque[bytes] = deque()

    def write(self, line: Mapping[str, Any]) -> None:
        """Keep one line, at the expense of the oldest ones if need be."""
        data = _encode(line)
        self.num_bytes += len(data)
        if line["type"] not in _BULK:
            self._kept.append(data)
            return
        self._bulk.append(data)
        self._bulk_bytes += len(data)
        while self._bulk_bytes > self._max_bytes:
            self._bulk_bytes -= len(self._bulk.popleft())
            self.num_lines_dropped += 1

    def close(self) -> None:
        """Nothing to do: the lines stay readable."""

    def lines(self) -> Iterable[bytes]:
        """The lines that are still there, the header first."""
        yield from [*self._kept, *self._bulk]


def to_ns(seconds: float) -> int:
    """Seconds on the clock of `time.perf_counter` as whole nanoseconds."""
    return round(seconds * 1e9)


def _ns_column(seconds: Iterable[float]) -> list[int]:
    return [round(s * 1e9) for s in seconds]


def _to_ns_or_none(seconds: float | None) -> int | None:
    return None if seconds is None else to_ns(seconds)


def _column(values: Sequence[Any]) -> Any:
    """A list of scalars, or the one value that all of them have."""
    first = values[0]
    return first if values.count(first) == len(values) else list(values)


def _times(t0_ns: Sequence[int], t1_ns: Sequence[int]) -> dict[str, Any]:
    """Begins and ends as small numbers."""
    gaps = [begin - end for begin, end in zip(t0_ns[1:], t1_ns, strict=False)]
    durations = [end - begin for begin, end in zip(t0_ns, t1_ns, strict=True)]
    return {"t_ns": t0_ns[0], "gap_ns": [0, *gaps], "dur_ns": durations}


def _runs(sampled: Iterable[tuple[int, ...]]) -> list[list[Any]]:
    return [[sum(1 for _ in group), list(ids)] for ids, group in groupby(sampled)]


def encode_steps(records: Sequence[Any]) -> dict[str, Any]:
    """One `steps` line of an engine's step records, at least one, with consecutive indices."""
    columns = zip(*map(_step_fields, records), strict=True)
    line = {
        "type": "steps",
        "n": len(records),
        "index": records[0].index,
        **_times(_ns_column(next(columns)), _ns_column(next(columns))),
        "mode": _column(next(columns)),
        "sampled": _runs(next(columns)),
    }
    for part in STEP_PARTS:
        seconds = next(columns)
        if any(seconds):
            line[f"{part}_ns"] = _column(_ns_column(seconds))
    for name in (*STEP_COUNTS, "bucket", "fallback"):
        column = _column(next(columns))
        if column is not None and column != 0:
            line[name] = column
    return line


def encode_requests(records: Sequence[Any]) -> dict[str, Any]:
    """One `requests` line of an engine's request records, at least one."""
    line = {
        "type": "requests",
        "n": len(records),
        "request_id": [str(record.request_id) for record in records],
        "seq_ids": [list(record.seq_ids) for record in records],
        "finish_reason": _column([str(record.finish_reason) for record in records]),
    }
    for name in ("arrival", "first_scheduled", "first_token", "finished"):
        seconds = map(attrgetter(f"{name}_s"), records)
        line[f"{name}_ns"] = _column([_to_ns_or_none(s) for s in seconds])
    for name in _request_counts:
        line[name] = _column([getattr(record, name) for record in records])
    return line


def encode_samples(
    provider: str,
    tier: str,
    names: Sequence[str],
    rows: Sequence[tuple[int, int, Sequence[Any]]],
) -> dict[str, Any]:
    """One `samples` line of reads `(t0_ns, t1_ns, values)`, at least one, of sensors `names`."""
    columns = zip(*(values for _, _, values in rows), strict=True)
    return {
        "type": "samples",
        "provider": provider,
        "tier": tier,
        "n": len(rows),
        **_times([row[0] for row in rows], [row[1] for row in rows]),
        "values": {n: _column(c) for n, c in zip(names, columns, strict=True)},
    }
