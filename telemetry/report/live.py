"""The last minute of a run that still goes on, in a terminal.

watch(Tail("run.jsonl").run)     # another process's run, by its file
watch(recorder.run)              # or this process's own
"""

import json
import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from telemetry.gaps import token_gaps
from telemetry.report import verdict
from telemetry.report.format import human
from telemetry.report.sensors import Readings, memory_sensor, rates, readings
from telemetry.report.terminal import held, spark
from telemetry.report.values import Unit
from telemetry.run import Run
from telemetry.series import Band, Readable, bands
from telemetry.sinks.jsonl import read_lines
from telemetry.stats import Distribution

WINDOW_S = 60.0
REFRESH_S = 1.0
SPARK_WIDTH = 24

_BULK = frozenset(("steps", "samples", "requests", "event"))


class Tail:
    """Follows the file of a run: its facts, and the recent part of the rest.

    What is older than twice the window is forgotten, so that a long run costs no more than a
    short one.

    Args:
        path: The file; it need not be complete.
        window_s: How far back to keep at least, in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, window_s: float = WINDOW_S) -> None:
        self._path = Path(path)
        self._keep_ns = int(2 * window_s * 1e9)
        self._offset = 0
        self._now_ns = 0
        self._facts: list[bytes] = []
        self._bulk: deque[tuple[int, bytes]] = deque()
        self._torn = b""

    def run(self) -> Run:
        """The run as of now.

        Raises:
            RunFileError: The file is not a run.
            OSError: It can't be read.
        """
        for line in self._new_lines():
            self._take(line)
        return read_lines([*self._facts, *(line for _, line in self._bulk)], name=str(self._path))

    def _new_lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = self._torn + file.read()
            self._offset = file.tell()
        *lines, self._torn = data.split(b"\n")
        yield from (line + b"\n" for line in lines)

    def _take(self, line: bytes) -> None:
        try:
            head = json.loads(line)
        except ValueError:
            head = None  # the reader of the whole says what is wrong with it
        if not isinstance(head, dict) or head.get("type") not in _BULK:
            self._facts.append(line)
            return
        # Requests have no time of their own: they end in steps of about the line before.
        self._now_ns = head.get("t_ns", self._now_ns)
        self._bulk.append((self._now_ns, line))
        while self._bulk[0][0] < self._now_ns - self._keep_ns:
            self._bulk.popleft()


@attrs.frozen
class Row:
    """A line of a frame: a figure, its course over the window, and what to compare it with."""

    label: str
    value: str
    course: str
    note: str = ""


@attrs.frozen
class Frame:
    """What there is to see at one moment."""

    title: str
    status: str
    rows: tuple[Row, ...]


def frame(run: Run, *, window_s: float = WINDOW_S) -> Frame:
    """The last `window_s` seconds of a run. Pure."""
    end_s = run.duration_ns / 1e9
    start_s = max(0.0, end_s - window_s)
    rows = (*_step_rows(run, start_s, end_s), *_sensor_rows(run, start_s, end_s))
    state = "ended" if run.ended else "running"
    return Frame(
        verdict.title(run),
        f"{state}, {human(end_s, 's')}; last {human(end_s - start_s, 's')}",
        rows,
    )


def render(frame: Frame) -> RenderableType:
    """A frame as text for a terminal."""
    grid = Grid.grid(padding=(0, 2))
    # Where the line is too short, it is the note that gives way.
    for widths in (
        [len(row.label) for row in frame.rows],
        [len(row.value) for row in frame.rows],
        [SPARK_WIDTH],
    ):
        grid.add_column(no_wrap=True, min_width=max(widths, default=0))
    grid.add_column(no_wrap=True)
    for row in frame.rows:
        value = Text(row.value, style="bold", justify="right")
        grid.add_row(row.label, value, Text(row.course, style="cyan"), Text(row.note, style="dim"))
    head = Text.assemble((frame.title, "bold"), "  ", (frame.status, "dim"))
    return Group(head, grid if frame.rows else Text("No step yet.", style="dim"))


def watch(
    source: Callable[[], Run],
    console: Console | None = None,
    *,
    window_s: float = WINDOW_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show frames until the run ends, or until Ctrl-C."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run = source()
            live.update(render(frame(run, window_s=window_s)), refresh=True)
            if run.ended:
                return
            sleep(REFRESH_S)


def _step_rows(run: Run, start_s: float, end_s: float) -> Iterator[Row]:
    steps, zero = run.steps, run.info.start_mono_ns
    first = bisect_left(steps.t1_ns, zero + int(start_s * 1e9))
    ends = [(t - zero) / 1e9 for t in steps.t1_ns[first:]]
    if not ends:
        return
    # A run that began within the window has no rate before its first step.
    since_s = max(start_s, (steps.t0_ns[first] - zero) / 1e9)
    length_s = max(end_s - since_s, 1e-9)
    sampled = steps.sampled[first:]

    def course(values: Readable, top: float | None = None) -> str:
        return _course(ends, values, start_s, end_s, top)

    num_tokens = [len(ids) for ids in sampled]
    per_s = human(sum(num_tokens) / length_s, "tokens/s")
    yield Row("Tokens", per_s, _sums(ends, num_tokens, start_s, end_s))
    yield Row(
        "Steps", f"{len(ends) / length_s:.1f} /s", _sums(ends, [1] * len(ends), start_s, end_s)
    )
    num_rows, num_waiting = steps.num_rows[first:], steps.num_waiting[first:]
    yield Row(
        "Batch",
        f"{num_rows[-1]} row{'s' * (num_rows[-1] != 1)}",
        course(num_rows),
        f"{num_waiting[-1]} waiting",
    )
    used = steps.num_used_blocks[first:]
    total = steps.num_free_blocks[-1] + used[-1]
    note = f"of {total:,}, {steps.num_cached_blocks[-1]:,} cached"
    yield Row("K/V blocks", f"{used[-1]:,}", course(used, float(total)), note)
    gaps = token_gaps(ends, sampled)
    itl = gaps.itl()
    if itl is not None:
        tail = next(p for p in reversed(itl.percentiles) if p.value is not None)
        values = _course([ends[step] for step in gaps.step], gaps.itl_s, start_s, end_s)
        p50 = human(itl.percentile("p50").value or 0.0, "s")
        note = f"{tail.name} {human(tail.value or 0.0, 's')}, max {human(itl.max, 's')}"
        yield Row("ITL p50", p50, values, note)
    ttft = Distribution.of(
        (r.first_token_ns - r.arrival_ns) / 1e9
        for r in run.requests
        if r.first_token_ns is not None and r.first_token_ns >= zero + start_s * 1e9
    )
    if ttft is not None:
        p50 = human(ttft.percentile("p50").value or 0.0, "s")
        num = ttft.num_samples
        note = f"max {human(ttft.max, 's')}, {num} request{'s' * (num != 1)}"
        yield Row("TTFT p50", p50, "", note)


def _sensor_rows(run: Run, start_s: float, end_s: float) -> Iterator[Row]:
    cpu, joules = readings(run, "host.cpu_ns"), readings(run, "host.energy_uj")
    levels: tuple[tuple[str, Readings | None, Unit], ...] = (
        ("Memory", readings(run, memory_sensor(run)), "bytes"),
        ("GPU power", readings(run, "nvml.power_mw"), "W"),
        ("CPU power", rates(joules, "W") if joules else None, "W"),
        ("SM clock", readings(run, "nvml.sm_clock_mhz"), "MHz"),
        ("GPU temperature", readings(run, "nvml.temperature_c"), "celsius"),
        ("Cores busy", rates(cpu, "count") if cpu else None, "count"),
    )
    for label, found, unit in levels:
        recent = found.within(start_s, end_s) if found else None
        if recent is not None and recent.values:
            course = _course(recent.times_s, recent.values, start_s, end_s, is_sampled=True)
            note = f"up to {human(max(recent.values), unit)}"
            yield Row(label, human(recent.values[-1], unit), course, note)


def _course(
    times: Readable,
    values: Readable,
    start_s: float,
    end_s: float,
    top: float | None = None,
    *,
    is_sampled: bool = False,
) -> str:
    columns: Sequence[Band | None] = bands(times, values, start_s, end_s, SPARK_WIDTH)
    if is_sampled:
        columns = held(columns)
    return spark([math.nan if band is None else band.high for band in columns], top)


def _sums(times: Sequence[float], counts: Sequence[int], start_s: float, end_s: float) -> str:
    """How many fell into each column."""
    sums = [0] * SPARK_WIDTH
    for at_s, count in zip(times, counts, strict=True):
        share = (at_s - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        sums[min(SPARK_WIDTH - 1, int(share * SPARK_WIDTH))] += count
    return spark(sums)
